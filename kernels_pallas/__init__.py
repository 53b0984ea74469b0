"""The operations as Pallas Mosaic-GPU kernels for Hopper. `check.py` evaluates a forward pass on them, `head.py` ranks its tokens."""
