"""Local lowerings of contractions: local sums, partial over the atoms that split what is summed."""

from __future__ import annotations

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.contract import RaggedDims
from spmd.ir.dialect.reducers import NEUTRAL, REDUCER_OPS, identity_element
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.lowering.local.dims import own_piece, start_of
from spmd.lowering.local.merge import merged_dims, reduce_merged
from spmd.lowering.local.table import LocalOp, local
from spmd.propagation.projection import reduced_axes


@local("stablehlo.dot_general")
def _dot_general(op: LocalOp) -> tuple[Value, ...]:
    """A local product; padding along contracted dims is zero on both sides (it may be NaN)."""
    return op.emit([op.masked(i, 0) for i in range(2)])


@local("stablehlo.reduce")
def _reduce(op: LocalOp) -> tuple[Value, ...]:
    """The initial value joins in after the local sum, and only on the first device along the split.

    After, because XLA forgets the initial value of a reduction over dims of size 1, and a local
    piece has such dims where the global value has none.
    """
    if merged_dims(op):
        return reduce_merged(op)
    axes = reduced_axes(op.rule, op.choice.assignment)
    if not axes:
        return op.emit()
    b, reducer = op.b, op.attrs["reducer"]
    _, init = op.operands  # a body that is one known op has one operand
    dtype = b.types[init].dtype
    element = identity_element(reducer, dtype)
    x = op.masked(0, element)
    if op.attrs.get(NEUTRAL):
        return op.emit([x, init])
    (terms,) = op.emit([x, b.constant(element, dtype)])
    spread = b.broadcast(op.once(init, axes, reducer), b.types[terms].shape)
    return (b.binary(REDUCER_OPS[reducer].removeprefix("stablehlo."), terms, spread),)


# ---------------------------------------------------------------------------------------------
# Ragged products: the same op with this device's own group sizes.
#
# A device that holds rows 8..11 of groups of 3, 7 and 6 rows has 0, 2 and 2 rows of them. One that
# holds the second of three groups alone computes groups of 3, 7 and 6 rows too, but multiplies the
# outer two by zeros, so that its term of the sum is zero there.


@local("chlo.ragged_dot")
def _ragged_dot(op: LocalOp) -> tuple[Value, ...]:
    b, dims = op.b, RaggedDims.of(op.op.kind)
    lhs, rhs = (op.masked(i, 0) for i in range(2))
    sizes = op.operands[2]
    rows = op.dim(0, dims.ragged)
    groups = op.dim(1, dims.group).axes if dims.group is not None else ()
    if not rows.axes and not groups:
        return op.emit([lhs, rhs, sizes])
    count = b.types[lhs].shape[dims.ragged]
    ends = _running_sum(b, sizes)
    type_, last = b.types[ends], b.types[ends].rank - 1
    if rows.axes:  # counted from this device's first row, within its rows
        first = b.broadcast(b.convert(start_of(b, rows), type_.dtype), type_.shape)
        low, high = b.splat(0, type_), b.splat(count, type_)
        inside = b.binary("minimum", b.binary("maximum", ends, first), b.binary("add", first, high))
        ends = b.binary("maximum", b.binary("subtract", inside, first), low)
    before = b.slice_dim(ends, last, 0, type_.shape[-1] - 1)
    starts = b.concatenate([b.splat(0, type_.with_dim(last, 1)), before], last)
    if not groups or dims.group is None:
        return op.emit([lhs, rhs, b.binary("subtract", ends, starts)])
    # Groups of padding get the bounds 0.
    starts, ends = (own_piece(b, bounds, last, groups, op.mesh) for bounds in (starts, ends))
    own = _own_groups(b, starts, ends, count)
    # The right operand gets a group of zeros before and after its own.
    zero = b.splat(0, b.types[rhs].with_shape(()))
    return op.emit([lhs, b.pad_dim(rhs, dims.group, 1, 1, zero), own])


def _running_sum(b: Builder, sizes: Value) -> Value:
    """Where each group ends: the sums of all sizes up to and with its own."""
    type_ = b.types[sizes]
    groups = type_.shape[-1]
    square = type_.with_shape((*type_.shape, groups))
    rank = square.rank
    spread = b.broadcast(sizes, square.shape, (*range(rank - 2), rank - 1))
    counts = [b.iota(TensorType(square.shape, "i32"), d) for d in (rank - 1, rank - 2)]
    masked = b.select(b.compare("LE", *counts), spread, b.splat(0, square))
    return b.reduce("add", masked, (rank - 1,))


def _own_groups(b: Builder, starts: Value, ends: Value, count: int) -> Value:
    """Rows before this device's groups, in each of them, and after them."""
    last = b.types[starts].rank - 1
    before = b.slice_dim(starts, last, 0, 1)
    sizes = b.binary("subtract", ends, starts)
    total = b.reshape(b.reduce("add", sizes, (last,)), b.types[before].shape)
    done = b.binary("add", before, total)
    after = b.binary("subtract", b.splat(count, b.types[done]), done)
    return b.concatenate([before, sizes, after], last)
