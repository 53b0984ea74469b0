"""The operations of a check as Pallas Mosaic GPU kernels for Hopper. They take arrays and import neither model package."""
