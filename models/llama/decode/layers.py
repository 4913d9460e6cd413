"""The transformer's layers over rows of tokens, with attention left to the caller.

A row is a token: decode has one for each slot, prefill one for each token of the chunk. Shapes are
in the names, as in `models.llama.model`, and R is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from models.llama.config import LlamaConfig
from models.llama.decode.cache import State
from models.llama.model import apply_rope, rope_angles

Weights = dict[str, Any]
"""As `model.Params` with layers unrolled; projections may be quantized, see `quantize.py`."""

Attention = Callable[[Any, Any, State], tuple[Any, State]]
"""(q (R, K, G, D), new keys and values (R, 2, K, D), a layer's cache) -> (heads, the cache)."""


def run_layers(
    weights: Weights,
    tokens_R: Any,
    positions_R: Any,
    cache: State,
    attend: Attention,
    config: LlamaConfig,
) -> tuple[Any, State]:
    """Runs the embedding and all layers.

    Args:
        weights: see `Weights`.
        tokens_R: token ids.
        positions_R: the position of each token in its sequence.
        cache: layer -> its keys and values.
        attend: writes a layer's new keys and values into the cache and attends to it.
        config: the model.

    Returns:
        (hidden states (R, H) behind the last layer, cache).
    """
    x_RH = jnp.take(weights["embed_tokens"]["weight"], tokens_R, axis=0, mode="clip")
    x_RH = x_RH.astype(config.dtype)
    angles_RE = rope_angles(positions_R, config)
    new = {}
    for index in range(config.num_hidden_layers):
        layer = weights["layers"][str(index)]
        heads_RI, new[str(index)] = _attention(
            layer, x_RH, angles_RE, cache[str(index)], attend, config
        )
        x_RH = x_RH + _linear(heads_RI, layer["self_attn"]["o_proj"])
        normed = _norm(x_RH, layer["post_attention_layernorm"]["weight"], config)
        gate_RM, up_RM = (_project(normed, layer["mlp"][n]) for n in ("gate_proj", "up_proj"))
        x_RH = x_RH + _linear(jax.nn.silu(gate_RM) * up_RM, layer["mlp"]["down_proj"])
    return x_RH, new


def _attention(
    layer: Weights, x_RH: Any, angles_RE: Any, cache: State, attend: Attention, config: LlamaConfig
) -> tuple[Any, State]:
    rows, keys, width = x_RH.shape[0], config.kv_heads, config.head_width
    groups = config.num_attention_heads // keys
    normed = _norm(x_RH, layer["input_layernorm"]["weight"], config)
    q, k, v = (_project(normed, layer["self_attn"][f"{n}_proj"]) for n in "qkv")
    q_RND = _rotate(q.reshape(rows, keys * groups, width), angles_RE)
    k_RKD = _rotate(k.reshape(rows, keys, width), angles_RE)
    kv_R2KD = jnp.stack([k_RKD, v.reshape(rows, keys, width)], axis=1)
    heads_RKGD, cache = attend(q_RND.reshape(rows, keys, groups, width), kv_R2KD, cache)
    return heads_RKGD.reshape(rows, -1), cache


def _rotate(x_RND: Any, angles_RE: Any) -> Any:
    return apply_rope(x_RND[:, None], angles_RE[:, None])[:, 0]


def logits(weights: Weights, x_RH: Any, config: LlamaConfig) -> Any:
    """Hidden states (R, H) behind the last layer -> logits (R, V) in float32."""
    head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    normed_RH, factor_R1 = _norm(x_RH, weights["norm"]["weight"], config)
    return _linear(normed_RH, head).astype(jnp.float32) * factor_R1


def _norm(x_RH: Any, weight_H: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """RMS norm in two parts: `x * weight`, and the factor (R, 1) that is still to be multiplied on.

    norm(x) @ W = ((x * weight) @ W) * factor, so the matrix product need not wait for the factor,
    which is a sum over the whole row.
    """
    x32_RH = x_RH.astype(jnp.float32)
    mean_R1 = jnp.mean(jnp.square(x32_RH), axis=-1, keepdims=True)
    scaled_RH = (x32_RH * weight_H.astype(jnp.float32)).astype(x_RH.dtype)
    return scaled_RH, jax.lax.rsqrt(mean_R1 + config.rms_norm_eps)


def _project(normed: tuple[Any, Any], weights: Weights) -> Any:
    x_RI, factor_R1 = normed
    return (_linear(x_RI, weights) * factor_R1).astype(x_RI.dtype)


def _linear(x_RI: Any, weights: Weights) -> Any:
    weight = weights.get("weight")
    if weight is None:  # quantized: `values` and `scales`
        return spmd.ops.linear(x_RI, weights)
    return spmd.ops.linear(x_RI, weight.astype(x_RI.dtype))
