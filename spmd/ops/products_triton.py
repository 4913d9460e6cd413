"""Matrix products on NVIDIA GPUs, as Pallas kernels for Triton; helpers for all such kernels.

Shapes are in the names: B, R rows; O, I a weight's outputs and inputs; E groups of rows; T tiles of
rows.
"""

import functools
import math
from collections.abc import Mapping, Sequence
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


def of_16_bits(x: Any) -> bool:
    """Whether an array is of 16-bit floats."""
    return bool(x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating))


# ---------------------------------------------------------------------------------------------
# Rows with several weights.
#
# With few rows such products are bound by reading the weights. XLA calls cuBLAS once for each of
# them, and a call that reads less than some 100 MB is too short to keep the memory busy: it starts,
# fills up and runs dry. Here the weights that meet the same rows are read by one kernel: its
# programs are the blocks of outputs of one weight after the other. Where blocks are too few for the
# multiprocessors, several programs share the inputs of one, and their sums are added.
#
# The weight is the first operand of the tensor cores' products, which take at least 64 of its rows
# from four warps and 16 from one, and x the second, of which 16 do. Quantized weights are unpacked
# in registers, which takes longer than to read them if it is left to Triton's conversions: an
# instruction here makes two bfloat16. With more rows it is faster still not to convert int8 at all:
# x becomes two of them, 128 high + low of a scale for each row, whose 15 bits are more than the 8
# of a bfloat16, and sums are exact.

MOST_ROWS = 128  # with more rows of 16 bits products are bound by arithmetic, and cuBLAS is faster

LEAST_ROWS = 16
OUTPUTS = 64  # of a block: so many rows of a weight is the least that tensor cores of Hopper take

MULTIPROCESSORS = 132
"""Of an H100. More than twice as many blocks are merged in pairs, so that x is read less often."""

PROGRAMS = 96  # fewer do not keep them busy

MOST_SPLITS = 4
SHARED_BYTES = 1 << 17
"""Shared memory for tiles that are fetched ahead. An A100 has 163 KiB, an H100 227 KiB."""

MOST_STAGES = 5

GROUP = 128  # inputs of a 4-bit weight that have a scale: low bits are of the first half
HIGH = 128  # what the first of a pair of bytes counts


class LinearTiles(NamedTuple):
    """The sizes of tiles in the kernel of `products`, and how many programs and stages it has."""

    rows: int  # of x, with padding a power of two
    outputs: int  # of a block
    inputs: int  # that are multiplied at a time
    splits: int  # programs that share a block's inputs
    stages: int  # tiles under way, the one that is multiplied among them
    warps: int = 4
    is_paired: bool = False  # x is pairs of int8, as the weights are


BY_ROWS: Mapping[tuple[Any, ...], Sequence[tuple[int, int, LinearTiles]]] = {
    ("int8", 1): (
        (16, 400, LinearTiles(16, 64, 256, 1, 4, 2)),
        (64, 264, LinearTiles(64, 64, 128, 1, 4, 4, is_paired=True)),
        (704, 100, LinearTiles(128, 128, 128, 1, 3, 8, is_paired=True)),
    ),
    ("uint8", 1, GROUP // 2): (
        (16, 528, LinearTiles(16, 32, 256, 1, 4, 2)),
        (64, 264, LinearTiles(64, 64, 128, 1, 4, 2)),
        (256, 100, LinearTiles(128, 128, 128, 1, 3, 8)),
    ),
}
"""Of values their dtype, the number of scales, dims behind the second -> the most rows, the number
of programs that is wanted, and tiles but for splits.

By measurements (docs/benchmarks/decoding.md). 8-bit floats are not for this kernel: XLA is as fast
with 16 rows and faster with 64 (on Hopper `products_hopper` has these)."""


def products(
    x_BI: Any, weights: Sequence[Any], dtype: Any = None, *, interpret: bool = False
) -> Any:
    """Returns `x @ weight.T` (B, O) for each weight, in x's dtype or another, or NotImplemented.

    Weights are (values,) of the 16-bit float type of x, or (values, scales) as of `spmd.ops.linear`
    beside an x of bfloat16; they are of one kind, and dims are multiples of what tiles need.
    `interpret` runs the kernel step by step in jax, on any platform: for tests.
    """
    rows = x_BI.shape[0]
    x_BI = x_BI.reshape(rows, -1)
    tiles = tiles_for(x_BI, weights)
    if tiles is None:
        return NotImplemented
    dtype = x_BI.dtype if dtype is None else dtype
    sums = partial_products(x_BI, weights, tiles, dtype, interpret=interpret)
    return tuple(jnp.sum(x[:, :rows], axis=0).astype(dtype) for x in sums)


def partial_products(
    x_BI: Any, weights: Sequence[Any], tiles: LinearTiles, dtype: Any, thin: Sequence[Any] = (),
    begin: Any = None, size: int = 0, *, interpret: bool = False,
) -> list[Any]:  # fmt: skip
    """Returns the sums of `tiles.splits` programs, (S, B', O) each, for rows padded to whole tiles.

    They are in float32, or in `dtype` if S is 1. Behind those of `weights` are those of `thin` ones
    (N, I): of the `size` outputs from `begin` on, and copies of the last that fill up a block.
    """
    # Where one row of x stood for all of a tile, the kernel took twice as long.
    x_BI = jnp.pad(x_BI, ((0, -x_BI.shape[0] % tiles.rows), (0, 0)))
    parts = [
        (values.reshape(values.shape[0], -1), *(scales.astype(jnp.float32) for scales in rest))
        for values, *rest in weights
    ]
    kept = dtype if tiles.splits == 1 else jnp.float32
    counts = [part[0].shape[0] // tiles.outputs for part in parts]
    counts += [-(-size // tiles.outputs)] * len(thin)
    widths = [count * tiles.outputs for count in counts]
    found: list[Any] = pl.pallas_call(
        functools.partial(_kernel, counts=counts, size=size, tiles=tiles, interpret=interpret),
        name="linears",
        grid=(sum(counts) * (x_BI.shape[0] // tiles.rows), tiles.splits),
        out_shape=[jax.ShapeDtypeStruct((tiles.splits, len(x_BI), n), kept) for n in widths],
        **compiled_with(tiles.warps, tiles.stages, interpret),
    )(pairs(x_BI) if tiles.is_paired else [x_BI], parts, list(thin), begin)
    return found


def tiles_for(x_BI: Any, weights: Sequence[Any]) -> LinearTiles | None:
    """Returns the tiles for `products` of these operands; None if the kernel does not take them."""
    rows, inputs = x_BI.shape
    outputs = [values.shape[0] for values, *_ in weights]
    kinds = {(values.dtype.name, len(rest), *values.shape[2:]) for values, *rest in weights}
    if len(kinds) != 1 or 0 in (rows, inputs, *outputs):
        return None
    (kind,) = kinds
    if kind == (x_BI.dtype.name, 0):
        is_taken = 1 < rows <= MOST_ROWS and of_16_bits(x_BI)
        return plain_tiles(rows, inputs, outputs, x_BI.dtype.itemsize) if is_taken else None
    # Pallas counts so many bytes with 32 bits, one of which is the sign.
    is_taken = x_BI.dtype == jnp.bfloat16 and max(outputs) * inputs < 1 << 31
    found = [choice for choice in BY_ROWS.get(kind, ()) if is_taken and rows <= choice[0]]
    if not found:
        return None
    _, programs, tiles = found[0]
    size = math.gcd(inputs, tiles.inputs)
    if size < LEAST or any(n % tiles.outputs for n in outputs):
        return None
    blocks = sum(outputs) // tiles.outputs * -(-rows // tiles.rows)
    wanted = -(-programs // blocks) if 4 * blocks < 3 * programs else 1
    splits = max(1, min(2 * MOST_SPLITS, inputs // size // 4, wanted))
    return tiles._replace(inputs=size, splits=splits)


def plain_tiles(rows: int, inputs: int, each: Sequence[int], item: int) -> LinearTiles | None:
    """Returns tiles for weights of 16-bit floats with `each` of outputs; None if there are none."""
    if any(n % OUTPUTS for n in each):
        return None
    blocks = sum(each) // OUTPUTS
    is_wide = blocks > 2 * MULTIPROCESSORS and all(n % (2 * OUTPUTS) == 0 for n in each)
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
    tile = (outputs + padded) * at_once * item
    return LinearTiles(padded, outputs, at_once, splits, min(MOST_STAGES, SHARED_BYTES // tile))


def pairs(x_BI: Any) -> list[Any]:
    """Returns int8 high and low, and a factor for each row: x is (128 high + low) * factor."""
    x32_BI = x_BI.astype(jnp.float32)
    largest_B = jnp.max(jnp.abs(x32_BI), axis=1)
    factor_B = jnp.where(largest_B == 0, 1, largest_B / (127 * HIGH))  # NaN where a row has one
    whole_BI = jnp.round(x32_BI / factor_B[:, None])
    high_BI = jnp.round(whole_BI / HIGH)
    return [high_BI.astype(jnp.int8), (whole_BI - HIGH * high_BI).astype(jnp.int8), factor_B]


def _kernel(
    given: Any, weights: Any, thin: Any, thin_begin: Any, *results: Any,
    counts: Sequence[int], size: int, tiles: LinearTiles, interpret: bool,
) -> None:  # fmt: skip
    x, *low, factors = given if tiles.is_paired else (*given, None)
    width, groups = GROUP // 2, tiles.inputs // GROUP
    block, tile = _place(pl.program_id(0), sum(counts), x.shape[0] // tiles.rows)
    rows, split = pl.ds(tile * tiles.rows, tiles.rows), pl.program_id(1)
    total = x.shape[1] // tiles.inputs
    each = -(-total // tiles.splits)
    begin, end = 0, total
    if tiles.splits > 1:
        begin, end = split * each, jnp.minimum(split * each + each, total)
    nothing_OR = jnp.zeros((tiles.outputs, tiles.rows), jnp.int32 if low else jnp.float32)

    def run(values: Any, scales: Any, result: Any, first: int, is_thin: bool) -> None:
        outputs = pl.ds((block - first) * tiles.outputs, tiles.outputs)
        if is_thin:
            past = (block - first) * tiles.outputs + jnp.arange(tiles.outputs)
            row_O = thin_begin[0] + jnp.minimum(past, size - 1)

        def add(i: Any, sums: Any) -> Any:
            where = pl.ds(i * tiles.inputs, tiles.inputs)
            if is_thin:
                weight_OI = _rows(values, row_O, i * tiles.inputs, tiles.inputs)
            else:
                weight_OI = values[outputs, where]
            if weight_OI.dtype == jnp.int8 and not low:
                weight_OI = _converted(weight_OI, interpret)
            each = zip(sums, (x, *low), strict=True)
            return [sum_OR + _dot(weight_OI, ref[rows, where]) for sum_OR, ref in each]

        def scales_of(i: Any) -> Any:
            i = jnp.minimum(i, total - 1)
            return [scales[0][outputs, i * groups + g] for g in range(groups)]

        def add_groups(i: Any, carry: Any) -> Any:
            (sum_OR,), known = carry
            following = scales_of(i + 1)  # read one turn ahead
            for g, scale_O in enumerate(known):
                group = i * groups + g
                packed_OW = values[outputs, pl.ds(group * width, width)]
                halves_RW = [x[rows, pl.ds((2 * group + h) * width, width)] for h in range(2)]
                low_OR, high_OR = (
                    _dot(_converted(packed_OW, interpret, h), x_RW)
                    for h, x_RW in enumerate(halves_RW)
                )
                sum_OR += (low_OR + high_OR) * scale_O[:, None]
            return [sum_OR], following

        if scales and scales[0].ndim == 2:
            carry = [nothing_OR], scales_of(begin)
            ((sum_OR,), _) = jax.lax.fori_loop(begin, end, add_groups, carry)
        else:
            sums = jax.lax.fori_loop(begin, end, add, [nothing_OR for _ in (x, *low)])
            sum_OR = sums[0]
            if low:
                sum_OR = HIGH * sums[0].astype(jnp.float32) + sums[1].astype(jnp.float32)
                sum_OR *= factors[rows]
            if scales:
                sum_OR *= scales[0][outputs][:, None]
        result[split, rows, outputs] = sum_OR.T.astype(result.dtype)

    every = [(*part, False) for part in weights] + [(values, True) for values in thin]
    runs = [
        functools.partial(run, values, scales, result, is_thin=is_thin)
        for (values, *scales, is_thin), result in zip(every, results, strict=True)
    ]
    run_one(block, counts, runs)


def run_one(block: Any, counts: Sequence[int], runs: Sequence[Any]) -> None:
    """Runs, in a kernel, the function that a block is of, with the first of that one's blocks."""
    first = 0
    for count, run in zip(counts, runs, strict=True):
        mine = functools.partial(run, first=first)
        if len(counts) == 1:
            mine()
        else:
            pl.when((block >= first) & (block < first + count))(mine)
        first += count


def _dot(weight_OI: Any, x_RI: Any) -> Any:
    dtype = jnp.int32 if x_RI.dtype == jnp.int8 else jnp.float32
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(weight_OI, x_RI, dims, preferred_element_type=dtype)


# Four bytes in a register become two times two bfloat16. One of the bits 0x43bb is 128 + bb if the
# first bit of bb is 0. If it is 1, as of negative int8, that is the exponent's last bit: without it
# the number is right, less 256. Of 4 bits it is 128 + bb, less 136.
_INT8 = """
    prmt.b32 n, w, 0x43434343, {bytes};
    lop3.b32 less, n, 0xff80ff80, 0x80008000, 0x6a;
    and.b32 n, n, 0xff7fff7f;
    fma.rn.bf16x2 {result}, n, one, less;"""
_INT4 = """
    prmt.b32 n, w, 0, {bytes};
    shr.u32 n, n, {shift};
    lop3.b32 n, n, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 {result}, n, one, less;"""


def _converted(x: Any, interpret: bool, half: int = 0) -> Any:
    """int8, or the 4 bits of a half of packed uint8, as bfloat16."""
    is_packed = x.dtype == jnp.uint8
    if interpret:
        return ((x >> 4 * half & 15).astype(jnp.int8) - 8 if is_packed else x).astype(jnp.bfloat16)
    code = _INT4 if is_packed else _INT8
    body = [
        code.format(result=result, bytes=chosen, shift=4 * half)
        for result, chosen in (("$0", "0x4140"), ("$1", "0x4342"))
    ]
    begin = ".reg .b32 n, w, one, less; mov.b32 one, 0x3f803f80; mov.b32 less, 0xc308c308;"
    found: Any = triton().elementwise_inline_asm(
        f"{{ {begin} mov.b32 w, $2; {''.join(body)} }}", args=[x], constraints="=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )  # fmt: skip
    return found[0]


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


FEW = 8  # rows that XLA multiplies: in tiles of as many as tensor cores take most would be empty

LEAST = 64  # dims of weights are multiples of so many; others are not for the kernel

NEIGHBOURS = 8
"""The number of tiles of rows that go over all columns together, so that these stay in caches."""


def ragged_product(x_RI: Any, weights_EOI: Any, sizes_E: Any, *, interpret: bool = False) -> Any:
    """Returns (R, O): each row times its group's weights; NotImplemented for other operands.

    O and I are multiples of 64, dtypes the same 16-bit float, or weights have 8 bits, which are
    converted in the kernel. Rows are sorted by group; group e has
    `sizes_E[e]`. Results and gradients of rows after the last group are undefined. Sums are in
    float32. `interpret` runs the kernel step by step in jax: for tests.
    """
    fits = of_16_bits(x_RI) and 0 not in x_RI.shape
    fits = fits and (x_RI.dtype == weights_EOI.dtype or weights_EOI.dtype.itemsize == 1)
    fits = fits and all(n and n % LEAST == 0 for n in weights_EOI.shape[1:])
    # No array is too large: Pallas counts with 64 bits what has more than 2^32 bytes.
    if not fits or not weights_EOI.shape[0]:
        return NotImplemented
    return _product(x_RI, weights_EOI, sizes_E, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_RI: Any, weights_EOI: Any, sizes_E: Any, interpret: bool) -> Any:
    if len(x_RI) <= FEW:
        # As one row with a weight: XLA looks the weights up where it multiplies and sums, for all
        # weights of the same rows at once.
        group_R = jnp.sum(jnp.arange(len(x_RI))[:, None] >= _summed(sizes_E), axis=1)
        group_R = jnp.minimum(group_R, len(sizes_E) - 1)  # of rows after the last group
        own_ROI = weights_EOI.at[group_R].get(mode="promise_in_bounds").astype(jnp.float32)
        return jnp.sum(own_ROI * x_RI[:, None].astype(jnp.float32), axis=2).astype(x_RI.dtype)
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
    each, inputs = -(-rows // weights.shape[0]), x_RI.shape[1]
    turned = _turned_tiles(each, inputs, weights.dtype.itemsize) if is_transposed else None
    tiles = turned or _tiles(LEAST if each <= LEAST else 2 * LEAST, columns)
    about_T3 = tile_rows(sizes_E, rows, tiles.rows)
    grid = about_T3.shape[0], columns // tiles.columns
    how: dict[str, Any] = {"tiles": tiles, "grid": grid, "is_transposed": is_transposed}
    how |= {"is_turned": turned is not None, "interpret": interpret}
    kernel = functools.partial(_rows_kernel, **how)
    result = jax.ShapeDtypeStruct((rows, columns), x_RI.dtype)
    return _call("rows_gemm", kernel, tiles, grid, result, interpret)(about_T3, x_RI, weights)


def by_groups(y_RO: Any, x_RI: Any, sizes_E: Any, *, interpret: bool) -> Any:
    """Returns (E, O, I): for each group, the sum over its rows of outer products of y and x."""
    outputs, inputs, groups = y_RO.shape[1], x_RI.shape[1], sizes_E.shape[0]
    # Tiles are of outputs and inputs; so many rows are multiplied at a time.
    tiles = _tiles(2 * LEAST if outputs % (2 * LEAST) == 0 else LEAST, inputs)
    grid = groups, outputs // tiles.rows, inputs // tiles.columns
    ends_E = _summed(sizes_E)
    about_E2 = jnp.stack([ends_E - sizes_E, ends_E], axis=1).astype(jnp.int32)
    kernel = functools.partial(_groups_kernel, tiles=tiles, grid=grid)
    result = jax.ShapeDtypeStruct((groups, outputs, inputs), x_RI.dtype)
    return _call("groups_gemm", kernel, tiles, grid, result, interpret)(about_E2, y_RO, x_RI)


def _call(name: str, kernel: Any, tiles: Tiles, grid: Any, result: Any, interpret: bool) -> Any:
    how = compiled_with(tiles.warps, tiles.stages, interpret)
    return pl.pallas_call(kernel, name=name, grid=(math.prod(grid),), out_shape=result, **how)


def _tiles(rows: int, columns: int) -> Tiles:
    """Returns tiles of `rows` and of the most columns (256, 128 or 64) that divide `columns`."""
    # The fastest on an H200, for 8 groups of (14336, 4096); the stages fit into an A100's memory.
    wide = next(n for n in (4 * LEAST, 2 * LEAST, LEAST) if columns % n == 0)
    return Tiles(rows, wide, LEAST, 8 if wide == 4 * LEAST else 4, 4 if rows == LEAST else 3)


def _turned_tiles(each: int, inputs: int, item: int) -> Tiles | None:
    """Returns tiles of products whose first operand is the weight, for groups of about `each` rows.

    None: there are so many that tensor cores have enough of them as rows.
    """
    # By measurements (docs/benchmarks/decoding.md); with 64 rows of each it is no faster.
    if each <= LEAST_ROWS // 2:
        return Tiles(LEAST_ROWS, LEAST, LEAST, *((2, 4) if item == 1 else (4, 6)))
    if each <= LEAST_ROWS:
        return Tiles(2 * LEAST_ROWS, LEAST, math.gcd(inputs, 2 * LEAST), 4, 4)
    return None


def tile_rows(sizes_E: Any, rows: int, size: int) -> Any:
    """Returns (T, 3): each tile's group, first row, and number of rows (0 if it is not needed)."""
    # E.g. groups of 5, 0 and 3 rows in tiles of 4 rows: counts [2, 0, 1], ends [2, 2, 3], and tiles
    # (0, 0, 4), (0, 4, 1), (2, 5, 3).
    groups = sizes_E.shape[0]
    counts_E = (sizes_E + size - 1) // size
    ends_E = _summed(counts_E)
    most = min(rows, -(-rows // size) + groups)
    tile_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.sum(ends_E <= tile_T[:, None], axis=1, dtype=jnp.int32)
    is_needed_T, group_T = group_T < groups, jnp.minimum(group_T, groups - 1)
    done_T = (tile_T - (ends_E - counts_E)[group_T]) * size
    left_T = jnp.where(is_needed_T, jnp.clip(sizes_E[group_T] - done_T, 0, size), 0)
    start_T = jnp.where(is_needed_T, (_summed(sizes_E) - sizes_E)[group_T] + done_T, 0)
    return jnp.stack([group_T, start_T, left_T], axis=1).astype(jnp.int32)


def _summed(x_E: Any) -> Any:
    """Returns the sums of the first, of the first two, ...: one kernel, where `cumsum` has two."""
    at_E = jnp.arange(len(x_E))
    return jnp.sum(jnp.where(at_E <= at_E[:, None], x_E, 0), axis=1, dtype=x_E.dtype)


def _place(program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Returns (row, column) of a program's tile in a grid of `rows` x `columns` tiles."""
    width = NEIGHBOURS * columns
    first = program // width * NEIGHBOURS
    height = jnp.minimum(rows - first, NEIGHBOURS)
    return first + program % width % height, program % width // height


def _rows_kernel(
    *refs: Any, tiles: Tiles, grid: tuple[int, int], is_transposed: bool, is_turned: bool,
    interpret: bool,
) -> None:  # fmt: skip
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
                weight_CK = weights[group, columns, inner]
                if weight_CK.dtype == jnp.int8 and x.dtype == jnp.bfloat16:
                    weight_CK = _converted(weight_CK, interpret)
                if is_turned:
                    return sum_RC + _dot(weight_CK.astype(x.dtype), x_RK)
                return sum_RC + triton().dot(x_RK, weight_CK.astype(x.dtype), trans_b=True)
            return sum_RC + triton().dot(x_RK, weights[group, inner, columns])

        shape = (tiles.columns, tiles.rows) if is_turned else (tiles.rows, tiles.columns)
        sum_RC = jnp.zeros(shape, jnp.float32)
        sum_RC = jax.lax.fori_loop(0, x.shape[1] // tiles.inner, body, sum_RC)
        sum_RC = sum_RC.T if is_turned else sum_RC
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
