"""Which implementation a decode runs on: XLA, or the Pallas kernels for Hopper GPUs.

`DecodeConfig.impl` names one. "auto" is the kernels where all of JAX's devices are Hopper GPUs and the kernels have what the decode needs,
else XLA. Chosen once a decode: checks and heads must agree, as losslessness holds bit for bit within one implementation.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.models import sampling
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.check import check as check_on_xla
from specfold_jax.models.sampling import Ranked
from specfold_jax.models.transformer import Cache, Params, head_weight, logits


class Backend(NamedTuple):
    """The two operations a decode spends its time in, by one implementation.

    `check`: several canvases in one forward pass, as `models.check.check`; `rank`: the best tokens, log-odds and gaps of hidden states,
    as `models.sampling.rank`, unspecified for rows that are not wanted. `name`: "xla", "pallas", or "either" where the program becomes
    one of them when it is lowered for a platform: compiled for a CPU beside Hopper GPUs, it is XLA's.
    """

    name: str
    check: Callable[[Params, Branches, Cache, Array, ModelConfig, DecodeConfig, FoldConfig | None], Checked]
    rank: Callable[[Params, Array, Array, Array, Array, Array, ModelConfig, DecodeConfig, int], Ranked]


def _xla_check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None = None,
) -> Checked:
    return check_on_xla(params, branches, cache, prefix, model, fold, decode.pack)


def _pallas_check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None = None,
) -> Checked:
    from specfold_jax.backends.pallas import check  # kernels are imported where they are used: they take seconds

    return check(params, branches, cache, prefix, model, fold)


def _xla_rank(
    params: Params,
    hidden: Float[Array, "*rows dim"],
    seed: Int[Array, "*rows"],
    position: Int[Array, "*rows"],
    step: Int[Array, "*rows"],
    wanted: Bool[Array, "*rows"],
    model: ModelConfig,
    decode: DecodeConfig,
    ranks: int,
) -> Ranked:
    del wanted  # all rows are ranked
    return sampling.rank(logits(params, hidden), seed, position, step, decode.sampling_temperature, model.mask_id, ranks)


def _pallas_rank(
    params: Params,
    hidden: Float[Array, "*rows dim"],
    seed: Int[Array, "*rows"],
    position: Int[Array, "*rows"],
    step: Int[Array, "*rows"],
    wanted: Bool[Array, "*rows"],
    model: ModelConfig,
    decode: DecodeConfig,
    ranks: int,
) -> Ranked:
    from kernels_pallas.head import rank_wanted

    seeds, positions, steps = (x.reshape(-1) for x in (seed, position, step))
    found = rank_wanted(
        hidden.reshape(-1, model.dim),
        head_weight(params),
        seeds,
        positions,
        steps,
        wanted.reshape(-1),
        decode.sampling_temperature,
        model.mask_id,
        ranks,
    )
    return Ranked(*(x.reshape(*hidden.shape[:-1], *x.shape[1:]) for x in found))


def _either[T](xla: Callable[..., T], pallas: Callable[..., T]) -> Callable[..., T]:
    """The kernels in a program lowered for CUDA, XLA in any other."""

    def choose(*given: object) -> T:
        return lax.platform_dependent(cuda=lambda: pallas(*given), default=lambda: xla(*given))

    return choose


XLA = Backend("xla", _xla_check, _xla_rank)
PALLAS = Backend("pallas", _pallas_check, _pallas_rank)
EITHER = Backend("either", _either(_xla_check, _pallas_check), _either(_xla_rank, _pallas_rank))


def unsupported(params: Params, model: ModelConfig, decode: DecodeConfig, fold: FoldConfig | None = None, ranks: int = 1) -> str | None:
    """Why the Pallas kernels cannot run a decode on this machine, or None where they can. `ranks`: tokens kept a position."""
    from kernels_pallas.launch import no_hopper
    from specfold_jax.backends.pallas_support import unmet_demand

    return no_hopper() or unmet_demand(params, model, decode.block(model), fold, ranks)


def backend_of(decode: DecodeConfig, params: Params, model: ModelConfig, fold: FoldConfig | None = None, ranks: int = 1) -> Backend:
    """The implementation of a decode with this fold and with a graph of so many `token_ranks`.

    A machine with a GPU that the kernels cannot use is told why, once a reason, by a warning. Raises NotImplementedError with that reason
    for impl="pallas".
    """
    match decode.impl:
        case "xla":
            return XLA
        case "pallas":
            if reason := unsupported(params, model, decode, fold, ranks):
                raise NotImplementedError(f"impl='pallas': {reason}; use impl='xla'")
            return PALLAS
    if not _has_gpu():  # nobody there misses the kernels, and importing and tracing them takes seconds
        return XLA
    if reason := unsupported(params, model, decode, fold, ranks):
        _warn(reason)
        return XLA
    return EITHER


def impl_name(backend: Backend, params: Params) -> str:
    """What a decode with these parameters runs on, "xla" or "pallas"."""
    if backend is not EITHER:
        return backend.name
    devices = getattr(params["embed"], "devices", jax.devices)  # NumPy's arrays go to the default device
    return "pallas" if all(device.platform == "gpu" for device in devices()) else "xla"


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache  # said once a reason, however many programs are traced and whatever filters are set
def _warn(reason: str) -> None:
    warnings.warn(f"impl='auto' decodes with XLA: {reason}; impl='xla' chooses it without this warning", stacklevel=3)
