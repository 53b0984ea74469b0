"""The PyTorch twin of `specfold_jax`: the same files, functions and argument names, plain or with Triton kernels.

Configurations, draft graphs and the reading of `config.json` are shared with the JAX side. Tensors live where the parameters live;
the decode loop's bookkeeping is kept on the host. fp32 comparisons need TF32 off, which is PyTorch's default for products:
`torch.set_float32_matmul_precision("highest")`.
"""
