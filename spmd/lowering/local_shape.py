"""Local lowerings of ops that make, move, cut or join elements."""

from __future__ import annotations

from spmd.ir.program import Value
from spmd.ir.types import Dense
from spmd.lowering.local import LocalOp, local, offset, same_op

local(
    "stablehlo.broadcast_in_dim",
    "stablehlo.transpose",
    "stablehlo.reshape",
    "stablehlo.bitcast_convert",
    "stablehlo.reverse",
    "stablehlo.pad",
    "stablehlo.concatenate",
    "stablehlo.dynamic_update_slice",
)(same_op)


@local("stablehlo.constant")
def _constant(op: LocalOp) -> tuple[Value, ...]:
    """A smaller splat, or this device's slice of the elements."""
    dense: Dense = op.attrs["value"]
    type_ = op.result_types()[0]
    if dense.splat:
        return op.b.op(op.op.name, (), (type_,), {"value": Dense(type_, dense.data, True)})
    whole = op.b.constant(dense.array(), dense.type.dtype)
    if type_ == dense.type:
        return (whole,)
    starts = [
        offset(op.b, axes, piece)
        for axes, piece in zip(op.choice.results[0].dims, type_.shape, strict=True)
    ]
    return (op.b.dynamic_slice(whole, starts, type_.shape),)


@local("stablehlo.iota")
def _iota(op: LocalOp) -> tuple[Value, ...]:
    """A local iota plus where this device's piece starts."""
    type_ = op.result_types()[0]
    dim = op.attrs["iota_dimension"]
    (count,) = op.emit()
    axes = op.choice.results[0].dims[dim]
    if not axes:
        return (count,)
    start = op.b.convert(offset(op.b, axes, type_.shape[dim]), type_.dtype)
    return (op.b.binary("add", count, op.b.broadcast(start, type_.shape)),)


@local("stablehlo.slice")
def _slice(op: LocalOp) -> tuple[Value, ...]:
    """Dims taken whole are taken whole locally; the others are not split."""
    local_operand = op.b.types[op.operands[0]].shape
    limits = tuple(
        piece if axes else limit
        for piece, axes, limit in zip(
            local_operand, op.choice.operands[0].dims, op.attrs["limit_indices"], strict=True
        )
    )
    return op.emit(limit_indices=limits)


@local("stablehlo.dynamic_slice")
def _dynamic_slice(op: LocalOp) -> tuple[Value, ...]:
    """Dims taken whole are taken whole locally: their start is clamped to 0 either way."""
    return op.emit(slice_sizes=op.result_types()[0].shape)
