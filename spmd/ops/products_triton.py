"""Products of rows with the weights of their groups on NVIDIA GPUs: a Pallas kernel for Triton.

Shapes are in the names: R rows, sorted by group; E groups; O, I a weight's outputs and inputs;
T tiles of rows.

XLA multiplies every row with every group's weight, and takes zeros where the row is of another
one: E times the arithmetic. Here rows are cut into tiles within their groups, so that a tile needs
one weight. How many tiles a group gets is known only when the program runs; E more than all rows
would need without groups are always enough, and those that are left over do nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spmd.ops.triton import compiled_with, triton


class Tiles(NamedTuple):
    """The sizes of the tile that a program computes, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


LEAST = 64  # dims of weights are multiples of so many; others are not for the kernel

NEIGHBOURS = 8
"""So many tiles of rows take turns over the columns together, so that caches serve them both."""


def product(x_RI: Any, weights_EOI: Any, sizes_E: Any, *, interpret: bool = False) -> Any:
    """Multiplies rows (R, I) by their groups' weights (E, O, I); NotImplemented if it does not fit.

    Rows of 16 bits are sorted by group, of `sizes_E` rows each; results and gradients of rows
    behind the last group are undefined. Sums are in float32. `interpret` runs it step by step in
    jax: for tests.
    """
    of_16_bits = x_RI.dtype.itemsize == 2 and jnp.issubdtype(x_RI.dtype, jnp.floating)
    fits = of_16_bits and x_RI.dtype == weights_EOI.dtype and 0 not in x_RI.shape
    fits = fits and all(n and n % LEAST == 0 for n in weights_EOI.shape[1:])
    # Pallas counts elements with 32 bits.
    fits = fits and max(math.prod(x.shape) for x in (x_RI, weights_EOI)) < 1 << 31
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


def by_rows(
    x_RI: Any,
    weights: Any,
    sizes_E: Any,
    *,
    is_transposed: bool,
    interpret: bool,
) -> jax.Array:
    """Returns (R, O): rows by their groups' weights (E, I, O), or (E, O, I) if `is_transposed`."""
    rows = x_RI.shape[0]
    columns = weights.shape[1 if is_transposed else 2]
    # Tiles are of rows and columns; what is summed over is the inner size.
    tiles = _tiles(LEAST if rows <= LEAST * weights.shape[0] else 2 * LEAST, columns)
    about_T3 = tile_rows(sizes_E, rows, tiles.rows)
    grid = about_T3.shape[0], columns // tiles.columns
    kernel = functools.partial(_rows_kernel, tiles=tiles, grid=grid, is_transposed=is_transposed)
    result = jax.ShapeDtypeStruct((rows, columns), x_RI.dtype)
    call = _call(kernel, "rows_gemm", tiles, math.prod(grid), result, interpret)
    found: jax.Array = call(about_T3, x_RI, weights)
    return found


def by_groups(y_RO: Any, x_RI: Any, sizes_E: Any, *, interpret: bool) -> jax.Array:
    """Returns (E, O, I): for each group, the sum of the outer products of its rows."""
    outputs, inputs, groups = y_RO.shape[1], x_RI.shape[1], sizes_E.shape[0]
    # Tiles are of outputs and inputs; so many rows are multiplied at a time.
    tiles = _tiles(2 * LEAST if outputs % (2 * LEAST) == 0 else LEAST, inputs)
    grid = groups, outputs // tiles.rows, inputs // tiles.columns
    ends_E = jnp.cumsum(sizes_E)
    about_E2 = jnp.stack([ends_E - sizes_E, ends_E], axis=1).astype(jnp.int32)
    kernel = functools.partial(_groups_kernel, tiles=tiles, grid=grid)
    result = jax.ShapeDtypeStruct((groups, outputs, inputs), x_RI.dtype)
    call = _call(kernel, "groups_gemm", tiles, math.prod(grid), result, interpret)
    found: jax.Array = call(about_E2, y_RO, x_RI)
    return found


def _tiles(rows: int, columns: int) -> Tiles:
    """Returns the widest columns that divide evenly, and the stages that an A100's memory fits.

    H200, bfloat16, 8 groups of (14336, 4096) weights. 13,103 rows: 2.3 ms with 256 columns (670
    TFLOP/s; one product of as many rows: 2.0 ms), 2.7 with 128. 128 rows: 0.25 ms (3.8 TB/s) with
    64 rows and 256 columns, 0.28 with 128 rows.
    """
    wide = next(n for n in (4 * LEAST, 2 * LEAST, LEAST) if columns % n == 0)
    return Tiles(rows, wide, LEAST, 8 if wide == 4 * LEAST else 4, 4 if rows == LEAST else 3)


def tile_rows(sizes_E: Any, rows: int, size: int) -> Any:
    """Returns (T, 3): each tile's group, first row and number of rows, 0 for tiles left over."""
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


def _call(
    kernel: Callable[..., None],
    name: str,
    tiles: Tiles,
    programs: int,
    result: jax.ShapeDtypeStruct,
    interpret: bool,
) -> Any:
    how = compiled_with(tiles.warps, tiles.stages, interpret)
    return pl.pallas_call(kernel, name=name, grid=(programs,), out_shape=result, **how)


def _place(program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Returns a program's tile of rows and of columns: a few rows share all columns in turn."""
    width = NEIGHBOURS * columns
    first = program // width * NEIGHBOURS
    height = jnp.minimum(rows - first, NEIGHBOURS)
    return first + program % width % height, program % width // height


def _rows_kernel(
    about: Any,
    x: Any,
    weights: Any,
    out: Any,
    *,
    tiles: Tiles,
    grid: tuple[int, int],
    is_transposed: bool,
) -> None:
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
        row_RC = jnp.broadcast_to((start + jnp.arange(tiles.rows))[:, None], sum_RC.shape)
        column_RC = column * tiles.columns + jax.lax.broadcasted_iota(jnp.int32, sum_RC.shape, 1)
        triton().store(
            out.at[row_RC, column_RC], sum_RC.astype(out.dtype), mask=row_RC < start + count
        )


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
    """Loads (R, size) of some rows, from column `begin` on; zeros for rows that are not there."""
    shape = (*row_R.shape, size)
    where = (
        jnp.broadcast_to(row_R[:, None], shape),
        begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1),
    )
    if is_there_R is None:
        return triton().load(ref.at[where])
    mask = jnp.broadcast_to(is_there_R[:, None], shape)
    return triton().load(ref.at[where], mask=mask, other=0)
