"""Rows with several weights, on GPUs of Hopper: a Pallas kernel for Mosaic GPU.

With up to some hundred rows such products are bound by reading the weights. Here x is the first
operand of the tensor cores' products, 64 rows at a time, and weights are the second, of which they
take any multiple of eight outputs: so outputs are cut into as many blocks as there are
multiprocessors, and all of these read alike, in one wave. One warpgroup fetches tiles of inputs as
far ahead as shared memory holds them, the others multiply 64 or 128 rows with every tile.

x beside weights of 8 bits is a pair of such numbers, which are as exact as a bfloat16: products of
integers are summed in integers, and of floats, whose sums tensor cores keep with 14 bits (DeepSeek-
AI, *DeepSeek-V3 Technical Report*, 2024, section 3.3.2), in float32 after each tile.

For example 22,016 outputs of gate and up are cut into 2 x 66 blocks of 168, one for each of 132
multiprocessors. 4,096 outputs would be blocks of 32, for each of which all of x is read: so blocks
have 64, and two programs share one, each with half of the inputs.

Shapes are in the names: B, R rows, R of a program; O, I a weight's outputs and inputs; N outputs of
a block; S programs that share a block's inputs.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spmd.ops.paged_hopper import is_here, mosaic
from spmd.ops.products_triton import HIGH, MULTIPROCESSORS, pairs, run_one

ROWS = 64  # that tensor cores multiply at once
INPUT_BYTES = 128  # of a tile's row
SHARED_BYTES = 218 << 10
WRITTEN_BYTES = 32 << 10  # of results on their way to memory
LEAST_BLOCK = 64  # outputs; with fewer x is read too often, and programs share a block
MOST_SPLITS = 4
FP8 = jnp.float8_e4m3fn


class Kind(NamedTuple):
    """For weights of a dtype: what the kernel does, and how many rows it is the fastest for."""

    rows: range
    alone: int  # with more rows only where blocks are not shared
    step: int = 8  # sizes of blocks are multiples of it
    registers: int = 1  # in which a result is summed up
    is_paired: bool = False  # x is a pair of such numbers


KINDS = {
    "bfloat16": Kind(range(33, 257), 128),
    "float16": Kind(range(33, 257), 128),
    "float8_e4m3fn": Kind(range(17, 128), 128, registers=2, is_paired=True),
    "int8": Kind(range(17, 65), 64, step=16, registers=2, is_paired=True),
}
"""By measurements on an H200 (docs/benchmarks/decoding.md)."""

MOST_REGISTERS = 176  # of a thread for sums; they are spread over 128 threads


class Blocks(NamedTuple):
    """How a call is cut into programs."""

    outputs: int  # of a block
    splits: int  # programs that share a block's inputs
    groups: int  # of 64 rows
    own: int  # groups of a warpgroup


def products(
    x_BI: Any, weights: Sequence[Any], dtype: Any = None, *, interpret: bool = False
) -> Any:
    """Returns `x @ weight.T` (B, O) for each weight, in x's dtype or another, or NotImplemented.

    Weights are as for `products_triton.products`, also 8-bit floats with scales. `interpret` runs
    the kernel step by step in jax, on any platform: for tests.
    """
    rows = x_BI.shape[0]
    x_BI = x_BI.reshape(rows, -1)
    blocks = blocks_for(x_BI, weights)
    if blocks is None:
        return NotImplemented
    dtype = x_BI.dtype if dtype is None else dtype
    values, *scales = zip(*weights, strict=True)
    xs, factor_B1 = [x_BI], jnp.float32(1)
    if values[0].dtype == jnp.int8:
        *xs, factor_B = pairs(x_BI)
        factor_B1 = factor_B[:, None]
    elif values[0].dtype == FP8:
        xs, factor_B1 = _float_pairs(x_BI)
    kept = dtype if blocks.splits == 1 and not scales else jnp.float32
    sums = partial_products(xs, values, blocks, kept, interpret=interpret)
    found = [jnp.sum(y_SBO[:, :rows], axis=0) for y_SBO in sums]
    if scales:
        found = [
            y_BO * factor_B1 * scale_O.astype(jnp.float32)
            for y_BO, scale_O in zip(found, scales[0], strict=True)
        ]
    return tuple(y_BO.astype(dtype) for y_BO in found)


def blocks_for(x_BI: Any, weights: Sequence[Any]) -> Blocks | None:
    """Returns the blocks for `products` of these; None if the kernel here does not take them."""
    rows, inputs = x_BI.shape
    each = [values.shape[0] for values, *_ in weights]
    forms = {(values.dtype, len(rest), values.ndim) for values, *rest in weights}
    if len(forms) != 1 or not is_here():
        return None
    ((weight, scales, rank),) = forms
    kind = KINDS.get(weight.name)
    if kind is None or rank != 2 or rows not in kind.rows:
        return None
    if (scales, x_BI.dtype) != ((1, jnp.bfloat16) if kind.is_paired else (0, weight)):
        return None
    tiles, rest = divmod(inputs * weight.itemsize, INPUT_BYTES)
    if rest or any(n % 8 or not n for n in each):
        return None
    groups = -(-rows // ROWS)
    own = -(-groups // 3)  # more than four warpgroups have too few registers each
    most = min(256, 2 * MOST_REGISTERS // (kind.registers * own)) // kind.step * kind.step
    for splits in (1, 2, MOST_SPLITS):
        size, waves = 0, 0
        while not 0 < size <= most:
            waves += 1
            size = _size(each, MULTIPROCESSORS * waves // splits, kind.step)
        if size >= LEAST_BLOCK or tiles < 8 * splits:
            break
    if rows > kind.alone and splits > 1:
        return None
    return Blocks(size, splits, -(-groups // own) * own, own)


def _size(each: Sequence[int], most: int, step: int) -> int:
    """Returns the outputs of the smallest blocks of which there are at most so many."""
    size = -(-sum(each) // most // step) * step
    while sum(-(-n // size) for n in each) > most:
        size += step
    return size


def _float_pairs(x_BI: Any) -> tuple[list[Any], Any]:
    """Returns 8-bit floats high and low, and a factor for each row: x is (high + low) * factor."""
    x32_BI = x_BI.astype(jnp.float32)
    largest_B1 = jnp.max(jnp.abs(x32_BI), axis=1, keepdims=True)
    # A power of two, with which nothing is rounded: the largest is from 64 to 128, and below 2^-15
    # of it lows are too small to be known.
    exponent_B1 = jax.lax.bitcast_convert_type(largest_B1, jnp.int32) & 0x7F800000
    power_B1 = jax.lax.bitcast_convert_type(exponent_B1, jnp.float32)
    factor_B1 = jnp.maximum(power_B1, 2.0**-100) / 64
    whole_BI = x32_BI / factor_B1
    high_BI = jax.lax.reduce_precision(whole_BI, 4, 3)  # XLA leaves a conversion to and fro out
    return [high_BI.astype(FP8), (whole_BI - high_BI).astype(FP8)], factor_B1


def partial_products(
    xs: Sequence[Any], weights: Sequence[Any], blocks: Blocks, kept: Any, *, interpret: bool
) -> Any:
    """Returns the sums of programs, (S, B', O) in `kept` for each weight and rows padded to B'.

    `xs` are the rows, or what they are pairs of, and `weights` arrays (O, I) in the same dtype.
    """
    plgpu = mosaic()
    block, splits, groups, own = blocks
    (rows, inputs), dtype = xs[0].shape, xs[0].dtype
    inner, padded = INPUT_BYTES // dtype.itemsize, -(-rows // 8) * 8
    xs = [jnp.pad(x, ((0, padded - rows), (0, 0))) for x in xs]
    counts = [-(-len(w) // block) for w in weights]
    workers, size = groups // own, own * ROWS
    total = inputs // inner
    each = -(-total // splits)
    is_integer, is_float8 = dtype == jnp.int8, dtype == FP8
    shares = [HIGH, 1] if is_integer else [1]
    most = min(block, WRITTEN_BYTES // (groups * ROWS * jnp.dtype(kept).itemsize))
    written = max(n for n in range(8, most + 1, 8) if block % n == 0)
    tile_bytes = (len(xs) * groups * ROWS + block) * INPUT_BYTES
    stages = min(each, (SHARED_BYTES - WRITTEN_BYTES) // tile_bytes)
    sums_type = plgpu.ACC((size, block), jnp.int32 if is_integer else jnp.float32)

    def kernel(*refs: Any) -> None:
        *ends, results, tiles_x, tiles, there, read = refs
        x, ws, outs = ends[: len(xs)], ends[len(xs) : -len(weights)], ends[-len(weights) :]
        program, split, me = (jax.lax.axis_index(name) for name in ("block", "split", "warpgroup"))
        begin = split * each
        steps = jnp.minimum(total - begin, each)

        def of_mine(do: Any, refs: Sequence[Any]) -> None:
            """Calls `do(ref, begin)` with the ref of the program's weight, and its outputs."""

            def run(first: int, ref: Any) -> None:
                do(ref, (program - first) * block)

            run_one(program, counts, [functools.partial(run, ref=ref) for ref in refs])

        @pl.when(me == workers)
        def fetch() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def ahead(i: Any) -> None:
                stage, columns = i % stages, pl.ds((begin + i) * inner, inner)

                @pl.when(i >= stages)
                def has_been_read() -> None:
                    plgpu.barrier_wait(read.at[stage])

                for n, part in enumerate(x):
                    to = tiles_x.at[stage, n, pl.ds(0, padded)]
                    plgpu.copy_gmem_to_smem(part.at[:, columns], to, there.at[stage])

                def copy(w: Any, first: Any) -> None:
                    part = w.at[pl.ds(first, block), columns]
                    plgpu.copy_gmem_to_smem(part, tiles.at[stage], there.at[stage])

                of_mine(copy, ws)

            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def have_been_read(i: Any) -> None:
                plgpu.barrier_wait(read.at[i % stages])

        @pl.when(me < workers)
        def compute() -> None:
            plgpu.set_max_registers(232 if workers < 3 else 152, action="increase")
            mine = pl.ds(me * size, size)

            def multiply(stage: Any, *sums: Any) -> None:
                weight_IN = tiles.at[stage].transpose((1, 0))
                for n in range(len(xs)):
                    plgpu.wgmma(sums[n % len(sums)], tiles_x.at[stage, n, mine], weight_IN)

            def add_all(*sums: Any) -> Any:
                @pl.loop(0, steps)
                def step(i: Any) -> None:
                    plgpu.barrier_wait(there.at[i % stages])
                    multiply(i % stages, *sums)
                    plgpu.wgmma_wait(len(xs))

                    @pl.when(i > 0)
                    def last_is_read() -> None:
                        plgpu.barrier_arrive(read.at[(i - 1) % stages])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[(steps - 1) % stages])
                parts = [x[...].astype(jnp.float32) for x in sums]
                return sum(part * share for part, share in zip(parts, shares, strict=True))

            def add(i: Any, sum_RN: Any) -> Any:
                stage = i % stages

                def product(sums: Any) -> Any:
                    multiply(stage, sums)
                    return sums[...]

                plgpu.barrier_wait(there.at[stage])
                if interpret:
                    x_RI = sum(
                        tiles_x[stage, n, mine].astype(jnp.float32) * shares[n % len(shares)]
                        for n in range(len(xs))
                    )
                    sum_RN += jnp.dot(x_RI, tiles[stage].astype(jnp.float32).T)
                else:
                    sum_RN += pl.run_scoped(product, sums_type)
                plgpu.barrier_arrive(read.at[stage])
                return sum_RN

            if interpret or is_float8:
                nothing_RN = jnp.zeros((size, block), jnp.float32)
                nothing_RN = plgpu.layout_cast(nothing_RN, plgpu.Layout.WGMMA)
                sum_RN = jax.lax.fori_loop(0, steps, add, nothing_RN)
            else:
                sum_RN = pl.run_scoped(add_all, *[sums_type] * len(shares))
            for column in range(0, block, written):
                if column:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                results[mine, :] = sum_RN[:, column : column + written].astype(kept)
                plgpu.commit_smem()
                for n in range(workers):
                    rows_R = pl.ds(n * size, min(size, padded - n * size))

                    def write(out: Any, first: Any, rows_R: Any = rows_R, c: int = column) -> None:
                        part = out.at[split, rows_R, pl.ds(first + c, written)]
                        plgpu.copy_smem_to_gmem(results.at[rows_R], part)

                    pl.when(me == n)(functools.partial(of_mine, write, outs))
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(INPUT_BYTES))
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((splits, padded, len(w)), kept) for w in weights],
        grid=(sum(counts), splits),
        grid_names=("block", "split"),
        num_threads=workers + 1,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((groups * ROWS, written), kept),
            plgpu.SMEM((stages, len(xs), groups * ROWS, inner), dtype, transforms=swizzled),
            plgpu.SMEM((stages, block, inner), dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=len(xs) + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )(*xs, *weights)
