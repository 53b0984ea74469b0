"""`python -m specfold_jax` is the command line `specfold`."""

from specfold_jax.cli import main

main()
