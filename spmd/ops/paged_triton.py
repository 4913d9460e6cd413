"""Paged attention on NVIDIA GPUs: a Pallas kernel for Triton, over tiles of rows.

A program of the kernel computes a tile: some rows of one slot, all query heads of a key head, over
a part of the positions that the rows see. It loops over blocks of positions, with the running
maximum and sum of an online softmax (Dao et al. 2022). Both products run on tensor cores, which
take at least 16 queries; so the queries of a single row are its query heads, padded with zeros.

Where there are few tiles, several programs share the positions of one, in equal parts, and their
results are combined (Flash-Decoding's split). Slots with more rows than a small tile holds have
large tiles, in another call of the kernel, which reads keys once for 64 queries; on Hopper another
kernel takes those (`spmd.ops.paged_hopper`).

jax 0.11 still has Pallas's Triton backend, but deprecates it in favour of Mosaic GPU.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from spmd.errors import ArgumentError
from spmd.ops import paged_hopper
from spmd.ops.paged_reference import scales_and_sinks
from spmd.ops.products_triton import compiled_with, places, triton

KEYS, VALUES = 0, 1
"""Where they are among the two of a position: blocks of a kernel are not counted from the end."""

POSITIONS = 64  # positions of a tile: so many keys and values are multiplied at a time
PROGRAMS = 528  # about as many programs as keep a GPU of 132 multiprocessors busy

SMALL, LARGE = 16, 64
"""Queries of a tile: tensor cores take at least 16, and those of Hopper are fastest with 64."""

MOST_GROUPS = 64
MOST_BYTES = 512
"""The most bytes of a head's vector: the tiles have to fit into 163 KiB (A100), 227 KiB (H100)."""

LOWEST = np.float32(-1e30)


def attend(*operands: Any, window: int | None = None, interpret: bool = False) -> Any:
    """Returns what `paged_reference.attend` does; NotImplemented for shapes that do not fit.

    ArgumentError for a pool with too many elements for Pallas. `interpret` runs the kernel step by
    step in jax, on any platform: for tests.
    """
    q_ARKGD, pool_ANPK2D, table_ABM, _, positions_AR, first_AB1, *rest = operands
    groups, width = q_ARKGD.shape[3:]
    if 0 in (*q_ARKGD.shape, *table_ABM.shape) or pool_ANPK2D.shape[4] != 2:
        return NotImplemented
    item = max(q_ARKGD.dtype.itemsize, pool_ANPK2D.dtype.itemsize)
    if not takes(groups, width, pool_ANPK2D.shape[2], item):
        return NotImplemented
    # Pallas counts elements with 32 bits where there are no more than 2^32 bytes, and the sign is
    # one of them: of single bytes it reaches half.
    size = math.prod(pool_ANPK2D.shape)
    if pool_ANPK2D.dtype.itemsize == 1 and 1 << 31 < size <= 1 << 32:
        page = math.prod(pool_ANPK2D.shape[2:]) * pool_ANPK2D.shape[0]
        raise ArgumentError(
            f"the kernel of paged_attention cannot read a pool of {size} bytes on one device",
            actual=f"{pool_ANPK2D.shape[1]} pages of {page} bytes",
            required=f"at most {(1 << 31) // page} pages, or more than {(1 << 32) // page}",
            fix="change the number of pages",
        )
    # Padding is the rows of one more slot, so that its results are written, too.
    rows, slots = q_ARKGD.shape[1], table_ABM.shape[1]
    counts_AB = jnp.maximum(jnp.diff(first_AB1, axis=1, append=rows), 0)
    small = max(SMALL, pl.next_power_of_2(groups))
    on_hopper = not rest and paged_hopper.takes(q_ARKGD, pool_ANPK2D)
    large = max(LARGE, small)
    read = (q_ARKGD, pool_ANPK2D, table_ABM, positions_AR, *rest)
    run = functools.partial(_run, read, window=window, interpret=interpret)
    if rows <= slots or (large == small and not on_hopper):
        return run(_tiles(counts_AB, first_AB1, rows, small // groups), small)
    # A slot's rows are all in small tiles, or all in large ones. On Hopper one that would leave
    # most of a large tile empty has small ones.
    half = paged_hopper.window_of(groups)
    border, most = (half, 2 * half) if on_hopper else (small // groups, large // groups)
    few_AB = counts_AB <= border
    few_counts_AB, many_counts_AB = (jnp.where(x, counts_AB, 0) for x in (few_AB, ~few_AB))
    few = _tiles(few_counts_AB, first_AB1, rows, small // groups)
    many = _tiles(many_counts_AB, first_AB1, rows, most, least=border + 1)
    found = (
        _run_on_hopper(read, many, window=window, interpret=interpret)
        if on_hopper
        else run(many, large)
    )
    return run(few, small, beside=found)


def takes(groups: int, width: int, size: int, item: int) -> bool:
    """Whether the kernel takes G (`groups`), D (`width`), P (`size`), bytes an element (`item`)."""
    are_powers = all(n & (n - 1) == 0 for n in (width, size))
    are_enough = width >= 16 and size >= 8
    return are_powers and are_enough and groups <= MOST_GROUPS and width * item <= MOST_BYTES


def _tiles(counts_AB: Any, first_AB: Any, rows: int, size: int, *, least: int = 1) -> Any:
    """Cuts each slot's `counts_AB` rows, from row `first_AB` on, into tiles of at most `size` rows.

    There are `rows` in all, and a slot that has any has at least `least`. Returns (A, I, 4), for
    programs of a kernel: the slot of each tile, its first row and, twice, its number of rows; these
    are 0 for tiles that are not needed.
    """
    # E.g. rows 0, 1..5 and 6 of three slots in tiles of four rows: counts [1, 5, 1], needed
    # [1, 2, 1], begin [0, 1, 3]; tile 2 is the second of slot 1, with row 5 alone.
    slots = counts_AB.shape[1]
    # Tiles hold fewest rows if slots have as few as they can, or one more than a tile.
    fewest = min(least, (size + 1) / 2)
    most = max(1, int(min(rows / fewest, (rows + (size - 1) * min(slots, rows)) / size)))
    needed_AB = (counts_AB + size - 1) // size
    ends_AB = jnp.cumsum(needed_AB, axis=1)
    begin_AB = ends_AB - needed_AB
    tile_I = jnp.arange(most, dtype=jnp.int32)
    slot_AI = jnp.sum(ends_AB[:, None] <= tile_I[:, None], axis=2, dtype=jnp.int32)
    is_needed_AI = slot_AI < slots
    slot_AI = jnp.where(is_needed_AI, slot_AI, 0)

    def of(x_AB: Any, slots: Any) -> Any:
        return jnp.take_along_axis(x_AB, slots, axis=1)

    done_AI = (tile_I - of(begin_AB, slot_AI)) * size
    left_AI = jnp.where(is_needed_AI, jnp.clip(of(counts_AB, slot_AI) - done_AI, 0, size), 0)
    start_AI = jnp.where(is_needed_AI, of(first_AB, slot_AI) + done_AI, 0)
    return jnp.stack([slot_AI, start_AI, left_AI, left_AI], axis=2)


def _run(
    operands: Any, about: Any, queries: int, *, window: int | None, interpret: bool,
    beside: Any = None,
) -> Any:  # fmt: skip
    """Returns (A, R, K, G, D), by tiles of `queries` each.

    `beside` are results of rows in no tile; without it those are undefined.
    """
    q_ARKGD, pool_ANPK2D, table_ABM, positions_AR, *rest = operands
    scales, sinks = scales_and_sinks(rest)
    outer, rows, heads, groups, width = q_ARKGD.shape
    pages, size = pool_ANPK2D.shape[1:3]
    count = about.shape[1]
    reach = min(table_ABM.shape[2] * size, window or table_ABM.shape[2] * size)
    item = max(q_ARKGD.dtype.itemsize, pool_ANPK2D.dtype.itemsize)
    parts = max(1, min(PROGRAMS // (outer * count * heads), reach // (2 * POSITIONS)))
    parts = 1 << parts.bit_length() - 1

    # The first dim of the grid is tiles of all groups, the second key heads, the third parts.
    def of_pool(kind: int, *rest: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, pages, size, None, None, *rest),
            lambda i, k, c: (i // count, 0, 0, k, kind, *(0 for _ in rest)),
        )

    def of_parts(each: int | None, *rest: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, each, *rest),
            lambda i, k, c: (i // count, i % count, k, 0 if each else c, *(0 for _ in rest)),
        )

    of_tile = pl.BlockSpec((None, None, 4), lambda i, k, c: (i // count, i % count, 0))
    of_head = pl.BlockSpec(
        (None, rows, None, groups, width), lambda i, k, c: (i // count, 0, k, 0, 0)
    )
    numbers = jax.ShapeDtypeStruct((outer, count, heads, parts, queries), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((*numbers.shape, width), jnp.float32), numbers, numbers]
    rests = [(queries, width), (queries,), (queries,)]

    def call(kernel: Any, last: int, in_specs: Any, inputs: Any, stages: int) -> Any:
        """The rows' results, written over those of `beside`."""
        return pl.pallas_call(
            kernel,
            grid=(outer * count, heads, last),
            in_specs=[*in_specs, *([] if beside is None else [of_head])],
            out_specs=of_head,
            out_shape=jax.ShapeDtypeStruct(q_ARKGD.shape, q_ARKGD.dtype),
            input_output_aliases={} if beside is None else {len(inputs): 0},
            **compiled_with(4, stages, interpret),
        )(*inputs, *([] if beside is None else [beside]))

    in_specs = [
        of_tile,
        pl.BlockSpec((None, *table_ABM.shape[1:]), lambda i, k, c: (i // count, 0, 0)),
        pl.BlockSpec((None, rows), lambda i, k, c: (i // count, 0)),
        of_head,
        of_pool(KEYS, width),
        of_pool(VALUES, width),
    ]
    inputs = [about, table_ABM, positions_AR, q_ARKGD, pool_ANPK2D, pool_ANPK2D]
    if scales:
        in_specs += [of_pool(KEYS), of_pool(VALUES)]
        inputs += [scales[0], scales[0]]
    in_specs += [pl.BlockSpec((None, groups), lambda i, k, c: (k, 0)) for _ in sinks]
    inputs += sinks
    kernel = functools.partial(_kernel, queries, parts, window, bool(scales), bool(sinks))
    # Keys of two tiles are fetched ahead, or of one.
    stages = 3 if width * item <= MOST_BYTES // 2 else 2
    if parts == 1:
        return call(kernel, 1, in_specs, inputs, stages)
    found = pl.pallas_call(
        kernel,
        grid=(outer * count, heads, parts),
        in_specs=in_specs,
        out_specs=[of_parts(None, *rest) for rest in rests],
        out_shape=shapes,
        **compiled_with(4, stages, interpret),
    )(*inputs)
    specs = [of_tile, *(of_parts(parts, *rest) for rest in rests)]
    return call(_combine, queries, specs, [about, *found], 1)


def _run_on_hopper(operands: Any, about: Any, *, window: int | None, interpret: bool) -> Any:
    """As `_run`, by the kernel of `spmd.ops.paged_hopper`."""
    q_ARKGD, pool_ANPK2D, table_ABM, positions_AR = operands
    outer, rows, heads, groups, width = q_ARKGD.shape
    pages, slots = pool_ANPK2D.shape[1], table_ABM.shape[1]
    slot_AI, row_AI, count_AI, _ = jnp.moveaxis(about, 2, 0)
    group_A1 = jnp.arange(outer)[:, None]
    position_AI = jnp.take_along_axis(positions_AR, row_AI, axis=1)
    end_AI = jnp.where((slot_AI < slots) & (position_AI >= 0), position_AI + count_AI, 0)
    line_AI = group_A1 * slots + jnp.minimum(slot_AI, slots - 1)
    tiles = (line_AI, group_A1 * rows + row_AI, position_AI, count_AI, end_AI)
    found_RC = paged_hopper.attend_tiles(
        q_ARKGD.reshape(outer * rows, heads * groups * width),
        pool_ANPK2D.reshape(-1, *pool_ANPK2D.shape[2:]),
        (jnp.clip(table_ABM, 0, pages - 1) + group_A1[..., None] * pages).reshape(
            outer * slots, -1
        ),
        jnp.stack(tiles, axis=2).reshape(-1, len(tiles)).astype(jnp.int32),
        groups=groups,
        window=window,
        interpret=interpret,
    )
    return found_RC.reshape(q_ARKGD.shape)


def _kernel(
    queries: int, parts: int, window: int | None, has_scales: bool, has_sinks: bool, *refs: Any
) -> None:
    about, table, positions, q, keys, values, *rest = refs
    outputs = rest[-1:] if parts == 1 else rest[-3:]
    scales, dtype = rest[: 2 * has_scales], q.dtype
    (groups, width), size = q.shape[1:], keys.shape[1]
    slot, start, count = about[0], about[1], about[2]
    is_padding = slot >= table.shape[0]
    slot = jnp.minimum(slot, table.shape[0] - 1)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    # The queries of a tile are (row, head) pairs, row after row.
    pair_Q = jnp.arange(queries)
    row_Q, head_Q = start + pair_Q // groups, pair_Q % groups
    is_real_Q = pair_Q < count * groups
    last_Q = _load(positions, (row_Q,), is_real_Q & ~is_padding, -1)
    query_QD = _load_wide(q, (row_Q, head_Q), is_real_Q)
    last = jnp.max(last_Q)
    # Behind nobody's window: -1 of rows that see nothing does not count.
    lowest = 0 if window is None else jnp.min(jnp.where(last_Q < 0, last, last_Q)) - window + 1

    def tile(i: Any, carry: Any) -> Any:
        page_T, largest_Q, total_Q, head_QD = carry
        position_T = i * POSITIONS + jnp.arange(POSITIONS)
        there_T = position_T <= last
        if window is not None:
            there_T &= position_T >= lowest
        where = (jnp.broadcast_to(page_T, (POSITIONS,)), position_T % size)
        # What lies behind the last position is not read: NaN is NaN also without any weight.
        key_TD = _load_wide(keys, where, there_T).astype(dtype)
        value_TD = _load_wide(values, where, there_T).astype(dtype)
        score_QT = triton().dot(query_QD, key_TD, trans_b=True, precision=precision)
        if scales:
            score_QT *= _load(scales[0], where, there_T, 0)[None]
        # Powers of two are one instruction, powers of e several.
        score_QT = score_QT * np.float32(math.log2(math.e) / math.sqrt(width))
        seen_QT = position_T[None] <= last_Q[:, None]
        if window is not None:
            seen_QT &= position_T[None] > last_Q[:, None] - window
        score_QT = jnp.where(seen_QT, score_QT, LOWEST)
        above_Q = jnp.maximum(largest_Q, jnp.max(score_QT, axis=1))
        weight_QT = jnp.where(seen_QT, jnp.exp2(score_QT - above_Q[:, None]), 0)
        kept_Q = jnp.exp2(largest_Q - above_Q)
        total_Q = total_Q * kept_Q + jnp.sum(weight_QT, axis=1)
        if scales:
            weight_QT *= _load(scales[1], where, there_T, 0)[None]
        found_QD = triton().dot(weight_QT.astype(dtype), value_TD, precision=precision)
        # The next page is looked up one turn ahead: then its keys can be fetched two turns ahead.
        next_T = _pages(table, slot, i + 1, size)
        return next_T, above_Q, total_Q, head_QD * kept_Q[:, None] + found_QD

    largest_Q, total_Q = jnp.full(queries, LOWEST, jnp.float32), jnp.zeros(queries, jnp.float32)
    if has_sinks:  # the first part begins with them
        is_own_Q = is_real_Q & (pl.program_id(2) == 0)
        sink_Q = _load(rest[2 * has_scales], (head_Q,), is_own_Q, 0).astype(jnp.float32)
        largest_Q = jnp.where(is_own_Q, sink_Q * np.float32(math.log2(math.e)), largest_Q)
        total_Q = is_own_Q.astype(jnp.float32)
    nothing = (largest_Q, total_Q, jnp.zeros((queries, width), jnp.float32))
    needed = (last + POSITIONS) // POSITIONS  # 0 where nothing is seen
    unseen = 0 if window is None else jnp.maximum(lowest, 0) // POSITIONS
    each = (needed - unseen + parts - 1) // parts
    begin = unseen + pl.program_id(2) * each
    end = jnp.minimum(begin + each, needed)
    pages_T = _pages(table, slot, begin, size)
    _, largest_Q, total_Q, head_QD = jax.lax.fori_loop(begin, end, tile, (pages_T, *nothing))
    if parts == 1:
        total_Q = jnp.where(total_Q == 0, 1, total_Q)
        head_QD = head_QD / total_Q[:, None]
        where, mask = _widened(outputs[0], (row_Q, head_Q), is_real_Q)
        triton().store(outputs[0].at[where], head_QD.astype(outputs[0].dtype), mask=mask)
        return
    for ref, x in zip(outputs, (head_QD, largest_Q, total_Q), strict=True):
        ref[...] = x


def _combine(about: Any, heads: Any, largest: Any, sums: Any, *rest: Any) -> None:
    """Writes one query's result.

    Each part has sum(2^(s - m) v) and sum(2^(s - m)) with its own maximum m. Factors 2^(m - M) for
    the largest maximum M bring them to one scale. A part that sees no position has sums of 0.
    """
    out, query = rest[-1], pl.program_id(2)
    groups = out.shape[1]

    @pl.when(query < about[2] * groups)
    def write() -> None:
        largest_C = largest[:, query]
        share_C = jnp.exp2(largest_C - jnp.max(largest_C))
        total = jnp.sum(share_C * sums[:, query])
        head_D = jnp.sum(heads[:, query] * share_C[:, None], axis=0)
        head_D /= jnp.where(total == 0, 1, total)
        out[about[1] + query // groups, query % groups] = head_D.astype(out.dtype)


def _pages(table: Any, slot: Any, i: Any, size: int) -> Any:
    """Returns the page of the `POSITIONS` of block `i`, or of each of them if pages are smaller."""
    most = table.shape[1] - 1
    if size >= POSITIONS:
        return table[slot, jnp.minimum(i // (size // POSITIONS), most)]
    column_T = (i * POSITIONS + jnp.arange(POSITIONS)) // size
    return table[jnp.full(POSITIONS, slot), jnp.minimum(column_T, most)]


def _load(ref: Any, where: Any, mask: Any, other: Any) -> Any:
    return triton().load(ref.at[where], mask=mask, other=other)


def _load_wide(ref: Any, where: Any, mask: Any) -> Any:
    """Returns `ref[*where, :]`, for arrays of indices; zeros where the mask is not set."""
    return _load(ref, *_widened(ref, where, mask), 0)


def _widened(ref: Any, where: Any, mask: Any) -> tuple[Any, Any]:
    each = [places(x, 0, ref.shape[-1]) for x in where]
    rows, (_, column_RC) = [row_RC for row_RC, _ in each], each[-1]
    return (*rows, column_RC), jnp.broadcast_to(mask[:, None], column_RC.shape)
