"""The two operations a decode spends its time in, by whichever implementation `DecodeConfig.impl` names, and the choice that "auto" makes.

"auto" is the Pallas kernels where all of JAX's devices are Hopper GPUs and the kernels have what the decode needs, else XLA. A program
that may use the kernels still decides when it is lowered for a platform: compiled for a CPU beside such GPUs, it is XLA's.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.models import sampling
from specfold_jax.models import transformer as xla
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.check import check as check_on_xla
from specfold_jax.models.sampling import Ranked
from specfold_jax.models.transformer import Cache, Params


def unsupported(params: Params, model: ModelConfig, decode: DecodeConfig, fold: FoldConfig | None = None, ranks: int = 1) -> str | None:
    """Why the Pallas kernels cannot run a decode on this machine, or None where they can. `ranks`: tokens kept a position."""
    from kernels_pallas.launch import no_hopper
    from specfold_jax.backends.pallas_support import lacking

    return no_hopper() or lacking(params, model, decode.block(model), fold, ranks)


def settled(decode: DecodeConfig, params: Params, model: ModelConfig, fold: FoldConfig | None = None, ranks: int = 1) -> DecodeConfig:
    """`decode` with impl "auto" made "xla" where the kernels cannot be used; "auto" that is left means them, on a CUDA GPU.

    To be asked once for all that a decode does, with its fold and its graph's `token_ranks`: checks and heads must choose alike, for
    losslessness holds bit for bit within one implementation. A machine with a GPU that the kernels cannot use is told why, once a
    reason, by a warning. Raises NotImplementedError with that reason for impl="pallas".
    """
    match decode.impl:
        case "xla":
            return decode
        case "pallas":
            if reason := unsupported(params, model, decode, fold, ranks):
                raise NotImplementedError(f"impl='pallas': {reason}; use impl='xla'")
            return decode
    if not _has_gpu():  # nobody there misses the kernels, and importing and tracing them takes seconds
        return replace(decode, impl="xla")
    if reason := unsupported(params, model, decode, fold, ranks):
        _say(reason)
        return replace(decode, impl="xla")
    return decode


def chosen(decode: DecodeConfig, params: Params, model: ModelConfig, fold: FoldConfig | None = None, ranks: int = 1) -> str:
    """The implementation that a decode with these parameters runs on, "xla" or "pallas"."""
    impl = settled(decode, params, model, fold, ranks).impl
    if impl != "auto":
        return impl
    devices = getattr(params["embed"], "devices", jax.devices)  # NumPy's arrays go to the default device
    return "pallas" if all(device.platform == "gpu" for device in devices()) else "xla"


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache  # said once a reason, however many programs are traced and whatever filters are set
def _say(reason: str) -> None:
    warnings.warn(f"impl='auto' decodes with XLA: {reason}; impl='xla' chooses it without this warning", stacklevel=3)


def _by[T](impl: str, plain: Callable[[], T], kernels: Callable[[], T]) -> T:
    """What the settled implementation gives; "auto" decides when it is lowered."""
    match impl:
        case "xla":
            return plain()
        case "pallas":
            return kernels()
    return lax.platform_dependent(cuda=kernels, default=plain)


def check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None = None,
) -> Checked:
    """Evaluates several canvases in one forward pass; see `specfold_jax.models.check.check`.

    Raises NotImplementedError for impl="pallas" where the kernels cannot run: no Hopper GPU, or sizes or options they do not have.
    """
    impl = settled(decode, params, model, fold).impl

    def plain() -> Checked:
        return check_on_xla(params, branches, cache, prefix, model, fold, decode.pack)

    def kernels() -> Checked:
        from specfold_jax.backends.pallas import check as pallas

        return pallas(params, branches, cache, prefix, model, fold)

    return _by(impl, plain, kernels)


def rank(
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
    """The best tokens, log-odds and gaps of hidden states; see `specfold_jax.models.sampling.rank`.

    Rows that are not wanted are unspecified.
    """
    impl = settled(decode, params, model, ranks=ranks).impl

    def plain() -> Ranked:
        return sampling.rank(xla.logits(params, hidden), seed, position, step, decode.sampling_temperature, model.mask_id, ranks)

    def kernels() -> Ranked:
        from kernels_pallas.head import rank_wanted

        flat, weight, names = hidden.reshape(-1, model.dim), xla.head_weight(params), (seed, position, step)
        seeds, positions, steps = (x.reshape(-1) for x in names)
        found = rank_wanted(flat, weight, seeds, positions, steps, wanted.reshape(-1), decode.sampling_temperature, model.mask_id, ranks)
        return Ranked(*(x.reshape(*hidden.shape[:-1], *x.shape[1:]) for x in found))

    return _by(impl, plain, kernels)
