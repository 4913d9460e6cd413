"""The local lowering of `ragged_dot`: the same op with this device's own group sizes.

A device that holds rows 8..11 of groups of 3, 7 and 6 rows has 0, 2 and 2 rows of them. One that
holds the second of three groups alone computes groups of 3, 7 and 6 rows too, the outer two
against zeros, so that its term of the sum is zero there.
"""

from __future__ import annotations

from spmd.ir.builder import Builder, identity_element, reducer_body
from spmd.ir.dialect.ragged import RaggedDims
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.lowering.local.padding import cut, start_of
from spmd.lowering.local.table import LocalOp, local
from spmd.mesh.sharding import Axes


@local("chlo.ragged_dot")
def _ragged_dot(op: LocalOp) -> tuple[Value, ...]:
    b, dims = op.b, RaggedDims.of(op.op.kind)
    lhs, rhs = (op.masked(i, 0, op.reduced_dims(i)) for i in range(2))
    sizes = op.operands[2]
    rows = op.split(op.rule.operands[0], dims.ragged)
    groups = op.split(op.rule.operands[1], dims.group) if dims.group is not None else ()
    if not rows and not groups:
        return op.emit([lhs, rhs, sizes])
    count = b.types[lhs].shape[dims.ragged]
    ends = _running_sum(b, sizes)
    if rows:
        start = start_of(b, op.op.kind.operands[0].shape[dims.ragged], rows, op.mesh)
        ends = _clip(b, ends, start, count)
    starts = _shifted(b, ends)
    if not groups or dims.group is None:
        return op.emit([lhs, rhs, b.binary("subtract", ends, starts)])
    own = _own_groups(b, _piece(op, starts, groups), _piece(op, ends, groups), count)
    return op.emit([lhs, _between_zeros(b, rhs, dims.group), own])


def _running_sum(b: Builder, sizes: Value) -> Value:
    """Where each group ends: the sums of all sizes up to and with its own."""
    type_ = b.types[sizes]
    groups = type_.shape[-1]
    square = type_.with_shape((*type_.shape, groups))
    rank = square.rank
    spread = b.broadcast(sizes, square.shape, (*range(rank - 2), rank - 1))
    counts = [b.iota(TensorType(square.shape, "i32"), d) for d in (rank - 1, rank - 2)]
    masked = b.select(b.compare("LE", *counts), spread, b.splat(0, square))
    return _sum(b, masked, rank - 1)


def _sum(b: Builder, x: Value, dim: int) -> Value:
    type_ = b.types[x]
    result = type_.with_shape(type_.shape[:dim] + type_.shape[dim + 1 :])
    attrs = {"dimensions": (dim,), "body": reducer_body("add", type_.dtype), "reducer": "add"}
    zero = b.constant(identity_element("add", type_.dtype), type_.dtype)
    return b.op("stablehlo.reduce", (x, zero), (result,), attrs)[0]


def _clip(b: Builder, ends: Value, start: Value, count: int) -> Value:
    """Ends counted from a device's first row, within its rows."""
    type_ = b.types[ends]
    first = b.broadcast(b.convert(start, type_.dtype), type_.shape)
    low, high = b.splat(0, type_), b.splat(count, type_)
    inside = b.binary("minimum", b.binary("maximum", ends, first), b.binary("add", first, high))
    return b.binary("maximum", b.binary("subtract", inside, first), low)


def _shifted(b: Builder, ends: Value) -> Value:
    """Where each group starts: where the one before it ends."""
    shape = b.types[ends].shape
    before = _slice_last(b, ends, 0, shape[-1] - 1)
    zero = b.splat(0, b.types[ends].with_shape((*shape[:-1], 1)))
    return _join_last(b, [zero, before])


def _piece(op: LocalOp, bounds: Value, groups: Axes) -> Value:
    """Bounds of this device's groups; those of padding are 0."""
    b = op.b
    last = b.types[bounds].rank - 1
    whole = cut(b, bounds, last, groups, op.mesh)
    shape = b.types[whole].shape
    type_ = b.types[bounds].with_shape((*shape[:-1], shape[-1] // op.mesh.extent(groups)))
    return b.op("spmd.local_slice", (whole,), (type_,), {"axes": groups, "dim": last})[0]


def _own_groups(b: Builder, starts: Value, ends: Value, count: int) -> Value:
    """Rows before this device's groups, in each of them, and after them."""
    before = _slice_last(b, starts, 0, 1)
    sizes = b.binary("subtract", ends, starts)
    total = b.reshape(_sum(b, sizes, b.types[sizes].rank - 1), b.types[before].shape)
    done = b.binary("add", before, total)
    after = b.binary("subtract", b.splat(count, b.types[done]), done)
    return _join_last(b, [before, sizes, after])


def _between_zeros(b: Builder, rhs: Value, dim: int) -> Value:
    """The right operand with a group of zeros before and after its own."""
    type_ = b.types[rhs]
    one = tuple(int(d == dim) for d in range(type_.rank))
    shape = tuple(n + 2 * extra for n, extra in zip(type_.shape, one, strict=True))
    attrs = {
        "edge_padding_low": one,
        "edge_padding_high": one,
        "interior_padding": (0,) * type_.rank,
    }
    zero = b.constant(identity_element("add", type_.dtype), type_.dtype)
    return b.op("stablehlo.pad", (rhs, zero), (type_.with_shape(shape),), attrs)[0]


def _slice_last(b: Builder, x: Value, start: int, limit: int) -> Value:
    type_ = b.types[x]
    last = type_.rank - 1
    attrs = {
        "start_indices": (*(0,) * last, start),
        "limit_indices": (*type_.shape[:-1], limit),
        "strides": (1,) * type_.rank,
    }
    shape = (*type_.shape[:-1], limit - start)
    return b.op("stablehlo.slice", (x,), (type_.with_shape(shape),), attrs)[0]


def _join_last(b: Builder, parts: list[Value]) -> Value:
    types = [b.types[v] for v in parts]
    shape = (*types[0].shape[:-1], sum(t.shape[-1] for t in types))
    attrs = {"dimension": types[0].rank - 1}
    return b.op("stablehlo.concatenate", parts, (types[0].with_shape(shape),), attrs)[0]
