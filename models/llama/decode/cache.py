"""The state that lives on the devices between calls, above all the KV cache.

Shapes are in the names, as in `models.llama.model`, and

    B slots    S tokens of a chunk    T cache positions that attention reads

A slot holds one sequence. The keys (rotated) and values of its tokens are at positions 0, 1, ...
Positions behind them hold what earlier sequences left there; attention masks them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from models import sampling
from models.function import StateLeaf
from models.llama.config import LlamaConfig

State = dict[str, Any]
"""A tree of arrays as `state_leaves` describes it, or a part of one."""

KEYS, VALUES = 0, 1
INT8_MAX = 127.0


class ServingShape(NamedTuple):
    """The sizes for which functions are compiled.

    Attributes:
      slots: how many sequences are decoded together.
      max_length: cache positions of a slot, so the longest prompt and completion together.
      chunks: sizes of the prefill buckets, ascending. A chunk is padded to the next size.
      lengths: numbers of cache positions that attention may read, ascending; the last one is
        `max_length`. While all sequences are short, less of the cache is read.
      decode_steps: the most tokens that one call of decode generates for each slot.
      top_logprobs: how many of the likeliest tokens are reported beside each generated one.
      cache_dtype: dtype of keys and values: a float type, or `int8` with one scale for each head
        and token.
    """

    slots: int
    max_length: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    decode_steps: int = 10
    top_logprobs: int = 20
    cache_dtype: str = "bfloat16"


def state_leaves(config: LlamaConfig, shape: ServingShape) -> Any:
    """Describes the arrays of the state.

    - `cache/I`, for layer I: `values` (B, 2, K, T, D) has the keys at index 0 of the second dim
      and the values at index 1. An int8 cache also has `scales` (B, 2, K, T).
    - `tokens` (B,): the latest token of each slot. Its key and value are not in the cache yet.
    - `lengths` (B,): how many tokens are in the cache, so the position of the latest token.
    - `seen` (B, V): whether a token occurs in the sequence.
    - `drawn` (B, V): how often a token was generated in it.
    - `sampling/FIELD` (B,): the sampling parameters of each slot.

    Args:
        config: the model.
        shape: the sizes.

    Returns:
        A tree of `StateLeaf`s.
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


def write_each(layer: State, kv_B2KD: Any, positions_B: Any) -> State:
    """Writes one key and value into every slot, each at its own position.

    Args:
        layer: one layer's cache.
        kv_B2KD: the new keys and values.
        positions_B: where they go; nothing is written for a slot whose position is -1.

    Returns:
        The layer's cache after the writes.
    """
    new = _stored(kv_B2KD, layer)
    written = {"values": spmd.ops.cache_update(layer["values"], new["values"], positions_B)}
    if "scales" in layer:
        scales = spmd.ops.cache_update(
            layer["scales"][..., None], new["scales"][..., None], positions_B
        )
        written["scales"] = scales[..., 0]
    return written


def write_chunk(layer: State, kv_S2KD: Any, slot: Any, start: Any) -> State:
    """Writes the keys and values of a chunk into one slot, at positions start, start + 1, ...

    The whole chunk has to fit: XLA would move a slice that ends behind the cache back until it
    fits, and so overwrite other tokens.
    """
    zero = jnp.zeros((), slot.dtype)
    new = _stored(jnp.moveaxis(kv_S2KD, 0, 2)[None], layer)
    return {
        name: jax.lax.dynamic_update_slice(
            layer[name], x, (slot, zero, zero, start, zero)[: x.ndim]
        )
        for name, x in new.items()
    }


def _stored(kv: Any, layer: State) -> State:
    """Keys and values (..., D) in the cache's dtype; with scales (...) if the cache has them."""
    if "scales" not in layer:
        return {"values": kv.astype(layer["values"].dtype)}
    kv = kv.astype(jnp.float32)
    scales = jnp.max(jnp.abs(kv), axis=-1) / INT8_MAX
    scaled = kv / jnp.where(scales > 0, scales, 1.0)[..., None]
    return {"values": jnp.round(scaled).astype(jnp.int8), "scales": scales}


def attend_chunk(q_SKGD: Any, layer: State, slot: Any, positions_S: Any, length: int) -> Any:
    """Attention of a chunk's queries over the first `length` positions of their slot.

    Args:
        q_SKGD: the queries.
        layer: one layer's cache, in which the chunk's own keys and values are already.
        slot: the slot's index.
        positions_S: the position of each query, which sees the keys up to there.
        length: T.

    Returns:
        The heads' outputs (S, K, G, D).
    """
    row = {
        name: jax.lax.dynamic_index_in_dim(x, slot)[0, :, :, :length] for name, x in layer.items()
    }
    # Without the barrier XLA on GPUs changes the layout of the whole cache to the one that the
    # attention kernel wants for this row, and back.
    kv_2KTD = jax.lax.optimization_barrier(row["values"])
    if "scales" in row:
        kv_2KTD = kv_2KTD.astype(jnp.float32) * row["scales"][..., None]
    # The mask gives old entries the weight 0, but 0 * NaN is NaN: a sequence that overflowed would
    # spoil the next one in its slot.
    kv_2KTD = jnp.where(jnp.arange(length)[:, None] <= positions_S[-1], kv_2KTD, 0)
    k_1TKD, v_1TKD = (kv_2KTD[i].swapaxes(0, 1)[None].astype(q_SKGD.dtype) for i in (KEYS, VALUES))
    q_1SND = q_SKGD.reshape(1, q_SKGD.shape[0], -1, q_SKGD.shape[-1])
    heads_1SND = spmd.ops.attention(q_1SND, k_1TKD, v_1TKD, positions=positions_S)
    return heads_1SND.reshape(q_SKGD.shape)


def copy_slot(
    state: State, slots: Mapping[str, Any], *, length: int
) -> tuple[State, dict[str, Any]]:
    """Copies the first `length` keys and values of slot `source` to slot `target`.

    A prompt that begins like another one need not be computed again up to where they differ.

    Args:
        state: as `state_leaves` says.
        slots: `source` and `target`, int32 scalars.
        length: cache positions.

    Returns:
        (state, no outputs).
    """

    def copied(array: Any) -> Any:
        zero = jnp.zeros((), slots["source"].dtype)
        sizes = (1, *array.shape[1:3], length, *array.shape[4:])
        rest = (zero,) * (array.ndim - 1)
        row = jax.lax.dynamic_slice(array, (slots["source"], *rest), sizes)
        return jax.lax.dynamic_update_slice(array, row, (slots["target"], *rest))

    return {**state, "cache": jax.tree.map(copied, state["cache"])}, {}
