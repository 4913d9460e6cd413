"""Local lowerings of reductions, top-k and sorts along split dims: by piece, then all together.

Sums, maxima and the like stay partial over the atoms that split the reduced dims. For `top_k` and
other bodies of `reduce`, devices exchange what they found; for `sort`, their sorted pieces.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from spmd.ir.dialect.bodies import inline_elementwise
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.contract import RaggedDims
from spmd.ir.dialect.halo import Need, rounds
from spmd.ir.dialect.reducers import identity_element
from spmd.ir.dialect.rule import MERGE
from spmd.ir.program import Body, Value
from spmd.ir.types import GatherDims, TensorType, is_float, numpy_dtype
from spmd.lowering.local.dims import Split, gather_dim, own_piece, per_device
from spmd.lowering.local.fetch import fetch
from spmd.lowering.local.table import LocalOp, local
from spmd.mesh.sharding import Axes, tiles
from spmd.propagation.projection import reduced_axes

# Contractions.


@local("stablehlo.dot_general")
def _dot_general(op: LocalOp) -> tuple[Value, ...]:
    """Multiplies local pieces, with padding along contracted dims, which may be NaN, set to 0."""
    return op.emit([op.masked(i) for i in range(2)])


@local("stablehlo.reduce")
def _reduce(op: LocalOp) -> tuple[Value, ...]:
    """Reduces the local piece, its padding set to the identity, or calls `reduce_merged`."""
    if merged_dims(op):
        return reduce_merged(op)
    if not reduced_axes(op.rule, op.choice.assignment):
        return op.emit()
    return op.emit([op.masked(0), op.operands[1]])  # a body that is one known op has one operand


# Ragged products: the same op with this device's own group sizes.
#
# A device that holds rows 8..11 of groups of 3, 7 and 6 rows has 0, 2 and 2 rows of them. One that
# holds the second of three groups alone computes groups of 3, 7 and 6 rows too, but multiplies the
# outer two by zeros, so that its term of the sum is zero there.


@local("chlo.ragged_dot")
def _ragged_dot(op: LocalOp) -> tuple[Value, ...]:
    b, dims = op.b, RaggedDims.of(op.op.kind)
    lhs, rhs = (op.masked(i) for i in range(2))
    sizes = op.operands[2]
    rows = op.dim(0, dims.ragged)
    groups = op.dim(1, dims.group).axes if dims.group is not None else ()
    if not rows.axes and not groups:
        return op.emit([lhs, rhs, sizes])
    # Where each group ends: the sums of all sizes up to and with its own.
    square = b.types[sizes].with_shape((*b.types[sizes].shape, b.types[sizes].shape[-1]))
    rank = square.rank
    spread = b.broadcast(sizes, square.shape, (*range(rank - 2), rank - 1))
    counts = [b.iota(TensorType(square.shape, "i32"), d) for d in (rank - 1, rank - 2)]
    masked = b.select(b.compare("LE", *counts), spread, b.splat(0, square))
    ends = b.reduce("add", masked, (rank - 1,))
    count = b.types[lhs].shape[dims.ragged]
    type_, last = b.types[ends], b.types[ends].rank - 1
    if rows.axes:  # counted from this device's first row, within its rows
        first = b.broadcast(b.convert(rows.start(b), type_.dtype), type_.shape)
        low, high = b.splat(0, type_), b.splat(count, type_)
        inside = b.binary("minimum", b.binary("maximum", ends, first), b.binary("add", first, high))
        ends = b.binary("maximum", b.binary("subtract", inside, first), low)
    before = b.slice_dim(ends, last, 0, type_.shape[-1] - 1)
    starts = b.concatenate([b.splat(0, type_.with_dim(last, 1)), before], last)
    if not groups or dims.group is None:
        return op.emit([lhs, rhs, b.binary("subtract", ends, starts)])
    # Groups of padding get the bounds 0.
    starts, ends = (own_piece(b, bounds, last, groups, op.mesh) for bounds in (starts, ends))
    # Rows before this device's groups, in each of them, and after them: the right operand gets a
    # group of zeros before and after its own.
    before, own = b.slice_dim(starts, last, 0, 1), b.binary("subtract", ends, starts)
    total = b.reshape(b.reduce("add", own, (last,)), b.types[before].shape)
    done = b.binary("add", before, total)
    after = b.binary("subtract", b.splat(count, b.types[done]), done)
    zero = b.splat(0, b.types[rhs].with_shape(()))
    own = b.concatenate([before, own, after], last)
    return op.emit([lhs, b.pad_dim(rhs, dims.group, 1, 1, zero), own])


# What is merged.


def merged_dims(op: LocalOp) -> tuple[int, ...]:
    """Returns the split dims of the first operand that have a `merge` factor, ascending."""
    kinds = [op.rule.factors[dim[0]].kind for dim in op.rule.operands[0]]
    return tuple(d for d, kind in enumerate(kinds) if kind == MERGE and op.dim(0, d).axes)


def _gathered(op: LocalOp, x: Value, dim: int) -> Value:
    with op.b.noted(f"what each piece of dim {dim} found, for {op.op.name}"):
        return gather_dim(op.b, x, dim, op.dim(0, dim).axes, op.mesh)


# Reductions by any body.


def reduce_merged(op: LocalOp) -> tuple[Value, ...]:
    """Reduces each piece, gathers the partial results, and reduces them by the same body, in order.

    before: `%1 = reduce %0` over a split dim
    after:  `%1 = reduce %0; %2 = all_gather %1; %3 = reduce %2`

    Of several split dims the innermost goes first: so terms stay in the order of their indices,
    which a body may rely on. Padding becomes the initial value, which changes nothing.
    """
    b, count = op.b, len(op.operands) // 2
    xs, inits = op.operands[:count], op.operands[count:]
    split = merged_dims(op)
    shape = b.types[xs[0]].shape
    xs = tuple(
        op.masked(i, partial(b.broadcast, init, shape), split) for i, init in enumerate(inits)
    )

    def reduced(xs: Sequence[Value], dims: Sequence[int]) -> tuple[Value, ...]:
        kept = tuple(n for d, n in enumerate(b.types[xs[0]].shape) if d not in dims)
        types = [b.types[x].with_shape(kept) for x in xs]
        return b.op(op.op.name, (*xs, *inits), types, {**op.attrs, "dimensions": tuple(dims)})

    left = tuple(sorted(op.attrs["dimensions"]))
    for d in reversed(split):
        found = reduced(xs, [r for r in left if r >= d])
        kept = b.types[found[0]].shape
        rows = [b.reshape(x, (*kept[:d], 1, *kept[d:])) for x in found]
        xs = tuple(_gathered(op, row, d) for row in rows)
        left = (*(r for r in left if r < d), d)
    return reduced(xs, left)


# The largest elements.


@local("chlo.top_k")
def _top_k(op: LocalOp) -> tuple[Value, ...]:
    """Finds the k largest of each piece, gathers them, and finds the k largest of these.

    before: `%1, %2 = top_k %0` along a split dim
    after:  `%1, %2 = top_k %0; %3 = all_gather %1; %4 = all_gather (%2 + start of the piece)`
            `%5, %6 = top_k %3; %7 = %4[%6]`

    Gathered elements are in the order of their pieces, so that of equal ones the first wins.
    """
    split = merged_dims(op)
    if not split:
        return op.emit()
    b, (dim,), k = op.b, split, op.op.kind.results[0].shape[-1]
    dtype, count = op.op.kind.operands[0].dtype, min(k, b.types[op.operands[0]].shape[dim])
    last = identity_element("max", dtype)  # what it puts last: of floats the NaN of all bits set
    if is_float(dtype):
        element = numpy_dtype(dtype)
        last = np.frombuffer(b"\xff" * element.itemsize, element).reshape(())
    x = op.masked(0, last, split)
    values, places = _top(op, x, count)
    start = b.convert(op.dim(0, dim).start(b), b.types[places].dtype)
    places = b.binary("add", places, b.broadcast(start, b.types[places].shape))
    # 5 elements over {2, 2} lie as 0 1 | 2 . | 3 4 | . . With two candidates from each piece, those
    # [0, 3) and [4, 6) of the gathered eight exist. The others are the least element there is, but
    # would still win against an equal one behind them.
    runs: list[tuple[int, int]] = []
    for i, (_, own) in enumerate(tiles(op.dim(0, dim).size, op.dim(0, dim).axes, op.mesh)):
        begin, stop = i * count, i * count + min(count, own)
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        if begin < stop:
            runs.append((begin, stop))
    gathered = [_gathered(op, v, dim) for v in (values, places)]
    found = [b.concatenate([b.slice_dim(x, dim, *run) for run in runs], dim) for x in gathered]
    best, positions = _top(op, found[0], k)
    type_, batch = b.types[found[1]], tuple(range(dim))
    dims = GatherDims(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
        start_index_map=(dim,),
        index_vector_dim=dim + 1,
    )
    attrs = {"dimension_numbers": dims, "slice_sizes": (1,) * type_.rank}
    result = type_.with_shape(b.types[positions].shape)
    return best, b.op("stablehlo.gather", (found[1], positions), (result,), attrs)[0]


def _top(op: LocalOp, x: Value, k: int) -> tuple[Value, Value]:
    b, type_ = op.b, op.b.types[x]
    shape = (*type_.shape[:-1], k)
    indices = op.op.kind.results[1].with_shape(shape)
    attrs = {**op.attrs, "k": k}
    values, places = b.op(op.op.name, (x,), (type_.with_shape(shape), indices), attrs)
    return values, places


# Sort.


@local("stablehlo.sort")
def _sort(op: LocalOp) -> tuple[Value, ...]:
    """Sorts each piece, then merges pairs of pieces in the rounds of a sorting network.

    before: `%1 = sort %0` along a split dim
    after:  `%1 = sort %0`; then for each round `%2 = collective_permute %1;
            %3 = sort (select (%1 before reverse %2), %1, reverse %2)`

    For sorted A and B of n elements each, the n of both that sort first are the first ones of the
    pairs (A[i], B[n - 1 - i]) (Batcher 1968, "Sorting networks and their applications"). The global
    position of each element is sorted along, which makes the sort stable and puts padding last.
    """
    split = merged_dims(op)
    if not split:
        return op.emit()
    # Positions in the whole dim are sorted along; those of padding lie behind all of it. No two are
    # equal, not even of padding: ties would let a network lose one and double another.
    b, dim, shape = op.b, op.dim(0, split[0]), op.b.types[op.operands[0]].shape
    piece, owned = dim.pieces[-1], tiles(dim.size, dim.axes, dim.mesh)
    count = b.iota(TensorType(shape, "i32"), dim.dim)
    place = b.binary("add", count, b.broadcast(dim.start(b), shape))
    if not dim.is_even:
        behind = [dim.size + i * piece for i in range(op.mesh.extent(dim.axes))]
        padding = b.binary("add", count, b.broadcast(per_device(b, dim.axes, behind), shape))
        exists = b.broadcast(dim.own_count(b), shape)
        place = b.select(b.compare("LT", count, exists), place, padding)
    xs = _ordered(op, (*op.operands, place))
    with b.noted(f"pieces of dim {dim.dim} meet to be merged by {op.op.name}"):
        for pairs in rounds(op.mesh.extent(dim.axes)):
            xs = _ordered(op, _met(op, xs, dim, pairs))
        if all(start == i * piece for i, (start, own) in enumerate(owned) if own):
            return xs[:-1]
        # From the network's pieces, all full but the last ones, to the dim's own. 5 elements over
        # {2, 2}: the network leaves 0 1 | 2 3 | 4 . | . ., the dim has 0 1 | 2 . | 3 4 | . .
        padded = dim._replace(size=piece * len(owned))
        need = Need.of(padded.size, piece, [(start, start, start + own) for start, own in owned])
        return tuple(fetch(b, x, padded, need, dim.axes) for x in xs[:-1])


def _ordered(op: LocalOp, xs: Sequence[Value]) -> tuple[Value, ...]:
    """Sorts each device's own elements of `xs` together; ties by position, which `xs[-1]` has."""
    b = op.b
    scalars = [TensorType((), b.types[x].dtype) for x in xs]
    inner = Builder()
    args = [inner.value(scalar) for scalar in scalars for _ in range(2)]
    inner.begin()
    first = _comes_first(inner, op, args[::2], args[1::2], ())
    body = Body(tuple(inner.types), inner.end(args, (first,)))
    attrs = {**op.attrs, "is_stable": False, "body": body}
    return b.op(op.op.name, xs, [b.types[x] for x in xs], attrs)


def _comes_first(
    b: Builder, op: LocalOp, left: Sequence[Value], right: Sequence[Value], shape: tuple[int, ...]
) -> Value:
    """Returns flags of `shape`: is `left` first? The last values, positions, decide ties."""
    *xs, i = left
    *ys, j = right
    (before,), (after,) = (  # a comparator's arguments are the left and right of each operand
        inline_elementwise(b, op.attrs["body"], [v for pair in pairs for v in pair], shape)
        for pairs in (zip(xs, ys, strict=True), zip(ys, xs, strict=True))
    )
    earlier = b.compare("LT", i, j)
    ordered = b.binary("or", before, b.binary("and", b.unary("not", after), earlier))
    size = op.op.kind.operands[0].shape[op.attrs["dimension"]]
    last = b.splat(size, TensorType(shape, "i32"))
    is_padding = b.compare("GE", b.binary("maximum", i, j), last)
    return b.select(is_padding, earlier, ordered)


def _met(
    op: LocalOp, xs: Sequence[Value], dim: Split, pairs: Sequence[tuple[int, int]]
) -> tuple[Value, ...]:
    """Exchanges pieces of tiles in `pairs` (low, high); low keeps what sorts first, unsorted."""
    # 1 4 6 meets 2 3 9. With the partner's reversed, pairs are (1, 9) (4, 3) (6, 2):
    #   the lower tile keeps the first of each pair, 1 3 2: the three smallest, still to be sorted
    #   the higher one sees (2, 6) (3, 4) (9, 1) and keeps the last of each, 6 4 9
    # Both compare the same pairs, so nothing is kept twice or lost. A tile without a partner in
    # this round receives zeros, and keeps its own (`idle`).
    b, mesh, axes = op.b, op.mesh, dim.axes
    both = (*pairs, *((high, low) for low, high in pairs))
    sent = tuple(sorted((group[i], group[j]) for group in mesh.groups(axes) for i, j in both))
    theirs = []
    for x in xs:
        got = b.collective("collective_permute", x, b.types[x], axes, pairs=sent)
        theirs.append(
            b.op("stablehlo.reverse", (got,), (b.types[x],), {"dimensions": (dim.dim,)})[0]
        )
    shape = b.types[xs[0]].shape
    first = _comes_first(b, op, xs, theirs, shape)
    lows, highs = {low for low, _ in pairs}, {high for _, high in pairs}
    every = range(mesh.extent(axes))
    kept = b.binary("xor", first, _flag(b, axes, [i in highs for i in every], shape))
    if len(lows) + len(highs) < len(every):
        idle = _flag(b, axes, [i not in lows and i not in highs for i in every], shape)
        kept = b.binary("or", kept, idle)
    return tuple(b.select(kept, x, y) for x, y in zip(xs, theirs, strict=True))


def _flag(b: Builder, axes: Axes, flags: Sequence[bool], shape: tuple[int, ...]) -> Value:
    number = per_device(b, axes, [int(flag) for flag in flags])
    return b.broadcast(b.compare("NE", number, b.constant(0, "i32")), shape)
