"""Llama with a KV cache, over rows of tokens, for the functions of `spmd.models.decode`.

A row is a token: of a slot that decodes, or of a chunk of a prompt. Shapes are in the names, as in
`spmd.models.llama.model`, and X is the number of rows, of all groups together.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.models.decode.attention import kv_leaves, write_and_attend
from spmd.models.decode.model import Rows
from spmd.models.decode.packing import taken
from spmd.models.decode.shape import ServingShape
from spmd.models.decode.state import State
from spmd.models.llama import lora
from spmd.models.llama.config import DENSE, LlamaConfig
from spmd.models.llama.experts import mixture
from spmd.models.llama.model import activated, add_bias, embeddings, latents, norm, normed_heads
from spmd.models.llama.rope import apply_rope, rope_angles
from spmd.ops.linear import add_adapters

TABLES = ("table", "slots", "positions", "first")
"""What attention takes of `spmd.models.decode.model.Rows`."""

Weights = dict[str, Any]
"""As `parameters.Params` with layers unrolled; projections may be quantized, see `quantize.py`."""

_SPECS: Mapping[str, tuple[Any, ...]] = {
    "weights/embed_tokens/": ("model", None),
    "weights/lm_head/": ("model", None),
    "weights/norm/": (None,),
    "weights/layers/*/input_layernorm/": (None,),
    "weights/layers/*/post_attention_layernorm/": (None,),
    "weights/layers/*/pre_feedforward_layernorm/": (None,),
    "weights/layers/*/post_feedforward_layernorm/": (None,),
    "weights/layers/*/self_attn/q_proj/": ("model", None),
    "weights/layers/*/self_attn/o_proj/": (None, "model"),
    "weights/layers/*/self_attn/sinks": ("model",),
    "weights/layers/*/self_attn/q_norm/": (None,),
    "weights/layers/*/self_attn/k_norm/": (None,),
    "weights/layers/*/self_attn/q_b_proj/": ("model", None),
    "weights/layers/*/self_attn/kv_b_proj/": ("model", None),
    "weights/layers/*/mlp/gate_proj/": ("model", None),
    "weights/layers/*/mlp/up_proj/": ("model", None),
    "weights/layers/*/mlp/down_proj/": (None, "model"),
    "weights/layers/*/mlp/gate/": (None, None),
    "weights/layers/*/mlp/experts/gate_proj/": (None, "model", None),
    "weights/layers/*/mlp/experts/up_proj/": (None, "model", None),
    "weights/layers/*/mlp/experts/down_proj/": (None, None, "model"),
    "state/cache/*/": ("data", None, None, "...", None, None),
}
ALIKE = (("", ""), ("layers/", f"{DENSE}layers/"), ("mlp/", "mlp/shared_experts/"))
_OF_WEIGHTS = {path.replace(*pair): spec for pair in ALIKE for path, spec in _SPECS.items()}
SPECS = {f"{path}order": (None,) for path in _OF_WEIGHTS} | _OF_WEIGHTS
SPECS |= {
    f"{path.replace('weights', 'state/adapters', 1)}{name}": spec
    for path, of in _OF_WEIGHTS.items()
    if len(of) == 2 and path.endswith("_proj/")
    for name, spec in (("lora_A", (None, None, of[1])), ("lora_B", (None, None, of[0])))
}
"""The beginning of a path -> spec. A spec is cut to a tensor's rank, or filled up with None.

Weights are tensor-parallel over `model`, groups of slots and pages are split over `data`. The
projections of keys and values and the cache's heads are left to the compiler: where `model` has
more devices than the model has key heads, it splits the heads there are, and the query heads of a
key head over the rest.
"""


@dataclasses.dataclass(frozen=True)
class LlamaRows:
    """A `spmd.models.decode.RowsModel`: a Llama whose cache has the keys and values of each layer.

    Its weights are a tree as `Weights` says.
    """

    config: LlamaConfig  # the model

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def specs(self) -> Mapping[str, tuple[Any, ...]]:
        """How weights and cache are split."""
        return SPECS

    @property
    def unread(self) -> tuple[str, ...]:
        """The embedding, unless it is the head, too."""
        return () if self.config.tie_word_embeddings else ("weights/embed_tokens/",)

    def cache_leaves(self, shape: ServingShape, pages: Any) -> Any:
        """`I/values` and `I/scales` of layer I: see `spmd.models.decode.attention.kv_leaves`.

        Latent attention keeps what keys and values are made of, and the keys of all heads.
        """
        config, latent = self.config, self.config.kv_lora_rank
        sizes = (1, latent + config.rope_width) if latent else (config.kv_heads, config.head_width)
        layer = kv_leaves(shape, pages, *sizes, apart=not latent)
        return {str(i): dict(layer) for i in range(config.num_hidden_layers)}

    def run(self, weights: Weights, cache: State, rows: Rows) -> tuple[Any, State]:
        """See `spmd.models.decode.RowsModel.run`."""
        config, shape = self.config, rows["tokens"].shape
        tokens_X, positions_X = (rows[name].reshape(-1) for name in ("tokens", "positions"))
        table_VH = weights["embed_tokens"]["weight"]
        x_XH = embeddings(table_VH, tokens_X, config).astype(config.dtype)
        tables = {name: rows[name] for name in TABLES}
        if "adapters" in rows:
            tables["places"] = taken(rows["adapters"], rows["slots"]).reshape(-1)
        # Layers are one function, which is traced once, and written once in exported programs.
        layer = jax.jit(functools.partial(_layer, config), static_argnums=0)
        new, dense = {}, config.first_k_dense_replace
        for span, window in config.window_spans:
            angles_XE = rope_angles(jnp.maximum(positions_X, 0), config, window is not None)
            for index in span:
                of, at = (weights["dense"], index) if index < dense else (weights, index - dense)
                given = of["layers"][str(at)], cache[str(index)]
                x_XH, new[str(index)] = layer(window, *given, x_XH, angles_XE, tables)
        return x_XH.reshape(*shape, -1), new

    def adapter_leaves(self, places: int, rank: int) -> Any:
        """See `spmd.models.decode.RowsModel`."""
        return lora.places(self.config, places, rank)

    def logits(self, weights: Weights, x_XH: Any) -> Any:
        """See `spmd.models.decode.RowsModel.logits`."""
        return logits(weights, x_XH, self.config)


def _layer(
    config: LlamaConfig,
    window: int | None,
    weights: Weights,
    cache: State,
    x_XH: Any,
    angles_XE: Any,
    tables: Rows,
) -> tuple[Any, State]:
    """Hidden states (X, H) behind a layer, and its cache with the rows in it.

    Args:
        window: how many positions a row sees at most.
        tables: of the rows, `TABLES`, and of each its adapter's place, `places`, if there are any.
    """
    places_X = tables.get("places")

    def in_groups(x: Any) -> Any:
        return x.reshape(*tables["slots"].shape, *x.shape[1:])

    made = _absorbed if config.kv_lora_rank else _queries_and_keys
    q_XKGD, kv_XK2D = made(weights, x_XH, angles_XE, config, places_X)
    sinks = weights["self_attn"].get("sinks")
    sinks_KG = None if sinks is None else sinks.reshape(q_XKGD.shape[1:3])
    heads_ARKGD, cache = write_and_attend(
        cache, in_groups(q_XKGD), in_groups(kv_XK2D), tables, window, sinks_KG
    )
    if config.kv_lora_rank:
        heads_XND = heads_ARKGD.reshape(len(x_XH), config.num_attention_heads, -1)
        _, made_NVR = _of_heads(weights["self_attn"], x_XH.dtype, config)
        heads_ARKGD = jnp.einsum("xnr,nvr->xnv", heads_XND[..., : config.kv_lora_rank], made_NVR)
    output = weights["self_attn"]["o_proj"]
    (added_XH,) = _linears(heads_ARKGD.reshape(len(x_XH), -1), [output], places_X)
    added_XH = add_bias(added_XH, output)
    if config.post_norms:
        added_XH = norm(added_XH, weights["post_attention_layernorm"], config)
    x_XH = x_XH + added_XH
    before = "pre_feedforward" if config.post_norms else "post_attention"
    normed = _norm(x_XH, weights[f"{before}_layernorm"]["weight"], config)
    added_XH = _mlp(weights["mlp"], normed, config, places_X)
    if config.post_norms:
        added_XH = norm(added_XH, weights["post_feedforward_layernorm"], config)
    return x_XH + added_XH, cache


def _mlp(
    weights: Weights, normed: tuple[Any, Any], config: LlamaConfig, places_X: Any = None
) -> Any:
    if "experts" in weights:
        added_XH = mixture(weights, _whole(normed)[None], config)[0][0]
        if config.n_shared_experts:
            added_XH += _mlp(weights["shared_experts"], normed, config)
        return added_XH
    gate_XM, up_XM = _project(normed, [weights[n] for n in ("gate_proj", "up_proj")], places_X)
    return _linears(activated(gate_XM, config) * up_XM, [weights["down_proj"]], places_X)[0]


def _queries_and_keys(
    layer: Weights, x_XH: Any, angles_XE: Any, config: LlamaConfig, places_X: Any
) -> tuple[Any, Any]:
    """Rotated queries (X, K, G, D); rotated keys, and values (X, K, 2, D)."""
    rows, keys, width = x_XH.shape[0], config.kv_heads, config.head_width
    groups = config.num_attention_heads // keys
    normed = _norm(x_XH, layer["input_layernorm"]["weight"], config)
    q, k, v = _project(normed, [layer["self_attn"][f"{n}_proj"] for n in "qkv"], places_X)
    q_XND, k_XKD = q.reshape(rows, keys * groups, width), k.reshape(rows, keys, width)
    q_XND, k_XKD = normed_heads(layer["self_attn"], q_XND, k_XKD, config)
    q_XND, k_XKD = (_rotate(x, angles_XE, config.rope_magnitude) for x in (q_XND, k_XKD))
    kv_XK2D = jnp.stack([k_XKD, v.reshape(rows, keys, width)], axis=2)
    return q_XND.reshape(rows, keys, groups, width), kv_XK2D


def _absorbed(
    layer: Weights, x_XH: Any, angles_XE: Any, config: LlamaConfig, _: Any
) -> tuple[Any, Any]:
    """Queries (X, 1, N, D) and latents (X, 1, 1, D) with the keys of all heads behind them.

    `q @ (latent @ keys) = (q @ keys) @ latent`, so no head's own keys are made (DeepSeek-AI 2024,
    *DeepSeek-V2*, section 2.1.2).
    """
    normed = _norm(x_XH, layer["input_layernorm"]["weight"], config)
    parts = latents(layer["self_attn"], _whole(normed)[None], angles_XE[None], config)
    q_XND, latent_XR, shared_X1D = (x[0] for x in parts)
    q_XND, rotated_XND = jnp.split(q_XND, [config.qk_nope_head_dim], axis=-1)
    keys_NDR, _ = _of_heads(layer["self_attn"], x_XH.dtype, config)
    q_XND = jnp.concatenate([jnp.einsum("xnd,ndr->xnr", q_XND, keys_NDR), rotated_XND], axis=-1)
    # Scores are divided by the square root of this width, which is not a head's.
    q_XND *= (q_XND.shape[-1] / config.head_width) ** 0.5
    latent_XD = jnp.concatenate([latent_XR, shared_X1D[:, 0]], axis=-1)
    return q_XND[:, None], latent_XD[:, None, None]


def _of_heads(weights: Weights, dtype: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """What makes keys (N, D, R) and values (N, V, R) of each head of a latent (R)."""
    weight_OR = weights["kv_b_proj"]["weight"].astype(dtype)
    weight_NDR = weight_OR.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys_NDR, values_NVR = jnp.split(weight_NDR, [config.qk_nope_head_dim], axis=1)
    return keys_NDR, values_NVR


def _whole(normed: tuple[Any, Any]) -> Any:
    """Both parts of `_norm` together."""
    x_XH, factor_X1 = normed
    return (x_XH * factor_X1).astype(x_XH.dtype)


def _rotate(x_XND: Any, angles_XE: Any, magnitude: float) -> Any:
    return apply_rope(x_XND[:, None], angles_XE[:, None], magnitude)[:, 0]


def logits(weights: Weights, x_XH: Any, config: LlamaConfig) -> Any:
    """Hidden states (X, H) behind the last layer -> logits (X, V) in float32."""
    head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    normed_XH, factor_X1 = _norm(x_XH, weights["norm"]["weight"], config)
    return _linears(normed_XH, [head])[0].astype(jnp.float32) * factor_X1


def _norm(x_XH: Any, weight_H: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """RMS norm in two parts: `x * weight`, and the factor (X, 1) that is still to be multiplied on.

    norm(x) @ W = ((x * weight) @ W) * factor, so the matrix product need not wait for the factor,
    which is a sum over the whole row.
    """
    x32_XH = x_XH.astype(jnp.float32)
    mean_X1 = jnp.mean(jnp.square(x32_XH), axis=-1, keepdims=True)
    scaled_XH = (x32_XH * (weight_H.astype(jnp.float32) + config.norm_offset)).astype(x_XH.dtype)
    return scaled_XH, jax.lax.rsqrt(mean_X1 + config.rms_norm_eps)


def _project(normed: tuple[Any, Any], weights: Sequence[Weights], places_X: Any) -> list[Any]:
    x_XI, factor_X1 = normed
    made = _linears(x_XI, weights, places_X)
    scaled = [(out_XO * factor_X1).astype(x_XI.dtype) for out_XO in made]
    return [add_bias(out_XO, w) for out_XO, w in zip(scaled, weights, strict=True)]


def _linears(x_XI: Any, weights: Sequence[Weights], places_X: Any = None) -> tuple[Any, ...]:
    """The products of rows with weights, and with the adapters of their places if there are any."""
    # Columns of quantized weights may be in an order of their own.
    orders = [w.get("order") for w in weights]
    inputs = [x_XI if o is None else jnp.take(x_XI, o, axis=1, mode="clip") for o in orders]
    given = [w["weight"].astype(x_XI.dtype) if "weight" in w else w for w in weights]
    pairs = [(w["lora_A"], w["lora_B"]) for w in weights if "lora_A" in w]
    if all(order is None for order in orders):
        return spmd.ops.linears(x_XI, given, pairs, places_X)
    found = tuple(map(spmd.ops.linear, inputs, given))
    return add_adapters(x_XI, found, pairs, places_X) if pairs else found
