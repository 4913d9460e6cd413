"""Local lowerings of ops that make, cut or join elements: constants, slices, concatenations, ..."""

from __future__ import annotations

from spmd.ir.dialect.halo import reads_of
from spmd.ir.program import Value
from spmd.ir.types import Dense
from spmd.lowering.local.dynamic_slice import pick
from spmd.lowering.local.fetch import Range, parts_of
from spmd.lowering.local.neighbours import base_of, note_of, read_around
from spmd.lowering.local.padding import Split, own_piece, start_of
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
            piece = own_piece(op.b, piece, dim, axes, op.mesh)
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
    split = Split(dim, op.op.kind.results[0].shape[dim], axes, op.mesh)
    start = op.b.convert(start_of(op.b, split), type_.dtype)
    return (op.b.binary("add", count, op.b.broadcast(start, type_.shape)),)


# ---------------------------------------------------------------------------------------------
# Ops that move elements. Each fetches what its piece of the result reads, then is the op itself
# without padding along the split dims.


@local("stablehlo.slice")
def _slice(op: LocalOp) -> tuple[Value, ...]:
    """Elements that a piece takes lie next to each other, `stride` apart."""
    x, result, windows = op.operands[0], op.result_types()[0].shape, op.reads(0)
    names = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (list(op.attrs[name]) for name in names)
    for d, axes in enumerate(op.choice.operands[0].dims):
        if not axes:
            continue
        if d in op.reduced_dims(0):
            x = pick(op.b, x, op.dim(0, d), op.b.constant(starts[d], "i32"), 1)
        if d not in windows:
            strides[d] = 1
        starts[d], limits[d] = 0, (result[d] - 1) * strides[d] + 1
    x = read_around(op, x)
    return op.emit([x], **dict(zip(names, map(tuple, (starts, limits, strides)), strict=True)))


@local("stablehlo.reverse")
def _reverse(op: LocalOp) -> tuple[Value, ...]:
    """The tile at the other end, reversed."""
    return op.emit([read_around(op, op.operands[0])])


@local("stablehlo.pad")
def _pad(op: LocalOp) -> tuple[Value, ...]:
    """Fetches the elements that a piece reads, with padding for those beyond the operand's ends."""
    x, fill = op.operands
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, interior = (list(op.attrs[name]) for name in names)
    for d, read in op.reads(0).items():
        x, low[d], high[d], dilation = base_of(op, 0, x, d, *read, fill)
        interior[d] = dilation - 1
    return op.emit([x, fill], **dict(zip(names, map(tuple, (low, high, interior)), strict=True)))


@local("stablehlo.concatenate")
def _concatenate(op: LocalOp) -> tuple[Value, ...]:
    """Each device joins the elements of all operands that fall into its piece."""
    b, along = op.b, op.attrs["dimension"]
    axes = op.choice.results[0].dims[along]
    if not axes or len(op.operands) == 1:
        return op.emit()
    parts = []
    for i, x in enumerate(op.operands):
        for _, window in op.reads(i).values():
            split = op.dim(i, along)
            with b.noted(note_of(op, i, along)):
                parts += parts_of(b, x, split, reads_of(window, split.size, axes, op.mesh).need)
    return (Range(b, along, axes).assembled(parts, op.result_types()[0]),)
