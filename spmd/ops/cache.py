"""`cache_update`: a new entry for every slot of a cache, in place.

Shapes are in the names: B slots, T positions, D width; between B and T any dims may be.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.ir.dialect.rule import REPLICATE, Rule, parse_rule
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite

NAME = "spmd.cache_update"


def cache_update(cache: Any, new: Any, positions_B: Any) -> jax.Array:
    """The cache with `new[b]` at position `positions_B[b]` of slot b.

    Args:
      cache: (B, ..., T, D).
      new: (B, ..., D), of the same dtype.
      positions_B: integers; for those that are not in [0, T) nothing is written.

    Returns:
      An array like `cache`: in the same memory if that was donated.

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> keys_BKTD = cache_update(keys_BKTD, new_BKD, lengths_B)
    """
    wanted = (*cache.shape[:-2], *cache.shape[-1:])
    if cache.ndim < 3 or new.shape != wanted or positions_B.shape != cache.shape[:1]:
        raise ArgumentError(
            "cache_update cannot be computed",
            actual=f"cache {cache.shape}, new {new.shape}, positions {positions_B.shape}",
            required="cache (B, ..., T, D), new (B, ..., D), positions (B,)",
            fix="correct the shapes",
        )
    updated: jax.Array = jax.lax.composite(_decomposition, NAME)(cache, new, positions_B)
    return updated


def _decomposition(cache: Any, new: Any, positions_B: Any) -> Any:
    positions_B = jnp.where(positions_B < 0, cache.shape[-2], positions_B)

    def one(slot: Any, entry: Any, position: Any) -> Any:
        return slot.at[..., position, :].set(entry, mode="drop")

    return jax.vmap(one)(cache, new, positions_B)


def _rows(cache: Any, new: Any, positions_B: Any) -> Any:
    """Scatters into rows of one matrix; with other dims XLA would transpose the whole cache."""
    # Slot b, head k, position t is row (b * K + k) * T + t. Positions out of range go behind the
    # last row, where `drop` ignores them; otherwise they would hit the next head's rows.
    slots, length, width = cache.shape[0], cache.shape[-2], cache.shape[-1]
    middle = math.prod(cache.shape[1:-2])
    rows = jnp.arange(slots * middle).reshape(slots, middle)
    inside_B = (positions_B >= 0) & (positions_B < length)
    indices = jnp.where(
        inside_B[:, None], rows * length + positions_B[:, None], slots * middle * length
    )
    flat = cache.reshape(-1, width)
    flat = flat.at[indices.reshape(-1)].set(
        new.reshape(-1, width), mode="drop", unique_indices=True
    )
    return flat.reshape(cache.shape)


def _rule(kind: OpKind) -> Rule:
    outer = " ".join(f"b{i}" for i in range(kind.operands[0].rank - 2))
    text = f"{outer} t d, {outer} d, b0 -> {outer} t d"
    return parse_rule(text, kind.operands, kind.results, kinds={"t": REPLICATE})


register_composite(NAME, _rule, decomposition=_decomposition, kernels={"cuda": _rows})
