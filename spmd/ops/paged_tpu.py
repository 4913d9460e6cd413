"""Paged attention on TPUs: jax's ragged paged attention kernel, for rows of several slots at once.

It wants sequences one behind the other, each with rows: slots without rows are left out. A scale
of each key it does not know, so int8 pools are left to the reference.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd.ops.paged_reference import last_positions

LANES = 128  # widths of a head are multiples of this
HEADS = (1, 2, 4, 8)  # numbers of key heads, beside multiples of the last

POSITIONS = 512
"""About as many keys and values are held at a time: 4 MiB of eight heads in bf16, twice."""

ROWS = 32  # rows of a block


def attend(*operands: Any, window: int | None = None) -> Any:
    """As the reference; NotImplemented for shapes and dtypes that the kernel does not take."""
    q_ARKGD, pool_ANPK2D, table_ABM, _, positions_AR, first_AB1, *_ = operands
    if not takes(q_ARKGD, pool_ANPK2D) or 0 in (*q_ARKGD.shape, *table_ABM.shape):
        return NotImplemented
    last_AR = last_positions(positions_AR, first_AB1)
    # The groups' pages are those of one pool: none of it is cut out.
    count, pages, size, heads, _, width = pool_ANPK2D.shape
    pool = pool_ANPK2D.reshape(count * pages, size, heads * 2, width)
    before_A11 = jnp.arange(count, dtype=jnp.int32)[:, None, None] * pages
    table_ABM = jnp.clip(table_ABM, 0, pages - 1) + before_A11
    groups = [
        _group(q_ARKGD[a], pool, table_ABM[a], last_AR[a], first_AB1[a], window)
        for a in range(count)
    ]
    # Of rows that no sequence has nothing is written.
    is_seeing_AR = (last_AR >= 0)[..., None, None, None]
    return jnp.where(is_seeing_AR, jnp.stack(groups), 0)


def takes(q_ARKGD: Any, pool_ANPK2D: Any) -> bool:
    """Whether the kernel is for these shapes and dtypes."""
    size, heads, _, width = pool_ANPK2D.shape[2:]
    return (
        q_ARKGD.dtype == pool_ANPK2D.dtype
        and q_ARKGD.dtype.name in ("bfloat16", "float32")
        and width % LANES == 0
        and (heads in HEADS or heads % HEADS[-1] == 0)
        and size % 8 == 0
    )


def _group(
    q_RKGD: Any, pool: Any, table_BM: Any, last_R: Any, first_B1: Any, window: int | None
) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    rows, heads, groups, width = q_RKGD.shape
    # A slot's keys end where its last row is, and its rows are at the positions up to there.
    counts_B = first_B1[1:] - first_B1[:-1]
    lengths_B = jnp.maximum(last_R[jnp.clip(first_B1[1:] - 1, 0, rows - 1)] + 1, 1)
    with_rows_B = jnp.argsort(counts_B == 0, stable=True)
    ends_B = jnp.cumsum(counts_B[with_rows_B])
    # A call without rows still fetches the first sequence's first page.
    sequences_1 = jnp.maximum(jnp.sum(counts_B > 0, keepdims=True), 1)
    heads_RND = kernel.ragged_paged_attention(
        q_RKGD.reshape(rows, heads * groups, width),
        pool,
        lengths_B[with_rows_B].astype(jnp.int32),
        table_BM[with_rows_B],
        jnp.concatenate([jnp.zeros_like(ends_B[:1]), ends_B]).astype(jnp.int32),
        sequences_1.astype(jnp.int32),
        sm_scale=width**-0.5,
        sliding_window=window,
        num_kv_pages_per_block=max(1, min(table_BM.shape[1], POSITIONS // pool.shape[1])),
        num_queries_per_block=min(rows, ROWS),
    )
    return heads_RND.reshape(q_RKGD.shape)
