"""Llama with a KV cache: prompts chunk by chunk, then all slots token by token.

Shapes are in the names, as in `model.py`, and

    B slots    S tokens of a chunk    T positions of the cache that are read    P alternatives

Everything is a function of (weights, state, inputs) with fixed shapes, one for each bucket, and
knows no mesh. The state is donated and updated in place; a slot's keys and values lie at positions
0, 1, ..., rotated. What lies behind the tokens that a slot holds is garbage, and never read.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from models import sampling
from models.function import Function, StateLeaf
from models.llama.config import LlamaConfig
from models.llama.model import apply_rope, rope_angles

Weights = dict[str, Any]
"""As `model.Params` with layers unrolled; projections may be quantized, see `quantize.py`."""

State = dict[str, Any]

KEYS, VALUES = 0, 1
INT8_MAX = 127.0


class ServingShape(NamedTuple):
    """Sizes that functions are made for.

    Attributes:
      slots: sequences that are decoded together.
      max_length: positions of a slot.
      chunks: lengths of prompts' pieces, ascending; a shorter piece is padded to the next.
      lengths: positions that are read, ascending, the last is `max_length`: short sequences need
        not read all of the cache.
      decode_steps: tokens that one call of decode makes at most.
      top_logprobs: alternatives that are reported.
      cache_dtype: of keys and values: a float type, or `int8` with a scale for each head and token.
    """

    slots: int
    max_length: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    decode_steps: int = 10
    top_logprobs: int = 20
    cache_dtype: str = "bfloat16"


# State


def state_leaves(config: LlamaConfig, shape: ServingShape) -> Any:
    """`StateLeaf`s of the state.

    - `cache/I`: `values` (B, 2, K, T, D), keys and values, and `scales` (B, 2, K, T) of int8 ones.
    - `tokens` (B,): the latest token of each slot, whose key and value are not in the cache yet.
    - `lengths` (B,): tokens whose are: the position of the latest.
    - `seen` (B, V): tokens that are in the sequence; `drawn` (B, V): how often they were drawn.
    - `sampling/FIELD` (B,): how a slot's tokens are drawn.
    """
    slots = shape.slots
    kv = (slots, 2, config.kv_heads, shape.max_length)
    layer = {"values": StateLeaf((*kv, config.head_width), shape.cache_dtype)}
    if shape.cache_dtype == "int8":
        layer["scales"] = StateLeaf(kv, "float32")
    return {
        "cache": {str(i): dict(layer) for i in range(config.num_hidden_layers)},
        "tokens": StateLeaf((slots,), "int32"),
        "lengths": StateLeaf((slots,), "int32"),
        "seen": StateLeaf((slots, config.vocab_size), "bool"),
        "drawn": StateLeaf((slots, config.vocab_size), "int32"),
        "sampling": {
            name: StateLeaf((slots,), np.dtype(dtype).name, neutral)
            for name, (dtype, neutral) in sampling.FIELDS.items()
        },
    }


def _stored(kv: Any, layer: State) -> State:
    """Keys and values (..., D) as a layer's cache has them, scales (...) included."""
    if "scales" not in layer:
        return {"values": kv.astype(layer["values"].dtype)}
    kv = kv.astype(jnp.float32)
    scales = jnp.max(jnp.abs(kv), axis=-1) / INT8_MAX
    scaled = kv / jnp.where(scales > 0, scales, 1.0)[..., None]
    return {"values": jnp.round(scaled).astype(jnp.int8), "scales": scales}


def _write_each(layer: State, kv_B2KD: Any, positions_B: Any) -> State:
    """One key and value for every slot, each at its own position."""
    new = _stored(kv_B2KD, layer)
    written = {"values": spmd.ops.cache_update(layer["values"], new["values"], positions_B)}
    if "scales" in layer:
        scales = spmd.ops.cache_update(
            layer["scales"][..., None], new["scales"][..., None], positions_B
        )
        written["scales"] = scales[..., 0]
    return written


def _write_chunk(layer: State, kv_S2KD: Any, slot: Any, start: Any) -> State:
    """Keys and values of neighbours in one slot; all of them have to fit in."""
    zero = jnp.zeros((), slot.dtype)
    new = _stored(jnp.moveaxis(kv_S2KD, 0, 2)[None], layer)
    return {
        name: jax.lax.dynamic_update_slice(
            layer[name], x, (slot, zero, zero, start, zero)[: x.ndim]
        )
        for name, x in new.items()
    }


def _attend_chunk(q_SKGD: Any, layer: State, slot: Any, positions_S: Any, length: int) -> Any:
    """Attention of several queries of one slot over the first T positions there; (S, K, G, D)."""
    row = {
        name: jax.lax.dynamic_index_in_dim(x, slot)[0, :, :, :length] for name, x in layer.items()
    }
    # Else XLA on GPUs transposes all of the cache as the kernel wants these few, and back.
    kv_2KTD = jax.lax.optimization_barrier(row["values"])
    if "scales" in row:
        kv_2KTD = kv_2KTD.astype(jnp.float32) * row["scales"][..., None]
    # What others left there has no weight, but NaN is NaN without any.
    kv_2KTD = jnp.where(jnp.arange(length)[:, None] <= positions_S[-1], kv_2KTD, 0)
    k_1TKD, v_1TKD = (kv_2KTD[i].swapaxes(0, 1)[None].astype(q_SKGD.dtype) for i in (KEYS, VALUES))
    q_1SND = q_SKGD.reshape(1, q_SKGD.shape[0], -1, q_SKGD.shape[-1])
    heads_1SND = spmd.ops.attention(q_1SND, k_1TKD, v_1TKD, positions=positions_S)
    return heads_1SND.reshape(q_SKGD.shape)


# Layers


def _norm(x_BH: Any, weight_H: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """RMS norm in two parts: `x * weight` and the factor (B, 1) that is left out.

    Products with what is normalized do not wait for the factor: it is multiplied on afterwards.
    """
    x32_BH = x_BH.astype(jnp.float32)
    mean_B1 = jnp.mean(jnp.square(x32_BH), axis=-1, keepdims=True)
    scaled_BH = (x32_BH * weight_H.astype(jnp.float32)).astype(x_BH.dtype)
    return scaled_BH, jax.lax.rsqrt(mean_B1 + config.rms_norm_eps)


def _project(normed: tuple[Any, Any], weights: Weights) -> Any:
    x_BI, factor_B1 = normed
    return (_linear(x_BI, weights) * factor_B1).astype(x_BI.dtype)


def _linear(x_BI: Any, weights: Weights) -> Any:
    weight = weights.get("weight")
    if weight is None:
        return spmd.ops.linear(x_BI, weights)
    return spmd.ops.linear(x_BI, weight.astype(x_BI.dtype))


Attention = Callable[[Any, Any, State], tuple[Any, State]]
"""(q (R, K, G, D), new keys and values (R, 2, K, D), a layer's cache) -> (heads, the cache)."""


def _run_layers(
    weights: Weights,
    tokens_R: Any,
    positions_R: Any,
    cache: State,
    attend: Attention,
    config: LlamaConfig,
) -> tuple[Any, State]:
    """Rows of hidden states behind the last layer, (R, H), and the cache."""
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


def _logits(weights: Weights, x_RH: Any, config: LlamaConfig) -> Any:
    """(R, V) in float32."""
    head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    normed_RH, factor_R1 = _norm(x_RH, weights["norm"]["weight"], config)
    return _linear(normed_RH, head).astype(jnp.float32) * factor_R1


# Functions


def step_logits(
    weights: Weights, state: State, active_B: Any, length: int, config: LlamaConfig
) -> tuple[Any, State]:
    """Logits (B, V) of the token after each slot's latest, whose key and value are now cached.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        active_B: which slots take part; logits of others mean nothing.
        length: positions that are read, T.
        config: the model.

    Returns:
        (logits, state), with the same `tokens` and `lengths`.
    """
    positions_B = state["lengths"]
    # Of slots that take no part nothing is written, and little read.
    written_B = jnp.where(active_B, positions_B, -1)
    seen_B = jnp.where(active_B, positions_B, 0)

    def attend(q_BKGD: Any, kv_B2KD: Any, layer: State) -> tuple[Any, State]:
        layer = _write_each(layer, kv_B2KD, written_B)
        heads_BKGD = spmd.ops.decode_attention(
            q_BKGD, layer["values"], seen_B, length=length, scales=layer.get("scales")
        )
        return heads_BKGD, layer

    x_BH, cache = _run_layers(weights, state["tokens"], positions_B, state["cache"], attend, config)
    return _logits(weights, x_BH, config), {**state, "cache": cache}


def decode(
    weights: Weights,
    state: State,
    control: Mapping[str, Any],
    *,
    length: int,
    steps: int,
    alternatives: int,
    config: LlamaConfig,
) -> tuple[State, sampling.Report]:
    """Several tokens of every active slot, in a loop on the device.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        control: `active` (B,), which slots take part; `steps`, how many tokens; `alternatives`,
            whether the likeliest ones are wanted.
        length: positions that are read, T: every active slot stays within.
        steps: tokens at most.
        alternatives: P.
        config: the model.

    Returns:
        (state, report with leading dims (steps, B)); what is behind `control["steps"]` is zero.
    """
    active_B = control["active"]

    def body(carry: Any) -> Any:
        i, state, reports = carry
        logits_BV, state = step_logits(weights, state, active_B, length, config)
        params = sampling.SamplingParams(**state["sampling"])
        ids_B = sampling.sample(
            logits_BV, params, state["seen"], state["drawn"], state["lengths"] + 1
        )
        made = sampling.report(logits_BV, ids_B, alternatives, control["alternatives"])
        reports = jax.tree.map(lambda all_, one: all_.at[i].set(one), reports, made)
        return i + 1, _advance(state, ids_B, active_B), reports

    shape = (steps, active_B.shape[0])
    nothing = sampling.Report(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, alternatives), jnp.int32),
        jnp.zeros((*shape, alternatives), jnp.float32),
    )
    _, state, reports = jax.lax.while_loop(
        lambda carry: carry[0] < control["steps"], body, (jnp.int32(0), state, nothing)
    )
    return state, reports


def _advance(state: State, ids_B: Any, active_B: Any) -> State:
    is_id_BV = ids_B[:, None] == jnp.arange(state["seen"].shape[1])
    is_new_BV = is_id_BV & active_B[:, None]
    return {
        **state,
        "tokens": jnp.where(active_B, ids_B, state["tokens"]),
        "lengths": jnp.where(active_B, state["lengths"] + 1, state["lengths"]),
        "seen": state["seen"] | is_new_BV,
        "drawn": state["drawn"] + is_new_BV,
    }


def prefill(
    weights: Weights,
    state: State,
    chunk: Mapping[str, Any],
    *,
    length: int,
    alternatives: int,
    scores: bool,
    config: LlamaConfig,
) -> tuple[State, Any]:
    """A chunk of one slot's prompt, and the first token behind it.

    Args:
        weights: see `Weights`.
        state: as `state_leaves` says.
        chunk: `tokens` (S,), of which `count` are real; `slot`; `start`, tokens that the slot holds
            before, so that `start` + S is within the slot; `last`, whether the prompt ends here:
            then also how to go on, `sampling/FIELD` scalars and `seen` (V,), the tokens of the
            whole prompt. With `scores` also `targets` (S,), the token after each.
        length: positions that are read, T: the chunk ends within.
        alternatives: P.
        scores: whether to report on `targets` too.
        config: the model.

    Returns:
        (state, {"first": report (1, ...)[, "scores": report (S, ...)]}).
    """
    slot, start = chunk["slot"], chunk["start"]
    x_SH, state = _run_chunk(weights, state, chunk["tokens"], slot, start, length, config)
    last = chunk["count"] - 1
    x_1H = jax.lax.dynamic_slice_in_dim(x_SH, last, 1)
    logits_1V = _logits(weights, x_1H, config)
    params = {name: chunk["sampling"][name] for name in sampling.FIELDS}
    one = sampling.SamplingParams(**{name: x[None] for name, x in params.items()})
    end = start + chunk["count"]
    seen_1V = chunk["seen"][None]
    ids_1 = sampling.sample(logits_1V, one, seen_1V, jnp.zeros(seen_1V.shape, jnp.int32), end[None])
    outputs = {"first": sampling.report(logits_1V, ids_1, alternatives)}
    if scores:
        outputs["scores"] = sampling.report(
            _logits(weights, x_SH, config), chunk["targets"], alternatives
        )
    state = {**state, "lengths": state["lengths"].at[slot].set(end)}
    return _begin(state, chunk, params, ids_1[0]), outputs


def chunk_logits(
    weights: Weights,
    state: State,
    tokens_S: Any,
    slot: Any,
    start: Any,
    *,
    length: int,
    config: LlamaConfig,
) -> tuple[Any, State]:
    """Logits (S, V) behind every token of a chunk, and the state; arguments as for `prefill`."""
    x_SH, state = _run_chunk(weights, state, tokens_S, slot, start, length, config)
    return _logits(weights, x_SH, config), state


def _run_chunk(
    weights: Weights,
    state: State,
    tokens_S: Any,
    slot: Any,
    start: Any,
    length: int,
    config: LlamaConfig,
) -> tuple[Any, State]:
    """Hidden states (S, H) behind the last layer, and the state with the chunk's keys in it."""
    positions_S = start + jnp.arange(tokens_S.shape[0])

    def attend(q_SKGD: Any, kv_S2KD: Any, layer: State) -> tuple[Any, State]:
        layer = _write_chunk(layer, kv_S2KD, slot, start)
        return _attend_chunk(q_SKGD, layer, slot, positions_S, length), layer

    x_SH, cache = _run_layers(weights, tokens_S, positions_S, state["cache"], attend, config)
    return x_SH, {**state, "cache": cache}


def _begin(state: State, chunk: Mapping[str, Any], params: Mapping[str, Any], first: Any) -> State:
    """The state in which decoding goes on behind a prompt, if the prompt ends here."""
    slot, last = chunk["slot"], chunk["last"]
    seen_V = chunk["seen"].at[first].set(True)
    drawn_V = jnp.zeros(seen_V.shape, jnp.int32).at[first].set(1)

    def put(array: Any, value: Any) -> Any:
        return array.at[slot].set(jnp.where(last, value, array[slot]))

    return {
        **state,
        "tokens": put(state["tokens"], first),
        "seen": put(state["seen"], seen_V),
        "drawn": put(state["drawn"], drawn_V),
        "sampling": {name: put(state["sampling"][name], x) for name, x in params.items()},
    }


def copy_slot(
    state: State, slots: Mapping[str, Any], *, length: int
) -> tuple[State, dict[str, Any]]:
    """Keys and values of the first positions of the slot `source` to the slot `target`."""

    def copied(array: Any) -> Any:
        zero = jnp.zeros((), slots["source"].dtype)
        sizes = (1, *array.shape[1:3], length, *array.shape[4:])
        rest = (zero,) * (array.ndim - 1)
        row = jax.lax.dynamic_slice(array, (slots["source"], *rest), sizes)
        return jax.lax.dynamic_update_slice(array, row, (slots["target"], *rest))

    return {**state, "cache": jax.tree.map(copied, state["cache"])}, {}


# What is exported

SPECS: Mapping[str, tuple[Any, ...]] = {
    "weights/embed_tokens/": ("model", None),
    "weights/lm_head/": ("model", None),
    "weights/norm/": (None,),
    "weights/layers/*/input_layernorm/": (None,),
    "weights/layers/*/post_attention_layernorm/": (None,),
    "weights/layers/*/self_attn/q_proj/": ("model", None),
    "weights/layers/*/self_attn/o_proj/": (None, "model"),
    "weights/layers/*/mlp/gate_proj/": ("model", None),
    "weights/layers/*/mlp/up_proj/": ("model", None),
    "weights/layers/*/mlp/down_proj/": (None, "model"),
    "state/cache/*/": ("data", None, "...", None, None),
    "state/tokens": (None,),
    "state/lengths": (None,),
    "state/sampling/": (None,),
}
"""How paths begin -> spec: entries beyond a tensor's rank are not used, missing ones are None.

Tensor parallelism over `model`, slots over `data`. Keys' and values' projections and the cache's
heads are left to the compiler: with more devices than key heads it splits what there is, and the
query heads of one key head go on from there.
"""


def specs(paths: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    """Specs by path pattern (layers are `*`), each as long as the rank.

    Args:
        paths: path of every leaf of the weights and the state -> its rank.
    """
    found = {}
    for path, rank in paths.items():
        pattern = re.sub(r"/(layers|cache)/\d+/", r"/\1/*/", path)
        spec = next((SPECS[begin] for begin in SPECS if pattern.startswith(begin)), None)
        if spec is not None:
            found[pattern] = (*spec, *(None,) * rank)[:rank]
    return found


def functions(
    config: LlamaConfig, shape: ServingShape, weights: Any
) -> tuple[list[Function], Any, Mapping[str, tuple[Any, ...]], str]:
    """All that serving calls, to export.

    Args:
        config: the model.
        shape: the sizes.
        weights: tree of `jax.ShapeDtypeStruct`s, see `Weights`.

    Returns:
        (functions, tree of the state's `StateLeaf`s, specs by path, the name of the function whose
        plan decides what specs leave open).
    """
    leaves = state_leaves(config, shape)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves)

    def function(name: str, fn: Any, inputs: Any, **tags: int | str) -> Function:
        names = ("weights", "state", "inputs")
        return Function(
            name, fn, (weights, state, inputs), names, ("weights", "state", "input"), tags
        )

    common: dict[str, Any] = {"alternatives": shape.top_logprobs, "config": config}
    found = []
    for length in shape.lengths:
        fn = functools.partial(decode, length=length, steps=shape.decode_steps, **common)
        name = f"decode_t{length}"
        found.append(function(name, fn, _control(shape), kind="decode", length=length))
    for length, chunk in itertools.product(shape.lengths, shape.chunks):
        if chunk > length:
            continue
        sizes = {"length": length, "chunk": chunk}
        for kind, scores in (("prefill", False), ("score", True)):
            fn = functools.partial(prefill, length=length, scores=scores, **common)
            name = f"{kind}_s{chunk}_t{length}"
            found.append(function(name, fn, _chunk(chunk, scores, config), kind=kind, **sizes))
    for length in shape.lengths:
        slots = _scalars("source", "target")
        found.append(Function(
            f"copy_t{length}", functools.partial(copy_slot, length=length), (state, slots),
            ("state", "inputs"), ("state", "input"), {"kind": "copy", "length": length},
        ))  # fmt: skip
    paths = tree_ranks({"weights": weights, "state": state})
    return found, leaves, specs(paths), found[len(shape.lengths) - 1].name


def tree_ranks(tree: Any) -> dict[str, int]:
    """Path of every leaf, joined by `/` -> its rank."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(entry.key) for entry in path): len(x.shape) for path, x in leaves}


def _control(shape: ServingShape) -> Any:
    return {
        "active": jax.ShapeDtypeStruct((shape.slots,), np.bool_),
        "alternatives": jax.ShapeDtypeStruct((), np.bool_),
        **_scalars("steps"),
    }


def _chunk(size: int, scores: bool, config: LlamaConfig) -> Any:
    tokens = jax.ShapeDtypeStruct((size,), np.int32)
    return {
        **_scalars("slot", "start", "count"),
        "tokens": tokens,
        **({"targets": tokens} if scores else {}),
        "last": jax.ShapeDtypeStruct((), np.bool_),
        "seen": jax.ShapeDtypeStruct((config.vocab_size,), np.bool_),
        "sampling": {
            name: jax.ShapeDtypeStruct((), dtype) for name, (dtype, _) in sampling.FIELDS.items()
        },
    }


def _scalars(*names: str) -> Any:
    return {name: jax.ShapeDtypeStruct((), np.int32) for name in names}
