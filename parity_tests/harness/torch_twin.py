"""The PyTorch twin beside the JAX side: parameters and arrays of one as the other's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.harness.devices import DEVICE
from specfold_torch_ref.models.convert import to_torch
from specfold_torch_ref.models.transformer import Params

# Tests run side by side; more threads than cores would wait for each other in every small product.
torch.set_num_threads(1)
FAST = {"xla_backend_optimization_level": 0} if DEVICE.type == "cpu" else {}  # for programs that run a few times only


def twin(checkpoint) -> Params:
    """A checkpoint's parameters on the Torch side."""
    return to_torch(checkpoint.params, checkpoint.model)


def to_jax(params: Params) -> dict[str, Any]:
    """The Torch side's parameters as JAX arrays: names are the same on both sides."""
    return jax.tree.map(
        lambda x: jnp.asarray(x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()), params
    )


def tensor(x: Any) -> torch.Tensor:
    """An array as a tensor, whole numbers as int64."""
    out = torch.from_numpy(np.array(x))
    return out.long() if out.dtype == torch.int32 else out
