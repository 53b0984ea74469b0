"""One training step as a pure function: attention over packs, shifted cross-entropy on the targets, AdamW."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specfold_jax.config import ModelConfig
from specfold_jax.models.families import model_config
from specfold_jax.models.parameters import shapes
from specfold_jax.models.transformer import Params, head_weight, trunk
from specfold_jax.training.batches import Batch, Packs, make_batch
from specfold_jax.values import Natural, NotNegative, Size, conform

REWARM = 50


@dataclass(frozen=True)
class TrainConfig:
    """The model's sizes and the recipe. A run resumes only under an equal one.

    `clean`, `noisy`: block slots a pack (13 and 9 waste 4 % of the rows of `gsm_symbolic`). `packs`: packs a step, over all devices.
    The learning rate warms up over `warmup` steps, then follows a cosine to `final_rate` of it at step `steps`. `scan`: steps a dispatch.
    `attention`: "xla" attends to the clean rows and the own block; "cudnn" to all rows under a mask (CUDA and bfloat16 only).
    """

    dim: Size = 320
    layers: Size = 8
    heads: Size = 5
    kv_heads: Size = 1
    head_dim: Size = 64
    ffn_dim: Size = 1024
    rope_theta: float = 1e4
    block_size: Size = 32
    clean: Size = 13
    noisy: Size = 9
    packs: Size = 64
    steps: Size = 24_000
    rate: float = 1.5e-3
    warmup: Natural = 100
    final_rate: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: NotNegative = 1.0
    seed: Natural = 0
    scan: Size = 20
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["xla", "cudnn"] = "xla"
    remat: bool = False

    def __post_init__(self) -> None:
        conform(self)
        if self.steps % self.scan:
            raise ValueError(f"scan={self.scan} must divide steps={self.steps}")

    @property
    def rows(self) -> int:
        """Rows a step."""
        return self.packs * (self.clean + 2 * self.noisy) * self.block_size

    def hugging_face(self, vocab: int, mask_id: int, end_id: int, pad_id: int) -> dict[str, Any]:
        """The checkpoint's config.json: Fast-dLLM v2's architecture."""
        return {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "model_type": "Fast_dLLM_Qwen",
            "bd_size": self.block_size,
            "vocab_size": vocab,
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "mask_token_id": mask_id,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "torch_dtype": "bfloat16",
        }

    def model(self, vocab: int, mask_id: int, end_id: int, pad_id: int) -> ModelConfig:
        """The model's configuration."""
        return model_config(self.hugging_face(vocab, mask_id, end_id, pad_id))


class State(NamedTuple):
    """fp32 weights, AdamW's moments, steps done, and the step at which lost moments started from zero again (0: never lost)."""

    params: Params
    moments: Any
    step: Int[Array, ""]
    restart: Int[Array, ""]


class Metrics(NamedTuple):
    """Of each step: mean loss (nats a target), share of targets that are predicted right, number of targets."""

    loss: Float[Array, " steps"]
    accuracy: Float[Array, " steps"]
    targets: Int[Array, " steps"]


def init_params(model: ModelConfig, seed: int) -> Params:
    """Random fp32 weights: normal(0.02), and the two projections into the residual stream over sqrt(2 layers). Norms are 1, biases 0."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes(model), is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    out = []
    for (path, shape), key in zip(leaves, keys, strict=True):
        name = path[-1].key
        scale = 0.02 / (2 * model.layers) ** 0.5 if name in ("o", "down") else 0.02
        if len(shape) == 1:
            out.append(jnp.zeros(shape, jnp.float32) if name == "qkv_bias" else jnp.ones(shape, jnp.float32))
        else:
            out.append(jnp.float32(scale) * jax.random.normal(key, shape, jnp.float32))
    return jax.tree.unflatten(tree, out)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipped AdamW without its learning rate; norms and biases are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    )


def init_state(config: TrainConfig, model: ModelConfig) -> State:
    """The state before the first step."""
    params = init_params(model, config.seed)
    return State(params, optimizer(config).init(params), jnp.int32(0), jnp.int32(0))


def rate(config: TrainConfig, step: Int[Array, ""], restart: Int[Array, ""]) -> Float[Array, ""]:
    """Learning rate of step `step` (0 is the first): warm-up, then cosine. From step `restart` on there is another warm-up."""
    at = (step + 1).astype(jnp.float32)
    progress = jnp.clip((at - config.warmup) / max(config.steps - config.warmup, 1), 0, 1)
    cosine = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    again = jnp.where(restart > 0, (at - restart.astype(jnp.float32)) / REWARM, 1)
    return jnp.asarray(config.rate, jnp.float32) * cosine * jnp.minimum(at / max(config.warmup, 1), 1) * jnp.minimum(again, 1)


def product(spec: str, a: Array, b: Array) -> Array:
    """einsum with an fp32 result. Its gradients multiply in the operands' dtype, as flash attention's do."""
    return _product(spec, a, b)


def _wide(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _forward(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _wide(spec, a, b), (a, b)


def _backward(spec: str, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    _, pull = jax.vjp(partial(jnp.einsum, spec), *operands)
    return pull(cotangent.astype(operands[0].dtype))


_product = jax.custom_vjp(_wide, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)


def attend(
    q: Float[Array, "packs rows heads head_dim"],
    k: Float[Array, "packs rows kv_heads head_dim"],
    v: Float[Array, "packs rows kv_heads head_dim"],
    sees: Bool[Array, "packs blocks clean"],
    implementation: str = "xla",
) -> Float[Array, "packs rows heads head_dim"]:
    """Each row attends to its own block and to the clean blocks that `sees` names (the first `clean` blocks of the rows)."""
    packs, rows, heads, depth = q.shape
    blocks, clean = sees.shape[1:]
    block, kv_heads = rows // blocks, k.shape[2]
    if implementation == "cudnn":
        mask = jnp.pad(sees, ((0, 0), (0, 0), (0, blocks - clean))) | jnp.eye(blocks, dtype=bool)
        mask = jnp.repeat(jnp.repeat(mask, block, axis=1), block, axis=2)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
    q = q.reshape(packs, blocks, block, kv_heads, heads // kv_heads, depth)
    k, v = (x.reshape(packs, blocks, block, kv_heads, depth) for x in (k, v))
    scale = jnp.float32(depth**-0.5)
    across = product("pnbkgd,pcskd->pknbgcs", q, k[:, :clean]) * scale
    across = jnp.where(sees[:, None, :, None, None, :, None], across, -jnp.inf)
    own = product("pnbkgd,pnskd->pknbgs", q, k) * scale
    top = lax.stop_gradient(jnp.maximum(jnp.max(across, axis=(-2, -1)), jnp.max(own, axis=-1)))
    across, own = jnp.exp(across - top[..., None, None]), jnp.exp(own - top[..., None])
    total = jnp.sum(across, axis=(-2, -1)) + jnp.sum(own, axis=-1)
    out = product("pknbgcs,pcskd->pnbkgd", across.astype(v.dtype), v[:, :clean])
    out += product("pknbgs,pnskd->pnbkgd", own.astype(v.dtype), v)
    return (out / jnp.moveaxis(total, 1, 3)[..., None]).astype(v.dtype).reshape(packs, rows, heads, depth)


def target_logits(
    params: Params, batch: Batch, model: ModelConfig, implementation: str = "xla", remat: bool = False
) -> Float[Array, "packs targets vocab"]:
    """fp32 logits of the targets' rows. `remat` recomputes the attention's weights in the backward pass instead of keeping them."""
    attention = partial(attend, implementation=implementation)
    attention = jax.checkpoint(attention) if remat else attention
    hidden = trunk(params, batch.tokens, batch.positions, model, lambda q, k, v: attention(q, k, v, batch.sees))
    chosen = jax.nn.one_hot(batch.rows, hidden.shape[1], dtype=hidden.dtype)  # a product: its gradient is faster than a scatter
    rows = jnp.einsum("ptr,prd->ptd", chosen, hidden)
    return product("ptd,vd->ptv", rows, head_weight(params))


def loss(params: Params, batch: Batch, model: ModelConfig, config: TrainConfig) -> tuple[Float[Array, ""], tuple[Array, Array]]:
    """Mean cross-entropy over the valid targets, and of these the share that is predicted right and the number."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    out = target_logits(params, batch, model, config.attention, config.remat)
    picked = jnp.take_along_axis(out, batch.targets[..., None], axis=-1)[..., 0]
    count = jnp.sum(batch.valid, dtype=jnp.int32)
    share = batch.valid.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
    right = jnp.argmax(out, axis=-1) == batch.targets
    return jnp.sum((jax.nn.logsumexp(out, axis=-1) - picked) * share), (jnp.sum(right.astype(jnp.float32) * share), count)


def train_steps(
    state: State, data: Packs, indices: Int[Array, "steps packs"], model: ModelConfig, config: TrainConfig
) -> tuple[State, Metrics]:
    """A step for each row of `indices`, which names packs of `data`. The masks depend on nothing but the seed and the step's number."""

    def step(state: State, chosen: Array) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
        batch = make_batch(jax.tree.map(lambda x: x[chosen], data), key, model.mask_id)
        (value, (accuracy, count)), grads = jax.value_and_grad(loss, has_aux=True)(state.params, batch, model, config)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, moments = optimizer(config).update(grads, state.moments, state.params)
        size = rate(config, state.step, state.restart)
        params = jax.tree.map(lambda p, u: p - size * u, state.params, updates)
        return State(params, moments, state.step + 1, state.restart), Metrics(value, accuracy, count)

    return lax.scan(step, state, indices)
