"""The two operations a decode spends its time in, by whichever implementation `DecodeConfig.impl` names."""

from jaxtyping import Array, Bool, Float, Int

from specfold_jax import model as xla
from specfold_jax import reveal
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.model import Branches, Cache, Checked, Params
from specfold_jax.reveal import Ranked


def check(
    params: Params,
    branches: Branches,
    cache: Cache,
    prefix: Int[Array, " batch"],
    model: ModelConfig,
    decode: DecodeConfig,
    fold: FoldConfig | None = None,
) -> Checked:
    """Evaluates several canvases in one forward pass; see `specfold_jax.model.check`.

    Raises NotImplementedError for impl="pallas" where the kernels cannot run: no Hopper GPU, or sizes or options they do not have.
    """
    if decode.impl != "pallas":
        return xla.check(params, branches, cache, prefix, model, fold, decode.pack)
    from kernels_pallas.check import check as pallas
    from kernels_pallas.launch import require_hopper

    require_hopper()
    return pallas(params, branches, cache, prefix, model, fold)


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
    """The best tokens, log-odds and gaps of hidden states; see `specfold_jax.reveal.rank`. Rows that are not wanted are unspecified."""
    if decode.impl != "pallas":
        return reveal.rank(xla.logits(params, hidden), seed, position, step, decode.heat, model.mask_id, ranks)
    from kernels_pallas.head import rank_wanted

    flat, weight, names = hidden.reshape(-1, model.dim), xla.head_weight(params), (seed, position, step)
    seed, position, step = (x.reshape(-1) for x in names)
    found = rank_wanted(flat, weight, seed, position, step, wanted.reshape(-1), decode.heat, model.mask_id, ranks)
    return Ranked(*(x.reshape(*hidden.shape[:-1], *x.shape[1:]) for x in found))
