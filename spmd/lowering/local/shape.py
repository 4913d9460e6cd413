"""Local lowerings of ops that make, move, cut or join elements."""

from __future__ import annotations

from spmd.ir.program import Value
from spmd.ir.types import Dense
from spmd.lowering.local.padding import cut, start_of
from spmd.lowering.local.table import LocalOp, local


@local("stablehlo.constant")
def _constant(op: LocalOp) -> tuple[Value, ...]:
    """A smaller splat, or this device's slice of the elements."""
    dense: Dense = op.attrs["value"]
    type_ = op.result_types()[0]
    if dense.splat:
        return op.b.op(op.op.name, (), (type_,), {"value": Dense(type_, dense.data, True)})
    piece = op.b.constant(dense.array(), dense.type.dtype)
    for dim, axes in enumerate(op.choice.results[0].dims):
        if axes:
            piece = cut(op.b, piece, dim, axes, op.mesh)
            shape = op.b.types[piece].shape
            kept = type_.with_shape((*shape[:dim], type_.shape[dim], *shape[dim + 1 :]))
            attrs = {"axes": axes, "dim": dim}
            (piece,) = op.b.op("spmd.local_slice", (piece,), (kept,), attrs)
    return (piece,)


@local("stablehlo.iota")
def _iota(op: LocalOp) -> tuple[Value, ...]:
    """A local iota plus where this device's piece starts."""
    type_ = op.result_types()[0]
    dim = op.attrs["iota_dimension"]
    (count,) = op.emit()
    axes = op.choice.results[0].dims[dim]
    if not axes:
        return (count,)
    size = op.op.kind.results[0].shape[dim]
    start = op.b.convert(start_of(op.b, size, axes, op.mesh), type_.dtype)
    return (op.b.binary("add", count, op.b.broadcast(start, type_.shape)),)
