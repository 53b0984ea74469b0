"""One check on the kernels: the same branches in, the same states out as `specfold_jax.model.check`, in a handful of launches a layer.

The residual stream lies in rows (batch, branch, position), its width padded to whole warpgroups. Between products it waits together with
the sums that are still to be added to it, which the next row kernel does on its way.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import branch_attention, check_sizes
from kernels_pallas.launch import LANES, pad
from kernels_pallas.linear import linear, silu_pair
from kernels_pallas.pack import pack
from kernels_pallas.qkv import HEADS_MULTIPLE, Turns, attention_inputs
from kernels_pallas.rows import NEVER, Norm, advance_norm, gate, needs, norm
from specfold_jax.config import FoldConfig, ModelConfig
from specfold_jax.fold import take_branch
from specfold_jax.model import Branches, Cache, Checked, Params, embed


class _Pending(NamedTuple):
    """The residual stream [rows, width], and what is still to be added to it: sums, each row's at its `slot` (None: its own)."""

    x: Array
    sums: Array | None
    slot: Array | None


class _Entered(NamedTuple):
    """The residual stream, and what the next product takes: packed and normed rows, their number, every row's slot and source, flags."""

    x: Array
    normed: Array
    count: Array
    slot: Array | None
    source: Array | None
    flags: Array


class _Rows(NamedTuple):
    """What the rows of a check are, the same for all layers. `flags` marks those of valid branches."""

    branches: Branches
    fold: FoldConfig | None
    flags: Int[Array, " padded_rows"]
    reference: Int[Array, " rows"]
    need: Int[Array, " rows"]

    @property
    def number(self) -> int:
        return self.branches.tokens.size

    def enter(self, pending: _Pending, at: Norm, flags: Array, gated: bool) -> _Entered:
        """Adds what is pending; then norms the rows, all of them or, folding, those that a gate (or `flags`) names."""
        if self.fold is None:
            x, normed = (pending.x, norm(pending.x, at)) if pending.sums is None else advance_norm(*pending, at)
            return _Entered(x, normed, jnp.full((1,), self.number, jnp.int32), None, None, flags)
        x, tau = pending.x, jnp.full((1,), self.fold.tau, jnp.float32)
        if gated or pending.sums is not None:
            need = self.need if gated else jnp.full_like(self.need, NEVER)
            x, found = gate(*pending, self.reference, need, tau)
            flags = found if gated else flags
        return _Entered(x, *pack(x, flags, self.branches.parent, at), flags)


def check(
    params: Params, branches: Branches, cache: Cache, prefix: Int[Array, " batch"], model: ModelConfig, fold: FoldConfig | None = None
) -> Checked:
    """Evaluates several canvases in one forward pass; see `specfold_jax.model.check`.

    Raises NotImplementedError for sizes, types or options that the kernels do not have.
    """
    if fold is not None and fold.reference != "parent":
        raise NotImplementedError(f"fold.reference={fold.reference!r} is not supported by the Pallas kernels; use 'parent', or impl='xla'")
    check_sizes(branches.tokens.shape[2], model.head_dim)
    shape = branches.tokens.shape
    positions = branches.starts()[..., None] + jnp.arange(shape[2], dtype=jnp.int32)
    rows, turns = _rows(branches, fold), Turns.of(positions.reshape(-1), model)
    whole, twice = fold is None or fold.scope == "layer", fold is not None and (fold.gates == 2 or fold.scope == "ffn")
    everyone = jnp.full((1,), rows.number, jnp.int32)

    def norm_of(weight: Array) -> Norm:
        return Norm(pad(weight, 0, LANES), model.norm_eps, model.dim)

    pending = _Pending(pad(embed(params, branches.tokens).reshape(rows.number, -1), 1, LANES), None, None)
    kv, computed = [], []
    for n, layer in enumerate(params["layers"]):
        first = rows.enter(pending, norm_of(layer["attn_norm"]), rows.flags, gated=whole)
        qkv = _attention_inputs(layer, first, turns, model).reshape(*shape, -1, model.head_dim)
        o = branch_attention(qkv, *cache, jnp.full((1,), n, jnp.int32), prefix, branches.causal, branches.context, model.heads)
        if fold is not None and not fold.correction:
            o = take_branch(o, (first.source // shape[2] % shape[1]).reshape(shape))
        sums = linear(o.reshape(rows.number, -1), pad(layer["o"], 0, LANES), everyone)
        second = rows.enter(_Pending(first.x, sums, None), norm_of(layer["ffn_norm"]), first.flags, gated=twice)
        hidden = silu_pair(second.normed, layer["gate_up"], second.count)
        pending = _Pending(second.x, linear(hidden, pad(layer["down"], 0, LANES), second.count), second.slot)
        kv.append(tuple(jnp.split(qkv, [model.heads + n * model.kv_heads for n in range(3)], axis=3)[1:3]))
        computed.append(jnp.stack([first.flags, second.flags])[:, : rows.number].reshape(2, *shape) > 0)
    _, normed = advance_norm(*pending, norm_of(params["norm"]))
    number = jnp.sum(jnp.stack(computed), axis=-1, dtype=jnp.int32)  # [layers, 2, batch, branch]
    drafts = jnp.sum(jnp.where(branches.drafts(), number, 0), axis=-1)
    folded = branches.valid & jnp.any(number < shape[2], axis=(0, 1))
    return Checked(normed[:, : model.dim].reshape(*shape, -1), tuple(kv), jnp.moveaxis(drafts, 2, 0), folded)


def _rows(branches: Branches, fold: FoldConfig | None) -> _Rows:
    parents = jnp.take_along_axis(branches.tokens, branches.parent[..., None], axis=1)
    force = fold is not None and fold.force_revealed
    valid = jnp.broadcast_to(branches.valid[..., None], branches.tokens.shape).reshape(-1).astype(jnp.int32)
    return _Rows(branches, fold, pad(valid, 0, LANES), *needs(branches.parent, branches.tokens != parents, branches.valid, force))


def _attention_inputs(layer: Params, entered: _Entered, turns: Turns, model: ModelConfig) -> Float[Array, "rows all_heads head_dim"]:
    """Query, key and value heads of every row."""
    columns = HEADS_MULTIPLE * model.head_dim
    return attention_inputs(
        linear(entered.normed, pad(layer["qkv"], 0, columns), entered.count),
        entered.slot,
        turns,
        pad(layer["qkv_bias"], 0, columns) if model.qkv_bias else None,
        layer["q_norm"] if model.qk_norm else None,
        layer["k_norm"] if model.qk_norm else None,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        eps=model.norm_eps,
        dtype=entered.normed.dtype,
    )
