"""Triton kernels, one file each: launcher, tile choice, kernel. They know tensors only and import neither model package.

Rows that are not packed are left as they were allocated. A row's result never depends, bit for bit, on which other rows share a call.
"""
