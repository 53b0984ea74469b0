"""`python -m specfold_jax.cli`."""

from specfold_jax.cli import main

main()
