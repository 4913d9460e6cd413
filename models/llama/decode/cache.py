"""The state that lives on the devices between calls, above all the KV cache.

Shapes are in the names, as in `models.llama.model`, and

    A groups    B slots of a group    R rows of a group    N pages of a group's pool
    P positions of a page    M pages of a slot's table

A slot holds one sequence. The keys (rotated) and values of its tokens, at positions 0, 1, ..., lie
in pages, which the caller of a function chooses: see `spmd.ops.paged`. Behind the last token of a
sequence its page holds what earlier sequences left there; attention does not look at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import spmd
from models import sampling
from models.function import StateLeaf
from models.llama.config import LlamaConfig

State = dict[str, Any]
"""A tree of arrays as `state_leaves` describes it, or a part of one."""

PAGES = "pages"
"""The symbol for N: how many pages there are is known when the functions are loaded."""

INT8_MAX = 127.0


class ServingShape(NamedTuple):
    """The sizes for which functions are compiled.

    Attributes:
      slots: how many sequences run together, over all groups; `groups` divides it.
      max_length: the most tokens of a sequence, prompt and completion together; a multiple of
        `page`.
      rows: numbers of rows of a group that a call may have, ascending. A call with fewer is padded.
      lengths: numbers of positions that a call's tables reach, ascending multiples of `page`; the
        last one is `max_length`. While all sequences are short, tables are smaller.
      page: P.
      groups: A. Slots and pages are split among groups, so that they can be split over devices.
      top_logprobs: how many of the likeliest tokens are reported beside each one.
      cache_dtype: dtype of keys and values: a float type, or `int8` with one scale for each head
        and token.
    """

    slots: int
    max_length: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    page: int = 64
    groups: int = 1
    top_logprobs: int = 20
    cache_dtype: str = "bfloat16"

    @property
    def slots_of_group(self) -> int:
        """B."""
        return self.slots // self.groups

    @property
    def pages_of_slot(self) -> int:
        """Pages that the longest sequence takes."""
        return self.max_length // self.page


def symbolic_pages(shape: ServingShape) -> Any:
    """N as a symbol: at least one sequence fits, and no more pages than all slots can fill."""
    least = shape.pages_of_slot
    bounds = (f"{PAGES} >= {least}", f"{PAGES} <= {shape.slots_of_group * least}")
    return jax.export.symbolic_shape(PAGES, constraints=bounds)[0]


def state_leaves(config: LlamaConfig, shape: ServingShape, pages: Any) -> Any:
    """Describes the arrays of the state.

    - `cache/I`, for layer I: `values` (A, N, P, K, 2, D) has the keys at index 0 of the second last
      dim and the values at index 1. An int8 cache also has `scales` (A, N, P, K, 2).
    - `tokens` (A, B): the latest drawn token of each slot.
    - `seen` (A, B, V): whether a token occurs in the sequence.
    - `drawn` (A, B, V): how often a token was drawn in it.
    - `sampling/FIELD` (A, B): the sampling parameters of each slot.

    Args:
        config: the model.
        shape: the sizes.
        pages: N, a number or `symbolic_pages(shape)`.

    Returns:
        A tree of `StateLeaf`s.
    """
    slots = (shape.groups, shape.slots_of_group)
    kv = (shape.groups, pages, shape.page, config.kv_heads, 2)
    layer = {"values": StateLeaf((*kv, config.head_width), shape.cache_dtype)}
    if shape.cache_dtype == "int8":
        layer["scales"] = StateLeaf(kv, "float32")
    return {
        "cache": {str(i): dict(layer) for i in range(config.num_hidden_layers)},
        "tokens": StateLeaf(slots, "int32"),
        "seen": StateLeaf((*slots, config.vocab_size), "bool"),
        "drawn": StateLeaf((*slots, config.vocab_size), "int32"),
        "sampling": {
            name: StateLeaf(slots, np.dtype(dtype).name, neutral)
            for name, (dtype, neutral) in sampling.FIELDS.items()
        },
    }


def write_and_attend(
    layer: State, q_ARKGD: Any, kv_ARK2D: Any, rows: Mapping[str, Any]
) -> tuple[Any, State]:
    """Writes each row's key and value, and attends to those up to its position.

    Args:
        layer: one layer's cache.
        q_ARKGD: the queries.
        kv_ARK2D: the new keys and values.
        rows: `table`, `slots`, `positions` and `first`, as for `spmd.ops.paged_attention`.

    Returns:
        (the heads' outputs (A, R, K, G, D), the layer's cache after the writes).
    """
    tables = (rows["table"], rows["slots"], rows["positions"])
    new = _stored(kv_ARK2D, layer)
    layer = {name: spmd.ops.paged_update(layer[name], x, *tables) for name, x in new.items()}
    heads_ARKGD = spmd.ops.paged_attention(
        q_ARKGD, layer["values"], *tables, rows["first"], scales=layer.get("scales")
    )
    return heads_ARKGD, layer


def _stored(kv: Any, layer: State) -> State:
    """Keys and values (..., D) in the cache's dtype; with scales (...) if the cache has them."""
    if "scales" not in layer:
        return {"values": kv.astype(layer["values"].dtype)}
    kv = kv.astype(jnp.float32)
    scales = jnp.max(jnp.abs(kv), axis=-1) / INT8_MAX
    scaled = kv / jnp.where(scales > 0, scales, 1.0)[..., None]
    return {"values": jnp.round(scaled).astype(jnp.int8), "scales": scales}
