"""Products with weights and with the low-rank adapters of rows, as Pallas kernels for Triton.

XLA makes some five kernels of the adapters of weights that meet the same rows, each as long as its
launch. Here there are two: rows times A is computed beside the weights, in their kernel if it has
one, and what that gives times B is added to their results. Of a single row its own adapter is read
alone; of several those of all places, and what is of others is multiplied by 0.

Shapes are in the names: B, T rows; I, O a weight's inputs and outputs; N places; R the rank; C
columns of all ranks; S partial sums.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spmd.ops import products_hopper
from spmd.ops.products_triton import (
    LEAST,
    LEAST_ROWS,
    MULTIPROCESSORS,
    OUTPUTS,
    PROGRAMS,
    LinearTiles,
    compiled_with,
    of_16_bits,
    partial_products,
    places,
    plain_tiles,
    run_one,
    tiles_for,
    triton,
)

MOST_COLUMNS = 128  # that a program keeps of a tile of rows; of more it reads them again and again
BLOCK = 64


def adapted(
    x_BI: Any, parts: Sequence[Any], pairs: Sequence[Any], place_B: Any,
    product: Callable[[], Sequence[Any]], *, interpret: bool = False,
) -> Any:  # fmt: skip
    """Returns (B, O) for each weight, adapters included, or NotImplemented for other operands.

    `parts` are weights as `spmd.ops.linear` has them, `pairs` (A (N, R, I), B (N, R, O)) of each;
    `product` multiplies rows with weights for which there is no kernel that takes A along.
    """
    rows, inputs = x_BI.shape
    count, rank, _ = pairs[0][0].shape
    outputs = [b_NRO.shape[2] for _, b_NRO in pairs]
    is_taken = of_16_bits(x_BI) and all(n and n % LEAST == 0 for n in (inputs, *outputs))
    if not is_taken or not rows or any(a.dtype != x_BI.dtype for pair in pairs for a in pair):
        return NotImplemented
    begin_1, size = jnp.zeros((1,), jnp.int32), count * rank
    if rows == 1:
        begin_1, size = jnp.maximum(place_B, 0).astype(jnp.int32) * rank, rank
    thin = [a_NRI.reshape(-1, inputs) for a_NRI, _ in pairs]
    many = functools.partial(partial_products, interpret=interpret)
    tiles, blocks = None, products_hopper.blocks_for(x_BI, [*parts, *((a_CI,) for a_CI in thin)])
    if rows == 1 and all(len(part) == 1 and part[0].dtype == x_BI.dtype for part in parts):
        tiles = plain_tiles(rows, inputs, outputs, x_BI.dtype.itemsize)
    elif all(len(part) < 3 for part in parts):  # none has zeros
        tiles = tiles_for(x_BI, parts)
    if tiles is not None and tiles.is_paired:  # A needs the rows as they are
        tiles = None
    if blocks is not None:  # A is a weight as the others
        of_all = [part[0] for part in parts] + thin
        kept = x_BI.dtype if blocks.splits == 1 else jnp.float32
        sums = products_hopper.partial_products([x_BI], of_all, blocks, kept, interpret=interpret)
        found, thin = sums[: len(parts)], sums[len(parts) :]
    elif tiles is not None:
        sums = many(x_BI, parts, tiles, x_BI.dtype, thin, begin_1, size)
        found, thin = sums[: len(parts)], sums[len(parts) :]
    else:
        found = [out_BO[None] for out_BO in product()]
        tiles = _thin_tiles(rows, inputs, size * len(pairs))
        sums = many(x_BI, [], tiles, x_BI.dtype, thin, begin_1, size)
        thin = [jnp.sum(x, axis=0, keepdims=True).astype(x_BI.dtype) for x in sums]
    flat = [b_NRO.reshape(-1, b_NRO.shape[2]) for _, b_NRO in pairs]
    return _added(x_BI, found, thin, flat, (place_B, begin_1, size, rank), interpret)


def _tile(rows: int) -> int:
    return min(LEAST, max(LEAST_ROWS, pl.next_power_of_2(rows)))


def _thin_tiles(rows: int, inputs: int, outputs: int) -> LinearTiles:
    """Tiles for A alone: programs are made many by cutting what each of them sums."""
    tile = _tile(rows)
    at_once = 2 * LEAST if inputs % (2 * LEAST) == 0 else LEAST
    blocks = -(-outputs // OUTPUTS) * -(-rows // tile)
    wanted = min(-(-PROGRAMS // blocks), inputs // at_once // 2)
    return LinearTiles(tile, OUTPUTS, at_once, max(1, wanted), 4)


def _added(
    x_BI: Any, found: Sequence[Any], thin: Sequence[Any], flat: Sequence[Any], about: Any,
    interpret: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Adds rows times A times B to the results, in place where those are not partial sums."""
    place_B, begin_1, size, rank = about
    rows = x_BI.shape[0]
    tile = _tile(rows)
    blocks, tiles = [b_CO.shape[1] // BLOCK for b_CO in flat], -(-rows // tile)
    each = max(1, sum(blocks) * tiles // (2 * MULTIPROCESSORS))
    counts = [-(-n // each) for n in blocks]
    is_whole = all(y.dtype == x_BI.dtype and y.shape[:2] == (1, rows) for y in found)
    kernel = functools.partial(
        _kernel, counts=counts, each=each, size=size, rank=rank, tile=tile, in_place=is_whole,
        dtype=x_BI.dtype,
    )  # fmt: skip
    results: Sequence[Any] = pl.pallas_call(
        kernel,
        name="adapters",
        grid=(sum(counts), tiles),
        out_shape=[jax.ShapeDtypeStruct((1, rows, b.shape[1]), x_BI.dtype) for b in flat],
        input_output_aliases={i: i for i in range(len(found))} if is_whole else {},
        **compiled_with(4, 3, interpret),
    )(list(found), list(thin), list(flat), place_B.astype(jnp.int32), begin_1)
    return tuple(out_1BO[0] for out_1BO in results)


def _kernel(
    found: Any, thin: Any, flat: Any, place: Any, begin: Any, *results: Any, counts: Sequence[int],
    each: int, size: int, rank: int, tile: int, in_place: bool, dtype: Any,
) -> None:  # fmt: skip
    program, rows = pl.program_id(0), place.shape[0]
    row_T = pl.program_id(1) * tile + jnp.arange(tile)
    known_T = jnp.minimum(row_T, rows - 1)
    place_T = triton().load(place.at[known_T])
    lowest, highest = jnp.min(place_T), jnp.max(place_T)
    is_alone = (lowest == highest) & (rows > 1)  # as a prompt's rows are, which come in a sequence

    def summed(ref: Any, where: Any) -> Any:
        parts = [triton().load(ref.at[(s, *where)]) for s in range(ref.shape[0])]
        return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])

    def run(y: Any, h: Any, b: Any, result: Any, first: int) -> None:
        last = b.shape[1] // BLOCK

        def some(begin_at: Any, size: int) -> None:
            """Adds what `size` columns from `begin_at` on give to all blocks of the program."""
            columns = min(MOST_COLUMNS, max(LEAST_ROWS, pl.next_power_of_2(size)))

            def own(i: Any) -> Any:
                past_C = i * columns + jnp.arange(columns)
                of_C = (begin[0] + begin_at + past_C) // rank
                is_own_TC = (place_T[:, None] == of_C[None, :]) & (past_C < size)[None, :]
                h_TC = summed(h, places(known_T, begin_at + i * columns, columns))
                return jnp.where(is_own_TC, h_TC, 0).astype(dtype)

            def add(i: Any, sum_TO: Any, at: Any, own_TC: Any) -> Any:
                past_C = jnp.minimum(i * columns + jnp.arange(columns), size - 1)
                b_CO = triton().load(b.at[places(begin[0] + begin_at + past_C, at, BLOCK)])
                return sum_TO + triton().dot(own_TC, b_CO)

            steps = -(-size // columns)
            kept_TC = own(0)

            def block(n: Any, none: Any) -> Any:
                at = n * BLOCK
                sum_TO = add(0, summed(y, places(known_T, at, BLOCK)), at, kept_TC)
                if steps > 1:
                    more = lambda i, sum_TO: add(i, sum_TO, at, own(i))  # noqa: E731
                    sum_TO = jax.lax.fori_loop(1, steps, more, sum_TO)
                mask = jnp.broadcast_to((row_T < rows)[:, None], sum_TO.shape)
                target = result.at[(0, *places(row_T, at, BLOCK))]
                triton().store(target, sum_TO.astype(dtype), mask=mask)
                return none

            begin_n = (program - first) * each
            jax.lax.fori_loop(begin_n, jnp.minimum(begin_n + each, last), block, 0)

        if rows == 1:
            some(0, size)
        else:
            pl.when(is_alone & (highest >= 0))(lambda: some(highest * rank, rank))
            is_mixed = jnp.logical_not(is_alone)
            if not in_place:
                is_mixed |= highest < 0
            pl.when(is_mixed)(lambda: some(0, size))

    each_of = zip(found, thin, flat, results, strict=True)
    run_one(program, counts, [functools.partial(run, *given) for given in each_of])
