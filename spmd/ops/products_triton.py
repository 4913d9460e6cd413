"""Matrix products on NVIDIA GPUs, as Pallas kernels for Triton; helpers for all such kernels.

Shapes are in the names: B, R rows; O, I a weight's outputs and inputs; E groups of rows; T tiles of
rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def triton() -> Any:
    """Returns Pallas's Triton backend, imported on its first use, since importing takes long."""
    from jax.experimental.pallas import triton as backend

    return backend


def compiled_with(warps: int, stages: int, interpret: bool) -> dict[str, Any]:
    """Returns arguments for `pallas_call`: these warps and stages, or to interpret it in jax."""
    if interpret:
        return {"interpret": True}
    return {"compiler_params": triton().CompilerParams(num_warps=warps, num_stages=stages)}


def places(row_R: Any, begin: Any, size: int) -> tuple[Any, Any]:
    """Returns the rows and the columns, each (R, size), of columns from `begin` on of `row_R`.

    The backend wants one array of indices for each dim, all of the shape of what is loaded.
    """
    shape = (row_R.shape[0], size)
    column_RC = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.broadcast_to(row_R[:, None], shape), column_RC


def _of_16_bits(x: Any) -> bool:
    return bool(x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating))


# ---------------------------------------------------------------------------------------------
# A few rows with several weights.
#
# Up to 128 rows such products are bound by reading the weights. XLA calls cuBLAS once for each of
# them, and a call that reads less than some 100 MB is too short to keep the memory busy: it starts,
# fills up and runs dry. Here the weights that meet the same rows are read by one kernel: its
# programs are the blocks of outputs of one weight after the other. Where blocks are too few for the
# multiprocessors, several programs share the inputs of one, and their sums are added.
#
# The weight is the first operand of the tensor cores' products, which take at least 64 of its rows,
# and x the second, of which 16 do.

MOST_ROWS = 128  # with more rows products are bound by arithmetic, and cuBLAS is faster

LEAST_ROWS = 16
OUTPUTS = 64  # of a block: so many rows of a weight is the least that tensor cores of Hopper take

MULTIPROCESSORS = 132
"""Of an H100. More than twice as many blocks are merged in pairs, so that x is read less often."""

PROGRAMS = 96  # fewer do not keep them busy

MOST_SPLITS = 4
SHARED_BYTES = 1 << 17
"""Shared memory for tiles that are fetched ahead. An A100 has 163 KiB, an H100 227 KiB."""

MOST_STAGES = 5


class LinearTiles(NamedTuple):
    """The sizes of tiles in the kernel of `products`, and how many programs and stages it has."""

    # rows, outputs: of x, with padding a power of two; of a block
    rows: int
    outputs: int
    inputs: int  # that are multiplied at a time
    splits: int  # programs that share a block's inputs
    stages: int  # tiles under way, the one that is multiplied among them


def products(x_BI: Any, weights: Sequence[Any], *, interpret: bool = False) -> Any:
    """Returns a tuple of `x @ weight.T` (B, O) for each weight, or NotImplemented.

    The kernel takes 2 to 128 rows and weights (O, I), multiples of 64, of one 16-bit float type.
    `interpret` runs it step by step in jax, on any platform: for tests.
    """
    tiles = tiles_for(x_BI, weights)
    if tiles is None:
        return NotImplemented
    rows, inputs = x_BI.shape
    counts = [weight.shape[0] // tiles.outputs for weight in weights]
    begins = [sum(counts[:i]) for i in range(len(counts))]

    def block(begin: int, count: int, i: Any) -> Any:
        """Returns the block of a weight for program `i`; any block for those of other weights."""
        return jnp.clip(i - begin, 0, count - 1)

    def of_weight(begin: int, count: int) -> pl.BlockSpec:
        return pl.BlockSpec((tiles.outputs, inputs), lambda i, k: (block(begin, count, i), 0))

    def of_result(begin: int, count: int) -> pl.BlockSpec:
        shape = (None, rows, tiles.outputs)
        return pl.BlockSpec(shape, lambda i, k: (k, 0, block(begin, count, i)))

    places = list(zip(begins, counts, strict=True))
    dtype = x_BI.dtype if tiles.splits == 1 else jnp.float32
    sums = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, ends=[sum(place) for place in places]),
        grid=(sum(counts), tiles.splits),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda i, k: (0, 0)),
            *(of_weight(*place) for place in places),
        ],
        out_specs=[of_result(*place) for place in places],
        out_shape=[jax.ShapeDtypeStruct((tiles.splits, rows, w.shape[0]), dtype) for w in weights],
        **compiled_with(4, tiles.stages, interpret),
    )(x_BI, *weights)  # fmt: skip
    return tuple(jnp.sum(x, axis=0).astype(x_BI.dtype) for x in sums)


def tiles_for(x_BI: Any, weights: Sequence[Any]) -> LinearTiles | None:
    """Returns the tiles for `products` of these operands; None if the kernel does not take them."""
    rows, inputs = x_BI.shape
    if not 1 < rows <= MOST_ROWS or not _of_16_bits(x_BI):
        return None
    if any(w.dtype != x_BI.dtype or 0 in w.shape or w.shape[0] % OUTPUTS for w in weights):
        return None
    blocks = sum(w.shape[0] for w in weights) // OUTPUTS
    is_wide = blocks > 2 * MULTIPROCESSORS and all(w.shape[0] % (2 * OUTPUTS) == 0 for w in weights)
    outputs = 2 * OUTPUTS if is_wide else OUTPUTS
    wanted = 1
    while wanted < MOST_SPLITS and blocks * OUTPUTS // outputs * wanted < PROGRAMS:
        wanted *= 2
    padded = max(LEAST_ROWS, pl.next_power_of_2(rows))
    sizes = [(wanted, 128)] if wanted > 1 and padded <= 64 else []
    sizes += [(splits, 64) for splits in (wanted, wanted // 2, 1) if splits]
    fitting = [(splits, size) for splits, size in sizes if inputs % (splits * size) == 0]
    if not fitting:
        return None
    splits, at_once = fitting[0]
    tile = (outputs + padded) * at_once * x_BI.dtype.itemsize
    return LinearTiles(padded, outputs, at_once, splits, min(MOST_STAGES, SHARED_BYTES // tile))


def _kernel(x: Any, *rest: Any, tiles: LinearTiles, ends: Sequence[int]) -> None:
    weights, results = rest[: len(ends)], rest[len(ends) :]
    block, split = pl.program_id(0), pl.program_id(1)
    begin = 0
    for weight, result, end in zip(weights, results, ends, strict=True):
        mine = (block >= begin) & (block < end)
        pl.when(mine)(functools.partial(_block, x, weight, result, tiles, split))
        begin = end


def _block(x: Any, weight: Any, result: Any, tiles: LinearTiles, split: Any) -> None:
    rows, inputs = x.shape
    # Padding repeats the last row, so that nothing has to be masked where it is read.
    row_R = jnp.minimum(jnp.arange(tiles.rows), rows - 1)
    count = inputs // tiles.splits // tiles.inputs

    def body(i: Any, sum_OR: Any) -> Any:
        begin = (split * count + i) * tiles.inputs
        weight_OI = weight[:, pl.ds(begin, tiles.inputs)]
        x_RI = _rows(x, row_R, begin, tiles.inputs)
        return sum_OR + triton().dot(weight_OI, x_RI, trans_b=True)

    sum_OR = jnp.zeros((tiles.outputs, tiles.rows), jnp.float32)
    sum_OR = jax.lax.fori_loop(0, count, body, sum_OR)
    where = places(jnp.arange(tiles.rows), 0, tiles.outputs)
    triton().store(result.at[where], sum_OR.T.astype(result.dtype), mask=where[0] < rows)


# ---------------------------------------------------------------------------------------------
# Rows that are sorted by group, each with its group's weight.
#
# XLA multiplies every row with every group's weight, and takes zeros where the row is of another
# one: E times the arithmetic. Here rows are cut into tiles within their groups, so that a tile
# needs one weight. How many tiles a group gets is known only when the program runs; E more than all
# rows would need without groups are always enough, and those that are left over do nothing.


class Tiles(NamedTuple):
    """A program's tile, the inner size that it sums at a time, and its warps and stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


LEAST = 64  # dims of weights are multiples of so many; others are not for the kernel

NEIGHBOURS = 8
"""The number of tiles of rows that go over all columns together, so that these stay in caches."""


def ragged_product(x_RI: Any, weights_EOI: Any, sizes_E: Any, *, interpret: bool = False) -> Any:
    """Returns (R, O): each row times its group's weights; NotImplemented for other operands.

    O and I are multiples of 64, dtypes the same 16-bit float. Rows are sorted by group; group e has
    `sizes_E[e]`. Results and gradients of rows after the last group are undefined. Sums are in
    float32. `interpret` runs the kernel step by step in jax: for tests.
    """
    fits = _of_16_bits(x_RI) and x_RI.dtype == weights_EOI.dtype and 0 not in x_RI.shape
    fits = fits and all(n and n % LEAST == 0 for n in weights_EOI.shape[1:])
    # No array is too large: Pallas counts with 64 bits what has more than 2^32 bytes.
    if not fits or not weights_EOI.shape[0]:
        return NotImplemented
    return _product(x_RI, weights_EOI, sizes_E, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_RI: Any, weights_EOI: Any, sizes_E: Any, interpret: bool) -> Any:
    return by_rows(x_RI, weights_EOI, sizes_E, is_transposed=True, interpret=interpret)


def _forward(x_RI: Any, weights_EOI: Any, sizes_E: Any, interpret: bool) -> Any:
    return _product(x_RI, weights_EOI, sizes_E, interpret), (x_RI, weights_EOI, sizes_E)


def _backward(interpret: bool, kept: Any, dout_RO: Any) -> Any:
    x_RI, weights_EOI, sizes_E = kept
    dx_RI = by_rows(dout_RO, weights_EOI, sizes_E, is_transposed=False, interpret=interpret)
    return dx_RI, by_groups(dout_RO, x_RI, sizes_E, interpret=interpret), None


_product.defvjp(_forward, _backward)


def by_rows(x_RI: Any, weights: Any, sizes_E: Any, *, is_transposed: bool, interpret: bool) -> Any:
    """Returns (R, O): rows times their group's (E, I, O), or (E, O, I) if `is_transposed`."""
    rows = x_RI.shape[0]
    columns = weights.shape[1 if is_transposed else 2]
    # Tiles are of rows and columns; what is summed over is the inner size.
    tiles = _tiles(LEAST if rows <= LEAST * weights.shape[0] else 2 * LEAST, columns)
    about_T3 = tile_rows(sizes_E, rows, tiles.rows)
    grid = about_T3.shape[0], columns // tiles.columns
    kernel = functools.partial(_rows_kernel, tiles=tiles, grid=grid, is_transposed=is_transposed)
    result = jax.ShapeDtypeStruct((rows, columns), x_RI.dtype)
    return _call("rows_gemm", kernel, tiles, grid, result, interpret)(about_T3, x_RI, weights)


def by_groups(y_RO: Any, x_RI: Any, sizes_E: Any, *, interpret: bool) -> Any:
    """Returns (E, O, I): for each group, the sum over its rows of outer products of y and x."""
    outputs, inputs, groups = y_RO.shape[1], x_RI.shape[1], sizes_E.shape[0]
    # Tiles are of outputs and inputs; so many rows are multiplied at a time.
    tiles = _tiles(2 * LEAST if outputs % (2 * LEAST) == 0 else LEAST, inputs)
    grid = groups, outputs // tiles.rows, inputs // tiles.columns
    ends_E = jnp.cumsum(sizes_E)
    about_E2 = jnp.stack([ends_E - sizes_E, ends_E], axis=1).astype(jnp.int32)
    kernel = functools.partial(_groups_kernel, tiles=tiles, grid=grid)
    result = jax.ShapeDtypeStruct((groups, outputs, inputs), x_RI.dtype)
    return _call("groups_gemm", kernel, tiles, grid, result, interpret)(about_E2, y_RO, x_RI)


def _call(name: str, kernel: Any, tiles: Tiles, grid: Any, result: Any, interpret: bool) -> Any:
    how = compiled_with(tiles.warps, tiles.stages, interpret)
    return pl.pallas_call(kernel, name=name, grid=(math.prod(grid),), out_shape=result, **how)


def _tiles(rows: int, columns: int) -> Tiles:
    """Returns tiles of `rows` and of the most columns (256, 128 or 64) that divide `columns`."""
    # H200, bfloat16, 8 groups of (14336, 4096) weights. 13,103 rows: 2.3 ms with 256 columns (670
    # TFLOP/s; one product of as many rows: 2.0 ms), 2.7 with 128. 128 rows: 0.25 ms (3.8 TB/s) with
    # 64 rows and 256 columns, 0.28 with 128 rows. The stages fit into an A100's memory.
    wide = next(n for n in (4 * LEAST, 2 * LEAST, LEAST) if columns % n == 0)
    return Tiles(rows, wide, LEAST, 8 if wide == 4 * LEAST else 4, 4 if rows == LEAST else 3)


def tile_rows(sizes_E: Any, rows: int, size: int) -> Any:
    """Returns (T, 3): each tile's group, first row, and number of rows (0 if it is not needed)."""
    # E.g. groups of 5, 0 and 3 rows in tiles of 4 rows: counts [2, 0, 1], ends [2, 2, 3], and tiles
    # (0, 0, 4), (0, 4, 1), (2, 5, 3).
    groups = sizes_E.shape[0]
    counts_E = (sizes_E + size - 1) // size
    ends_E = jnp.cumsum(counts_E)
    most = min(rows, -(-rows // size) + groups)
    tile_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.sum(ends_E <= tile_T[:, None], axis=1, dtype=jnp.int32)
    is_needed_T, group_T = group_T < groups, jnp.minimum(group_T, groups - 1)
    done_T = (tile_T - (ends_E - counts_E)[group_T]) * size
    left_T = jnp.where(is_needed_T, jnp.clip(sizes_E[group_T] - done_T, 0, size), 0)
    start_T = jnp.where(is_needed_T, (jnp.cumsum(sizes_E) - sizes_E)[group_T] + done_T, 0)
    return jnp.stack([group_T, start_T, left_T], axis=1).astype(jnp.int32)


def _place(program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Returns (row, column) of a program's tile in a grid of `rows` x `columns` tiles."""
    width = NEIGHBOURS * columns
    first = program // width * NEIGHBOURS
    height = jnp.minimum(rows - first, NEIGHBOURS)
    return first + program % width % height, program % width // height


def _rows_kernel(*refs: Any, tiles: Tiles, grid: tuple[int, int], is_transposed: bool) -> None:
    about, x, weights, out = refs
    tile, column = _place(pl.program_id(0), *grid)
    group, start, count = (about[tile, i] for i in range(3))

    @pl.when(count > 0)
    def run() -> None:
        # Padding repeats the last row, so that nothing has to be masked where it is read.
        row_R = start + jnp.minimum(jnp.arange(tiles.rows), count - 1)
        columns = pl.ds(column * tiles.columns, tiles.columns)

        def body(i: Any, sum_RC: Any) -> Any:
            inner = pl.ds(i * tiles.inner, tiles.inner)
            x_RK = _rows(x, row_R, i * tiles.inner, tiles.inner)
            if is_transposed:
                return sum_RC + triton().dot(x_RK, weights[group, columns, inner], trans_b=True)
            return sum_RC + triton().dot(x_RK, weights[group, inner, columns])

        sum_RC = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
        sum_RC = jax.lax.fori_loop(0, x.shape[1] // tiles.inner, body, sum_RC)
        row_R = start + jnp.arange(tiles.rows)
        where = places(row_R, column * tiles.columns, tiles.columns)
        triton().store(out.at[where], sum_RC.astype(out.dtype), mask=where[0] < start + count)


def _groups_kernel(
    about: Any, y: Any, x: Any, out: Any, *, tiles: Tiles, grid: tuple[int, int, int]
) -> None:
    each = grid[1:]
    group, program = pl.program_id(0) // math.prod(each), pl.program_id(0) % math.prod(each)
    o, i = _place(program, *each)
    start, end = about[group, 0], about[group, 1]

    def body(k: Any, sum_OI: Any) -> Any:
        row_K = start + k * tiles.inner + jnp.arange(tiles.inner)
        y_KO = _rows(y, row_K, o * tiles.rows, tiles.rows, row_K < end)
        x_KI = _rows(x, row_K, i * tiles.columns, tiles.columns, row_K < end)
        return sum_OI + triton().dot(y_KO, x_KI, trans_a=True)

    sum_OI = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    sum_OI = jax.lax.fori_loop(0, (end - start + tiles.inner - 1) // tiles.inner, body, sum_OI)
    where = (pl.ds(o * tiles.rows, tiles.rows), pl.ds(i * tiles.columns, tiles.columns))
    out[group, *where] = sum_OI.astype(out.dtype)


def _rows(ref: Any, row_R: Any, begin: Any, size: int, is_there_R: Any = None) -> Any:
    """Returns (R, size): columns from `begin` on of rows `row_R`, zeros if not `is_there_R`."""
    where = places(row_R, begin, size)
    if is_there_R is None:
        return triton().load(ref.at[where])
    mask = jnp.broadcast_to(is_there_R[:, None], where[0].shape)
    return triton().load(ref.at[where], mask=mask, other=0)
