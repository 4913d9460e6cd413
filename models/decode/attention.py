"""Keys and values in pages, for models with attention.

Shapes are in the names, as in `spmd.models.decode.model`, and

    P positions of a page    K key heads    G query heads of a key head    D head width

The keys (rotated, if the model does so) and values of a slot's tokens, at positions 0, 1, ..., lie
in pages, which the caller of a function chooses: see `spmd.ops.paged`. Behind the last token of a
sequence its page holds what earlier sequences left there; attention does not look at it.
"""

from typing import Any

import jax.numpy as jnp

import spmd
from spmd.models.decode.model import Rows
from spmd.models.decode.shape import ServingShape
from spmd.models.decode.state import State
from spmd.models.function import StateLeaf

INT8_MAX = 127.0


def kv_leaves(
    shape: ServingShape, pages: Any, heads: int, width: int, *, apart: bool = True
) -> dict[str, StateLeaf]:
    """The cache of one layer.

    `values` (A, N, P, K, 2, D) has the keys at index 0 of the second last dim and the values at
    index 1. An int8 cache also has `scales` (A, N, P, K, 2).

    Args:
        pages: N.
        heads: K.
        width: D.
        apart: whether values are others than keys; if not, there is 1 in the place of 2.
    """
    kv = (shape.groups, pages, shape.page, heads, 2 if apart else 1)
    leaves = {"values": StateLeaf((*kv, width), shape.cache_dtype)}
    if shape.cache_dtype == "int8":
        leaves["scales"] = StateLeaf(kv, "float32")
    return leaves


def write_and_attend(
    layer: State,
    q_ARKGD: Any,
    kv_ARK2D: Any,
    rows: Rows,
    window: int | None = None,
    sinks_KG: Any = None,
) -> tuple[Any, State]:
    """Writes each row's key and value, and attends to those up to its position.

    Args:
        layer: one layer's cache.
        rows: `table`, `slots`, `positions` and `first`, as for `spmd.ops.paged_attention`.
        window, sinks_KG: as there.

    Returns:
        (the heads' outputs (A, R, K, G, D), the layer's cache after the writes).
    """
    tables = (rows["table"], rows["slots"], rows["positions"])
    new = _stored(kv_ARK2D, layer)
    layer = {name: spmd.ops.paged_update(layer[name], x, *tables) for name, x in new.items()}
    heads_ARKGD = spmd.ops.paged_attention(
        q_ARKGD, layer["values"], *tables, rows["first"], scales=layer.get("scales"),
        sinks_KG=sinks_KG, window=window,
    )  # fmt: skip
    return heads_ARKGD, layer


def _stored(kv: Any, layer: State) -> State:
    """Keys and values (..., D) in the cache's dtype; with scales (...) if the cache has them."""
    if "scales" not in layer:
        return {"values": kv.astype(layer["values"].dtype)}
    kv = kv.astype(jnp.float32)
    scales = jnp.max(jnp.abs(kv), axis=-1) / INT8_MAX
    scaled = kv / jnp.where(scales > 0, scales, 1.0)[..., None]
    return {"values": jnp.round(scaled).astype(jnp.int8), "scales": scales}
