"""Attention over pages for many rows of a slot, on GPUs of Hopper: a Pallas kernel for Mosaic GPU.

A program computes a tile: 128 queries of one key head, which are rows that follow each other, of
one query head after the other. Three warpgroups share it. One fetches blocks of keys and values,
page by page, as far ahead as shared memory holds them; each of the other two multiplies 64 of the
queries with every block, and takes turns with the other: while one is at its softmax, the tensor
cores work for the other (Shah et al., *FlashAttention-3*, 2024).

A warpgroup's rows are a whole window of its slot's, which are read and written where all rows'
queries and outputs are. Where a tile has fewer, windows reach back: what two of them have in common
is computed, and written, twice.

TFLOP/s with a prompt of 2048 and 8192 tokens, 32 heads of 128, on an H100, when rows still came in
tiles: 312 and 481; the kernel for Triton has 175 and 251, cuDNN, whose keys and values are not in
pages, 389 and 582. Without turns it is 468, with blocks of 64 positions 444.

Shapes are in the names, as in `spmd.ops.paged`, and

    T tiles    Q queries of a warpgroup    S positions of a block    L numbers about a tile
    C columns: D for each query head
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from spmd.ops.attention_cudnn import HOPPER, capability

QUERIES = 64  # of a warpgroup: as many rows as tensor cores multiply at once
WARPGROUPS = 2  # that compute
TILE = QUERIES * WARPGROUPS
BLOCK = 128  # positions whose keys and values are fetched and multiplied at a time
PIECE = 64  # rows and columns of values whose unknown rows are zeroed at a time
WIDTHS = (64, 128)
SHARED_BYTES = 200 << 10
HEADS = 8  # the most query heads of a program, so that 64 queries are of at least eight rows
LEAST = 64  # tiles: fewer leave most multiprocessors without work, which other kernels split
LOWEST = np.float32(-1e30)


def mosaic() -> Any:
    """Returns Pallas's Mosaic GPU backend, imported on its first use: importing takes long."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def takes(q_ARKGD: Any, pool_ANPK2D: Any) -> bool:
    """Whether the kernel takes these shapes, on the GPU that is here, in this release of jax."""
    (rows, heads, groups, width), size = q_ARKGD.shape[1:], pool_ANPK2D.shape[2]
    if len(q_ARKGD) * rows * heads * groups < LEAST * TILE or rows < window_of(groups):
        return False
    fits = q_ARKGD.dtype == pool_ANPK2D.dtype and q_ARKGD.dtype.name in ("bfloat16", "float16")
    fits = fits and width in WIDTHS and groups <= QUERIES and groups & (groups - 1) == 0
    return fits and size >= 16 and size & (size - 1) == 0 and is_here()


def window_of(groups: int) -> int:
    """Returns the rows of a warpgroup, and half of a tile's: slots have at least so many."""
    return QUERIES // min(groups, HEADS)


def is_here() -> bool:
    """Whether the default device is a GPU of Hopper, and jax is a release that the kernel knows."""
    return capability() == HOPPER and jax.__version_info__ >= (0, 11)


def attend_tiles(
    q_RC: Any, pool_NPK2D: Any, table_BM: Any, about_TL: Any, *, groups: int, window: int | None,
    interpret: bool = False,
) -> Any:  # fmt: skip
    """Returns the heads' outputs, like `q_RC`; undefined in rows that no tile has.

    Args:
      q_RC: the queries of all rows, heads one behind the other, `groups` of each key head.
      pool_NPK2D: the pages of all groups.
      table_BM: the pages of each slot of all groups.
      about_TL: of each tile the line of its slot in the table, its first row, the position of that,
        how many rows it has, and the end of the positions that these see. Tiles without rows do
        nothing; slots have at least `window_of` rows.
      window: the most positions that a row sees; None is all.
    """
    plgpu = mosaic()
    tiles, (pages, size, heads, _, width), dtype = len(about_TL), pool_NPK2D.shape, q_RC.dtype
    own = min(groups, HEADS)  # query heads of a program
    each = window_of(groups)
    unit = min(size, BLOCK)  # positions that are copied at once
    copies = BLOCK // unit
    bytes_of_block = 2 * BLOCK * width * dtype.itemsize
    stages = min(4, (SHARED_BYTES - 2 * TILE * width * dtype.itemsize) // bytes_of_block)
    factor = np.float32(math.log2(math.e) / math.sqrt(width))

    def kernel(
        q: Any, pool: Any, table: Any, about: Any, out: Any, queries: Any, moved: Any, keys: Any,
        values: Any, query_there: Any, copied: Any, read: Any, tail_there: Any, tail_ready: Any,
        turn: Any,
    ) -> None:  # fmt: skip
        keys_there, values_there = copied
        keys_read, values_read = read
        tile, head, me = (jax.lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
        tile = tiles - 1 - tile  # of a prompt the last ones see the most: they begin first
        slot, row, position, count, end = (about[tile, i] for i in range(5))
        lowest = position + jnp.minimum(count - each, 0)
        # The tile's first block, and the end of its blocks.
        first = 0 if window is None else jnp.maximum(lowest - window + 1, 0) // BLOCK
        last = (end + BLOCK - 1) // BLOCK

        @pl.when((me == WARPGROUPS) & (count > 0))
        def fetch() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def copy(block: Any, kind: int, to: Any, barrier: Any) -> None:
                for i in range(copies):
                    place = block * BLOCK + i * unit
                    entry = jnp.minimum(place // size, table.shape[1] - 1)
                    page = jnp.clip(table[slot, entry], 0, pages - 1)
                    rows = pl.ds(page * size + place % size, unit)
                    columns = pl.ds((head * own // groups * 2 + kind) * width, width)
                    into = to.at[pl.ds(i * unit, unit)]
                    plgpu.copy_gmem_to_smem(pool.at[rows, columns], into, barrier)

            @pl.loop(first, last)
            def ahead(block: Any) -> None:
                stage = (block - first) % stages

                @pl.when(block - first >= stages)
                def has_been_read() -> None:
                    plgpu.barrier_wait(keys_read.at[stage])
                    plgpu.barrier_wait(values_read.at[stage])

                copy(block, 0, keys.at[stage], keys_there.at[stage])

                @pl.when(block < last - 1)
                def is_known() -> None:
                    copy(block, 1, values.at[stage], values_there.at[stage])

            # What lies behind the last position may be NaN, which is NaN also without any weight.
            @pl.when(first < last)
            def tail() -> None:
                stage = (last - 1 - first) % stages
                copy(last - 1, 1, values.at[stage], tail_there)
                plgpu.barrier_wait(tail_there)
                known = end - (last - 1) * BLOCK
                for row in range(0, BLOCK, PIECE):
                    for column in range(0, width, PIECE):
                        piece = values.at[stage, pl.ds(row, PIECE), pl.ds(column, PIECE)]
                        held = plgpu.load(piece, layout=plgpu.Layout.WGMMA, optimized=False)
                        at = iota((PIECE, PIECE), 0) + row
                        piece[...] = jnp.where(at < known, held, jnp.zeros_like(held))
                plgpu.commit_smem()
                plgpu.barrier_arrive(tail_ready)

            @pl.loop(jnp.maximum(last - stages, first), last)
            def have_been_read(block: Any) -> None:
                plgpu.barrier_wait(keys_read.at[(block - first) % stages])
                plgpu.barrier_wait(values_read.at[(block - first) % stages])

        @pl.when((me < WARPGROUPS) & (count > 0))
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            mine, plain = queries.at[me], moved.at[me]
            before = jnp.minimum(me * each, count - each)
            parts = [
                (plain.at[pl.ds(i * each, each)], pl.ds((head * own + i) * width, width))
                for i in range(own)
            ]
            rows = pl.ds(row + before, each)
            for part, columns in parts:
                plgpu.copy_gmem_to_smem(q.at[rows, columns], part, query_there.at[me])
            plgpu.barrier_wait(query_there.at[me])
            mine[...] = plgpu.load(plain, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            row_QS = position + before + (iota((QUERIES, BLOCK), 0) & (each - 1))

            def change_turns() -> None:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def step(block: Any, carry: Any, is_masked: bool) -> Any:
                total_QD, largest_Q, sum_Q = carry
                stage = (block - first) % stages
                plgpu.barrier_wait(keys_there.at[stage])

                def scores(acc: Any) -> Any:
                    plgpu.wgmma(acc, mine, keys.at[stage].transpose((1, 0)))
                    change_turns()
                    return acc[...]

                if interpret:
                    score_QS = jnp.dot(mine[...], keys[stage].T, preferred_element_type=jnp.float32)
                    change_turns()
                else:
                    score_QS = pl.run_scoped(scores, plgpu.ACC((QUERIES, BLOCK), jnp.float32))
                plgpu.barrier_arrive(keys_read.at[stage])
                score_QS *= factor
                if is_masked:
                    seen_S = block * BLOCK + iota((QUERIES, BLOCK), 1)
                    is_seen = seen_S <= row_QS
                    if window is not None:
                        is_seen &= seen_S > row_QS - window
                    score_QS = jnp.where(is_seen, score_QS, LOWEST)
                above_Q = jnp.maximum(largest_Q, jnp.max(score_QS, axis=1))
                kept_Q = jnp.exp2(largest_Q - above_Q)
                weight_QS = jnp.exp2(score_QS - _rows(above_Q, score_QS.shape))
                sum_Q = sum_Q * kept_Q + jnp.sum(weight_QS, axis=1)
                total_QD *= _rows(kept_Q, total_QD.shape)
                share_QS = weight_QS.astype(dtype)
                plgpu.barrier_arrive(turn)

                @pl.when(block < last - 1)
                def all_known() -> None:
                    plgpu.barrier_wait(values_there.at[stage])

                @pl.when(block == last - 1)
                def tail() -> None:
                    plgpu.barrier_wait(tail_ready)

                plgpu.barrier_wait(turn)

                def add(acc: Any) -> None:
                    plgpu.wgmma(acc, share_QS, values.at[stage])

                if interpret:
                    total_QD += jnp.dot(share_QS, values[stage], preferred_element_type=jnp.float32)
                else:
                    total_QD = pl.run_state(add)(plgpu.ACC.init(total_QD))
                plgpu.barrier_arrive(values_read.at[stage])
                return total_QD, above_Q, sum_Q

            of_rows = plgpu.Layout.WGMMA.reduce(1)
            carry = (
                plgpu.layout_cast(jnp.zeros((QUERIES, width), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((QUERIES,), LOWEST, jnp.float32), of_rows),
                plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), of_rows),
            )
            # All rows see all of the first blocks.
            whole = first if window is not None else jnp.clip((lowest + 1) // BLOCK, 0, last)
            pl.when(me == 1)(change_turns)
            carry = jax.lax.fori_loop(first, whole, functools.partial(step, is_masked=False), carry)
            carry = jax.lax.fori_loop(whole, last, functools.partial(step, is_masked=True), carry)
            pl.when(me == 0)(change_turns)
            total_QD, _, sum_Q = carry
            sum_Q = jnp.where(sum_Q == 0, 1, sum_Q)
            plain[...] = (total_QD / _rows(sum_Q, total_QD.shape)).astype(dtype)
            plgpu.commit_smem()
            for part, columns in parts:
                plgpu.copy_smem_to_gmem(part, out.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

    def iota(shape: tuple[int, int], dim: int) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    stored = [(WARPGROUPS, QUERIES, width), (stages, BLOCK, width), (stages, BLOCK, width)]
    copied = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    read = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q_RC.shape, dtype),
        grid=(heads * groups // own, tiles),
        grid_names=("head", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(stored[0], dtype, transforms=swizzled),
            plgpu.SMEM(stored[0], dtype),  # rows that begin anywhere move in no tiles of eight
            *(plgpu.SMEM(shape, dtype, transforms=swizzled) for shape in stored[1:]),
            plgpu.Barrier(num_arrivals=own, num_barriers=WARPGROUPS),
            (copied, copied),
            (read, read),
            plgpu.Barrier(num_arrivals=copies),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )(q_RC, pool_NPK2D.reshape(pages * size, heads * 2 * width), table_BM, about_TL)


def _rows(x_Q: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.broadcast_in_dim(x_Q, shape, [0])
