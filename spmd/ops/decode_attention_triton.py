"""Decode attention on NVIDIA GPUs: a Pallas kernel for Triton, split over positions.

A program of the kernel goes over a part of one slot's and key head's positions, a tile at a time,
with the running maximum and sum of an online softmax (Dao et al. 2022; the split over positions is
Flash-Decoding's). With few slots there are several parts for each; they are joined afterwards.

jax 0.11 still has Pallas's Triton backend, and deprecates it: what follows is Mosaic GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

TILE = 64
"""Positions that are in registers at a time."""

PROGRAMS = 528
"""About as many programs as keep a GPU of 132 multiprocessors busy."""

MOST_GROUPS = 8
LOWEST = np.float32(-1e30)


def decode(
    q_BKGD: Any,
    cache: Any,
    positions_B: Any,
    *scales: Any,
    length: int,
    interpret: bool = False,
) -> Any:
    """As the reference in `decode_attention`; NotImplemented for shapes that it does not take.

    Args:
      q_BKGD, cache, positions_B, *scales, length: as there.
      interpret: run it step by step in jax, on any platform: for tests.
    """
    slots, heads, groups, width = q_BKGD.shape
    if not takes(groups, width, length) or 0 in q_BKGD.shape:
        return NotImplemented
    parts = _parts(slots * heads, length)
    extent = length // parts
    grid = (slots, heads, parts)

    def both(shape: tuple[int, ...], which: int) -> pl.BlockSpec:
        rest = (0,) * (len(shape) - 1)
        return pl.BlockSpec((None, None, None, *shape), lambda b, k, c: (b, which, k, c, *rest))

    in_specs = [
        pl.BlockSpec((1,), lambda b, k, c: (b,)),
        pl.BlockSpec((None, None, groups, width), lambda b, k, c: (b, k, 0, 0)),
        both((extent, width), 0),
        both((extent, width), 1),
    ]
    operands = [positions_B, q_BKGD, cache, cache]
    if scales:
        in_specs += [both((extent,), 0), both((extent,), 1)]
        operands += [scales[0], scales[0]]
    part = (slots, heads, parts, groups)
    numbers_spec = pl.BlockSpec((None, None, None, groups), lambda b, k, c: (b, k, c, 0))
    numbers = jax.ShapeDtypeStruct(part, jnp.float32)
    heads_BKCGD, largest_BKCG, sums_BKCG = pl.pallas_call(
        functools.partial(_kernel, groups=groups, tiles=extent // TILE),
        grid=grid,
        in_specs=in_specs,
        out_specs=[
            pl.BlockSpec((None, None, None, groups, width), lambda b, k, c: (b, k, c, 0, 0)),
            numbers_spec,
            numbers_spec,
        ],
        out_shape=[jax.ShapeDtypeStruct((*part, width), jnp.float32), numbers, numbers],
        interpret=interpret,
        **({} if interpret else {"compiler_params": _compiler_params()}),
    )(*operands)
    return _joined(heads_BKCGD, largest_BKCG, sums_BKCG).astype(q_BKGD.dtype)


def takes(groups: int, width: int, length: int) -> bool:
    """Whether the kernel takes these sizes: Triton's tiles are powers of two."""
    is_power = width & (width - 1) == 0 and 16 <= width <= 256
    return groups <= MOST_GROUPS and is_power and length % TILE == 0


def _compiler_params() -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=4, num_stages=3)


def _parts(sequences: int, length: int) -> int:
    """How many programs share the positions of one slot and head."""
    tiles = length // TILE
    wanted = max(1, PROGRAMS // sequences)
    return max(n for n in range(1, tiles + 1) if tiles % n == 0 and n <= wanted)


def _joined(heads_BKCGD: Any, largest_BKCG: Any, sums_BKCG: Any) -> Any:
    # Each part has sum(exp(s - m) v) and sum(exp(s - m)) with its own maximum m. Factors exp(m - M)
    # for the largest maximum M bring them to one scale. A part that sees no position has sums of 0.
    if heads_BKCGD.shape[2] == 1:
        return heads_BKCGD[:, :, 0] / sums_BKCG[:, :, 0, :, None]
    share_BKCG = jnp.exp(largest_BKCG - jnp.max(largest_BKCG, axis=2, keepdims=True))
    total_BKG = jnp.sum(share_BKCG * sums_BKCG, axis=2)
    return jnp.sum(heads_BKCGD * share_BKCG[..., None], axis=2) / total_BKG[..., None]


def _kernel(
    positions: Any, q: Any, keys: Any, values: Any, *rest: Any, groups: int, tiles: int
) -> None:
    *scales, heads_out, largest_out, sums_out = rest
    width = q.shape[-1]
    start = pl.program_id(2) * (tiles * TILE)
    last = positions[0]
    queries = [q[g, :].astype(jnp.float32) * (1 / math.sqrt(width)) for g in range(groups)]

    # Online softmax: `largest`, `total` and `head` are of the positions so far. When a tile has a
    # larger score, what was summed before is scaled down by `kept`; nothing is read twice.
    def tile(i: Any, carry: Any) -> Any:
        here = pl.ds(i * TILE, TILE)
        keys_TD = keys[here, :].astype(jnp.float32)
        seen_T = start + i * TILE + jnp.arange(TILE) <= last
        # What lies behind has no weight, but NaN is NaN without any.
        values_TD = jnp.where(seen_T[:, None], values[here, :].astype(jnp.float32), 0.0)
        new = []
        for query_D, (largest, total, head_D) in zip(queries, carry, strict=True):
            scores_T = jnp.sum(keys_TD * query_D[None, :], axis=1)
            if scales:
                scores_T *= scales[0][here]
            scores_T = jnp.where(seen_T, scores_T, LOWEST)
            above = jnp.maximum(largest, jnp.max(scores_T))
            weights_T = jnp.where(seen_T, jnp.exp(scores_T - above), 0.0)
            kept = jnp.exp(largest - above)
            total = total * kept + jnp.sum(weights_T)
            if scales:
                weights_T *= jnp.where(seen_T, scales[1][here], 0.0)
            head_D = head_D * kept + jnp.sum(values_TD * weights_T[:, None], axis=0)
            new.append((above, total, head_D))
        return tuple(new)

    nothing = (jnp.float32(LOWEST), jnp.float32(0.0), jnp.zeros(width, jnp.float32))
    needed = jnp.clip((last - start) // TILE + 1, 0, tiles)  # tiles behind `last` are not read
    found = jax.lax.fori_loop(0, needed, tile, (nothing,) * groups)
    for g, (largest, total, head_D) in enumerate(found):
        heads_out[g, :] = head_D
        largest_out[g] = largest
        sums_out[g] = total
