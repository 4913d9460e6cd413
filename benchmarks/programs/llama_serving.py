"""Llama serving: prefill that fills a key-value cache, and one step of decoding from it.

Shapes are in the names, as in `spmd.models.llama.model`; T is the length of the cache.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.programs.llama_training import CONFIG
from benchmarks.programs.program import Built, Program, marked, on_meshes, structs_of
from spmd.models.llama import fresh, model, rope, sharding
from spmd.models.llama.config import LlamaConfig

CONFIG_SERVING = dataclasses.replace(CONFIG, scan_layers=False, num_key_value_heads=8)
BATCH, PROMPT, CACHE = 16, 128, 256

TENSOR_PARALLEL = {
    "embed_tokens/weight": ("model", None),
    "*norm/weight": (None,),
    "layers/*/self_attn/[qkv]_proj/weight": ("model", None),
    "layers/*/self_attn/o_proj/weight": (None, "model"),
    "layers/*/mlp/down_proj/weight": (None, "model"),
    "layers/*/mlp/*_proj/weight": ("model", None),
    "lm_head/weight": ("model", None),
}
"""Weights over `model` alone, whole along `data`."""

CACHE_SPEC = ("data", None, "model", None)


def llama_serving_programs() -> list[Program]:
    """Prefill and decode, tensor-parallel and with weights split over both axes."""
    programs = []
    for name in ("prefill", "decode"):
        for layout in ("tp", "2d"):
            meshes = ("1x8", "4x2", "2x4") if layout == "tp" else ("4x2", "2x4")
            made = partial(build, decodes=name == "decode", layout=layout)
            programs += on_meshes(f"llama-serve/{name}-{layout}", made, *meshes)
    return programs


def build(mesh: spmd.Mesh, decodes: bool, layout: str) -> Built:
    """Of each prompt the last token's logits and a cache with it, or a decoded token more."""

    def prefill(params: Any, cache: Any, tokens_BS: Any) -> Any:
        x_BSH, cache = run_layers(params, cache, tokens_BS, jnp.int32(0))
        return logits(params, x_BSH[:, -1:]), cache

    def decode(params: Any, cache: Any, tokens_B1: Any, position: Any) -> Any:
        x_B1H, cache = run_layers(params, cache, tokens_B1, position)
        return jnp.argmax(logits(params, x_B1H), -1).astype(jnp.int32), cache

    tokens = marked(mesh, ("data", None), (BATCH, 1 if decodes else PROMPT), jnp.int32)
    args = (weights(mesh, layout), caches(mesh), tokens)
    if not decodes:
        return Built(prefill, args, donate=(1,))
    return Built(decode, (*args, marked(mesh, (), (), jnp.int32)), donate=(1,))


def weights(mesh: spmd.Mesh, layout: str) -> Any:
    """The parameters, marked by `TENSOR_PARALLEL` (`tp`) or by the training tables (`2d`)."""
    params = structs_of(lambda key: fresh.init(key, CONFIG_SERVING), jax.random.key(0))
    if layout == "tp":
        return spmd.mark_tree(params, mesh, TENSOR_PARALLEL)
    return sharding.mark_params(params, mesh, CONFIG_SERVING)


def caches(mesh: spmd.Mesh) -> list[dict[str, Any]]:
    """Keys and values (B, T, K, D) of every layer."""
    shape = (BATCH, CACHE, CONFIG_SERVING.kv_heads, CONFIG_SERVING.head_width)
    half = marked(mesh, CACHE_SPEC, shape)
    return [{"k": half, "v": half} for _ in range(CONFIG_SERVING.num_hidden_layers)]


def run_layers(params: Any, cache: Any, tokens_BS: Any, position: Any) -> tuple[Any, Any]:
    """Tokens that stand from `position` on, through all layers."""
    config = CONFIG_SERVING
    x_BSH = jnp.take(params["embed_tokens"]["weight"], tokens_BS, axis=0, mode="clip")
    angles_TE = rope.rope_angles(jnp.arange(CACHE), config)
    rope_SE = jax.lax.dynamic_slice_in_dim(angles_TE, position, tokens_BS.shape[1])
    filled = []
    for index, entry in enumerate(cache):
        layer = params["layers"][str(index)]
        normed = norm(x_BSH, layer["input_layernorm"])
        attended, entry = attention(layer["self_attn"], normed, entry, rope_SE, position, config)
        x_BSH = x_BSH + attended
        normed = norm(x_BSH, layer["post_attention_layernorm"])
        x_BSH = x_BSH + model.mlp(layer["mlp"], normed, config)
        filled.append(entry)
    return x_BSH, filled


def attention(
    layer: Any, x_BSH: Any, cache: Any, rope_SE: Any, position: Any, config: LlamaConfig
) -> tuple[Any, Any]:
    """Attention of new tokens to the cache, which they enter first."""
    q, k, v = (model.linear(x_BSH, layer[f"{name}_proj"]["weight"]) for name in "qkv")
    q_BSND = rope.apply_rope(model.split_heads(q, config.num_attention_heads), rope_SE)
    k_BSKD = rope.apply_rope(model.split_heads(k, config.kv_heads), rope_SE)
    v_BSKD = model.split_heads(v, config.kv_heads)
    where = (0, position, 0, 0)
    k_BTKD = jax.lax.dynamic_update_slice(cache["k"], k_BSKD, where)
    v_BTKD = jax.lax.dynamic_update_slice(cache["v"], v_BSKD, where)
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTKD) * config.head_width**-0.5
    reached_S = position + jnp.arange(x_BSH.shape[1])
    visible_ST = reached_S[:, None] >= jnp.arange(CACHE)[None, :]
    scores_BNST = jnp.where(visible_ST, scores_BNST, np.finfo(np.float32).min)
    heads_BSND = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores_BNST, -1), v_BTKD)
    heads_BSA = heads_BSND.reshape(*x_BSH.shape[:-1], -1)
    out_BSH = model.linear(heads_BSA, layer["o_proj"]["weight"])
    return out_BSH, {"k": k_BTKD, "v": v_BTKD}


def norm(x_BSH: Any, weight: Any) -> Any:
    """RMSNorm."""
    return model.rms_norm(x_BSH, weight["weight"], CONFIG_SERVING.rms_norm_eps)


def logits(params: Any, x_BSH: Any) -> Any:
    """(B, S, V)."""
    return model.linear(norm(x_BSH, params["norm"]), params["lm_head"]["weight"])
