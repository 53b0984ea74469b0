"""One check on the Pallas kernels: what `specfold_jax.models.check.check` computes, in a handful of launches a layer.

Valid branches come first, those of all sequences in one list, so that one number says which rows exist: nothing is done for others.
The residual stream lies in rows (branch, position), its width padded to whole warpgroups. Between products it is kept apart from the
last product's sums, which the next row kernel adds.
"""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.arguments import pad
from kernels_pallas.attention import branch_attention
from kernels_pallas.linear import linear, silu_pair
from kernels_pallas.pack import pack
from kernels_pallas.partition import Partition
from kernels_pallas.qkv import HEADS_MULTIPLE, Rotary, attention_inputs
from kernels_pallas.rows import NEVER, Norm, advance_norm, gate, needs, norm
from kernels_pallas.tiles import LANES
from specfold_jax.backends.pallas_support import unmet_demand
from specfold_jax.config import FoldConfig, ModelConfig
from specfold_jax.models.check import Branches, Checked
from specfold_jax.models.ops import query_scale
from specfold_jax.models.transformer import Cache, KeyValue, Params, embed


class Listed(NamedTuple):
    """The branches of all sequences in one list, valid ones first; parents and contexts are places in it."""

    partition: Partition
    tokens: Int[Array, "branch block"]
    parent: Int[Array, " branch"]
    context: Int[Array, " branch"] | None
    start: Int[Array, " branch"]
    sequence: Int[Array, " branch"]

    @classmethod
    def of(cls, branches: Branches) -> Self:
        """The list."""
        batch, each, _ = branches.tokens.shape
        partition = Partition.of(branches.valid.reshape(-1))

        def listed(x: Array) -> Array:
            return partition.apply(x.reshape(batch * each, *x.shape[2:]))

        def place_of(branch: Array) -> Array:
            return jnp.take_along_axis(partition.inverse.reshape(batch, each), branch, axis=1)

        context = branches.context
        if context is not None:
            context = listed(jnp.where(context >= 0, place_of(jnp.maximum(context, 0)), -1))
        return cls(
            partition,
            listed(branches.tokens),
            listed(place_of(branches.parent)),
            context,
            listed(branches.starts()),
            partition.order // each,
        )


class _Pending(NamedTuple):
    """The residual stream, and the sums still to be added to it, each row's at its `slot` (None: its own)."""

    x: Float[Array, "rows width"]
    sums: Float[Array, "splits capacity width"] | None
    slot: Int[Array, " rows"] | None


class _Packed(NamedTuple):
    """The residual stream, and what the next product takes: the packed rows, normed, and their number.

    `flags` marks the rows that were packed; every row has its slot among them and its source (None: all rows are computed).
    """

    x: Float[Array, "rows width"]
    normed: Float[Array, "rows width"]
    count: Int[Array, "1"]
    slot: Int[Array, " rows"] | None
    source: Int[Array, " rows"] | None
    flags: Int[Array, " padded_rows"]


class _Rows(NamedTuple):
    """The rows of a check, the same for all layers: the first `count` exist, and `flags` marks them."""

    listed: Listed
    fold: FoldConfig | None
    count: Int[Array, "1"]
    flags: Int[Array, " padded_rows"]
    reference: Int[Array, " rows"]
    need: Int[Array, " rows"]

    @classmethod
    def of(cls, listed: Listed, fold: FoldConfig | None) -> Self:
        """The rows of the listed branches."""
        count = listed.partition.count * listed.tokens.shape[1]
        flags = (jnp.arange(-(-listed.tokens.size // LANES) * LANES, dtype=jnp.int32) < count).astype(jnp.int32)
        revealed = listed.tokens != listed.tokens[listed.parent]
        return cls(listed, fold, count, flags, *needs(listed.parent, revealed, fold is not None and fold.force_revealed))

    def advance(self, pending: _Pending, at: Norm, flags: Array, gated: bool) -> _Packed:
        """Adds what is pending; then norms the rows, all of them or, folding, those that a gate (or `flags`) names."""
        if self.fold is None:
            x, sums, slot = pending
            x, normed = (x, norm(x, at)) if sums is None else advance_norm(x, sums, slot, self.count, at)
            return _Packed(x, normed, self.count, None, None, flags)
        x, tau = pending.x, jnp.full((1,), self.fold.tau, jnp.float32)
        if gated or pending.sums is not None:
            need = self.need if gated else jnp.full_like(self.need, NEVER)
            x, found = gate(*pending, self.reference, need, self.count, tau)
            flags = found if gated else flags
        normed, count, slot, source = pack(x, flags, self.listed.parent, self.count, at)
        return _Packed(x, normed, count, slot, source, flags)


def check(
    params: Params, branches: Branches, cache: Cache, prefix: Int[Array, " batch"], model: ModelConfig, fold: FoldConfig | None = None
) -> Checked:
    """Evaluates several canvases in one forward pass; see `specfold_jax.models.check.check`.

    Raises NotImplementedError for sizes, types or options that the kernels do not have.
    """
    if reason := unmet_demand(params, model, branches.tokens.shape[2], fold):
        raise NotImplementedError(reason)
    listed = Listed.of(branches)
    rows, (entries, block) = _Rows.of(listed, fold), listed.tokens.shape
    rotated = rotary((listed.start[:, None] + jnp.arange(block, dtype=jnp.int32)).reshape(-1), model)
    first_gate = fold is None or fold.scope == "layer"
    second_gate = fold is not None and (fold.gates == 2 or fold.scope == "ffn")
    seen = listed.sequence, prefix, branches.causal, listed.context, listed.partition.count

    def norm_of(weight: Array) -> Norm:
        return Norm(pad(weight, 0, LANES), model.norm_eps, model.dim)

    layers = [_padded(layer, model) for layer in params["layers"]]
    pending = _Pending(pad(embed(params, listed.tokens).reshape(entries * block, -1), 1, LANES), None, None)
    kv, computed = [], []
    for n, layer in enumerate(layers):
        first = rows.advance(pending, norm_of(layer["attn_norm"]), rows.flags, first_gate)
        qkv = _attention_inputs(layer, first, rows.count, rotated, model).reshape(entries, block, -1, model.head_dim)
        o = branch_attention(qkv, *cache, jnp.full((1,), n, jnp.int32), *seen, model.heads)
        o = o.reshape(entries * block, -1)
        if fold is not None and not fold.correction:
            o = o[first.source]
        sums = linear(o, layer["o"], rows.count)
        second = rows.advance(_Pending(first.x, sums, None), norm_of(layer["ffn_norm"]), first.flags, second_gate)
        hidden = silu_pair(second.normed, layer["gate_up"], second.count)
        pending = _Pending(second.x, linear(hidden, layer["down"], second.count), second.slot)
        _, k, v, *_ = jnp.split(qkv, [model.heads + n * model.kv_heads for n in range(3)], axis=2)
        kv.append((k, v))
        computed.append(jnp.stack([first.flags, second.flags])[:, : entries * block].reshape(2, entries, block))
    _, normed = advance_norm(*pending, rows.count, norm_of(params["norm"]))
    return _checked(branches, listed, normed[:, : model.dim].reshape(entries, block, -1), kv, jnp.stack(computed))


def _checked(
    branches: Branches, listed: Listed, hidden: Array, kv: list[KeyValue], computed: Int[Array, "layers two branch block"]
) -> Checked:
    """The results, branches still where they stand in the list; numbers of computed rows by sequence."""
    entry = listed.partition.inverse.reshape(branches.valid.shape)
    number = jnp.sum(computed, axis=3, dtype=jnp.int32)[:, :, entry]  # [layers, 2, batch, branch]
    drafts = jnp.sum(jnp.where(branches.drafts(), number, 0), axis=-1)
    folded = branches.valid & jnp.any(number < hidden.shape[1], axis=(0, 1))

    def spread(x: Array) -> Array:
        return x.reshape(*branches.valid.shape, *x.shape[1:])

    keys_values = tuple((spread(k), spread(v)) for k, v in kv)
    return Checked(spread(hidden), keys_values, jnp.moveaxis(drafts, 2, 0), folded, entry)


def rotary(positions: Int[Array, " rows"], model: ModelConfig) -> Rotary:
    """The rotary embedding of rows at these positions."""
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(model.inv_freq, jnp.float32)
    scale = jnp.float32(model.rope_scale)
    return Rotary(jnp.cos(angles) * scale, jnp.sin(angles) * scale, query_scale(positions, model) if model.query_scale_beta else None)


def _padded(layer: Params, model: ModelConfig) -> Params:
    """A layer's weights in the sizes that the kernels take, most of them as they are."""
    heads = HEADS_MULTIPLE * model.head_dim
    multiples = {"qkv": heads, "qkv_bias": heads, "o": LANES, "down": LANES}
    return {name: pad(x, 0, multiples.get(name, 1)) for name, x in layer.items()}


def _attention_inputs(
    layer: Params, packed: _Packed, row_count: Int[Array, "1"], rotated: Rotary, model: ModelConfig
) -> Float[Array, "rows all_heads head_dim"]:
    """Query, key and value heads of every row."""
    return attention_inputs(
        linear(packed.normed, layer["qkv"], packed.count),
        packed.slot,
        row_count,
        rotated,
        layer["qkv_bias"] if model.qkv_bias else None,
        layer["q_norm"] if model.qk_norm else None,
        layer["k_norm"] if model.qk_norm else None,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        eps=model.norm_eps,
        dtype=packed.normed.dtype,
    )
