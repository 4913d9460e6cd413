"""Products of a few rows with weights on NVIDIA GPUs: a Pallas kernel for Triton.

Up to 128 rows such products are bound by reading the weights. XLA calls cuBLAS once for each of
them, and a call that reads less than some 100 MB is too short to keep the memory busy: it starts,
fills up and runs dry. Here the weights that meet the same rows are read by one kernel: its programs
are the blocks of outputs of one weight after the other. Where blocks are too few for the
multiprocessors, several programs share the inputs of one, and their sums are added.

The weight is the first operand of the tensor cores' products, which take at least 64 of its rows,
and x the second, of which 16 do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spmd.ops.triton import compiled_with, power_above, triton

MOST_ROWS = 128  # with more rows products are bound by arithmetic, and cuBLAS is faster

LEAST_ROWS = 16
OUTPUTS = 64  # of a block: so many rows of a weight is the least that tensor cores of Hopper take

MULTIPROCESSORS = 132
"""Of an H100. With blocks for more than two turns of them, larger blocks read x less often."""

PROGRAMS = 96  # fewer do not keep them busy

MOST_SPLITS = 4
SHARED_BYTES = 1 << 17
"""Of shared memory for tiles that are fetched ahead. An A100 has 163 KiB, an H100 227."""

MOST_STAGES = 5


class LinearTiles(NamedTuple):
    """The sizes of the tiles that a program of the kernel multiplies, and how it runs."""

    # rows, outputs: of x, with padding a power of two; of a block
    rows: int
    outputs: int
    inputs: int  # that are multiplied at a time
    splits: int  # programs that share a block's inputs
    stages: int  # tiles under way, the one that is multiplied among them


def products(x_BI: Any, weights: Sequence[Any], *, interpret: bool = False) -> Any:
    """Returns `x @ weight.T` (B, O) for each weight; NotImplemented if the kernel does not fit.

    It takes rows and weights (O, I) of one dtype of 16 bits, and sums in float32. `interpret` runs
    it step by step in jax, on any platform: for tests.
    """
    tiles = tiles_for(x_BI, weights)
    if tiles is None:
        return NotImplemented
    rows, inputs = x_BI.shape
    counts = [weight.shape[0] // tiles.outputs for weight in weights]
    begins = [sum(counts[:i]) for i in range(len(counts))]

    def block(begin: int, count: int, i: Any) -> Any:
        """Returns which block of a weight program `i` gets; programs of other weights ignore it."""
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
    """Returns the tiles for products of these shapes; None if the kernel does not take them."""
    rows, inputs = x_BI.shape
    of_16_bits = x_BI.dtype.itemsize == 2 and jnp.issubdtype(x_BI.dtype, jnp.floating)
    if not 1 < rows <= MOST_ROWS or not of_16_bits:
        return None
    if any(w.dtype != x_BI.dtype or 0 in w.shape or w.shape[0] % OUTPUTS for w in weights):
        return None
    blocks = sum(w.shape[0] for w in weights) // OUTPUTS
    is_wide = blocks > 2 * MULTIPROCESSORS and all(w.shape[0] % (2 * OUTPUTS) == 0 for w in weights)
    outputs = 2 * OUTPUTS if is_wide else OUTPUTS
    wanted = 1
    while wanted < MOST_SPLITS and blocks * OUTPUTS // outputs * wanted < PROGRAMS:
        wanted *= 2
    padded = max(LEAST_ROWS, power_above(rows))
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
    row_R = jnp.arange(tiles.rows)
    shape = (tiles.rows, tiles.inputs)
    row_RI = jnp.broadcast_to(jnp.minimum(row_R, rows - 1)[:, None], shape)
    count = inputs // tiles.splits // tiles.inputs

    def body(i: Any, sum_OR: Any) -> Any:
        begin = (split * count + i) * tiles.inputs
        column_RI = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        x_RI = triton().load(x.at[row_RI, column_RI])
        weight_OI = weight[:, pl.ds(begin, tiles.inputs)]
        product_OR = triton().dot(weight_OI, x_RI, trans_b=True)
        return sum_OR + product_OR

    sum_OR = jnp.zeros((tiles.outputs, tiles.rows), jnp.float32)
    sum_OR = jax.lax.fori_loop(0, count, body, sum_OR)
    out = (tiles.rows, tiles.outputs)
    where = (jnp.broadcast_to(row_R[:, None], out), jax.lax.broadcasted_iota(jnp.int32, out, 1))
    mask = jnp.broadcast_to((row_R < rows)[:, None], out)
    triton().store(result.at[where], sum_OR.T.astype(result.dtype), mask=mask)
