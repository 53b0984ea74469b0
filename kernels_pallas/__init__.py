"""The operations as Pallas Mosaic-GPU kernels for Hopper. `specfold_jax/backends/pallas.py` evaluates a forward pass on them."""
