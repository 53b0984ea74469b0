"""Folding read word for word: one row of a batch, plain loops, float64. The tests compare `model.check` with this."""

from typing import NamedTuple

import numpy as np


class Slow(NamedTuple):
    """As `model.Checked`, without the batch axis; `closest`: how near a gate came to deciding otherwise, relative to tau."""

    hidden: np.ndarray
    kv: list[tuple[np.ndarray, np.ndarray]]
    computed_rows: np.ndarray
    folded: np.ndarray
    closest: float


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, position, model):
    half = model.head_dim // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * position * np.array(model.inv_freq)) * model.rope_scale
    return np.concatenate([turned.real, turned.imag], axis=-1)


def projections(layer, x, position, model):
    """q [heads, head_dim], k and v [kv_heads, head_dim] of one position."""
    qkv = norm(x, layer["attn_norm"], model.norm_eps) @ layer["qkv"].T + layer.get("qkv_bias", 0)
    q, k, v = np.split(qkv.reshape(-1, model.head_dim), [model.heads, model.heads + model.kv_heads])
    if model.qk_norm:
        q, k = norm(q, layer["q_norm"], model.norm_eps), norm(k, layer["k_norm"], model.norm_eps)
    scale = 1 + model.query_scale_beta * np.log(1 + position // model.query_scale_length)
    return rotate(q, position, model) * scale, rotate(k, position, model), v


def attend(q, keys, values, model):
    """One query over keys and values [n, kv_heads, head_dim]."""
    out = []
    for head in range(model.heads):
        group = head // (model.heads // model.kv_heads)
        score = keys[:, group] @ q[head] / np.sqrt(model.head_dim)
        weight = np.exp(score - score.max())
        out.append(weight @ values[:, group] / weight.sum())
    return np.concatenate(out)


def feed_forward(layer, y, model):
    gate, up = np.split(norm(y, layer["ffn_norm"], model.norm_eps) @ layer["gate_up"].T, 2)
    return (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T


def gate(x, parent, revealed, valid, fold):
    """computed, source [branch, block], and the closest call, branch by branch (specfold_jax/diffusion/README.md, "Gate")."""
    branches, block = revealed.shape
    computed, source, closest = np.zeros((branches, block), bool), np.zeros((branches, block), int), np.inf
    for b in range(branches):
        for i in range(block):
            inherited = b if parent[b] == b else source[parent[b], i]
            reference = x[inherited if fold.reference == "source" else parent[b], i]
            delta, size = np.linalg.norm(x[b, i] - reference), np.linalg.norm(reference)
            exceeds = not delta**2 <= float(fold.tau) ** 2 * size**2
            forced = parent[b] == b or (fold.force_revealed and revealed[b, i])
            if not forced and 0 < fold.tau < np.inf and valid[b]:
                closest = min(closest, abs(delta / size / float(fold.tau) - 1))
            computed[b, i] = valid[b] and (forced or exceeds)
            source[b, i] = b if computed[b, i] else inherited
    return computed, source, closest


def check(params, tokens, valid, parent, start, cache, causal, context, model, fold) -> Slow:
    """One row of `model.check`: `tokens` [branch, block], `cache` per layer (k, v) [prefix, kv_heads, head_dim]."""
    branches, block = tokens.shape
    rows = [(b, i) for b in range(branches) for i in range(block)]
    starts = [start + block * (context[b] >= 0) for b in range(branches)]
    revealed = tokens != tokens[parent]
    own = np.repeat(np.arange(branches)[:, None], block, axis=1)
    everything = np.broadcast_to(valid[:, None], tokens.shape), own, np.inf
    x, kv, counts, folded, closest = params["embed"][tokens], [], [], np.zeros(branches, bool), np.inf
    for layer, (k_prefix, v_prefix) in zip(params["layers"], cache, strict=True):
        first = everything if fold is None or fold.scope == "ffn" else gate(x, parent, revealed, valid, fold)
        source = first[1]
        new = {(b, i): projections(layer, x[b, i], starts[b] + i, model) for b, i in rows}
        q, k, v = (np.stack([[new[source[b, i], i][n] for i in range(block)] for b in range(branches)]) for n in range(3))

        def attention(b, i, query, k=k, v=v, k_prefix=k_prefix, v_prefix=v_prefix):
            seen = slice(i + 1) if causal else slice(None)
            behind = [context[b]] if context[b] >= 0 else []
            keys = np.concatenate([k_prefix, *(k[m] for m in behind), k[b][seen]])
            values = np.concatenate([v_prefix, *(v[m] for m in behind), v[b][seen]])
            return attend(query, keys, values, model)

        if fold is None or fold.correction:
            o = {(b, i): attention(b, i, q[b, i]) for b, i in rows}
        else:
            o = {(b, i): attention(source[b, i], i, new[source[b, i], i][0]) for b, i in rows}
        y = np.stack([[x[b, i] + layer["o"] @ o[b, i] for i in range(block)] for b in range(branches)])
        second = first if fold is None or (fold.gates == 1 and fold.scope == "layer") else gate(y, parent, revealed, valid, fold)
        update = {(b, i): feed_forward(layer, y[b, i], model) for b, i in rows}
        x = np.stack([[y[b, i] + update[second[1][b, i], i] for i in range(block)] for b in range(branches)])
        kv.append((k, v))
        drafts = valid & (parent != np.arange(branches))
        counts.append([int(g[0][drafts].sum()) for g in (first, second)])
        folded |= ~(first[0] & second[0]).all(axis=1)
        closest = min(closest, first[2], second[2])
    return Slow(norm(x, params["norm"], model.norm_eps), kv, np.array(counts), folded & valid, closest)
