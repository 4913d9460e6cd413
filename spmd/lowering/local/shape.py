"""Local lowerings of ops that make, cut or join elements: constants, slices, concatenations, ..."""

from __future__ import annotations

from spmd.ir.dialect.halo import Window, reads_of
from spmd.ir.dialect.rule import REDUCE, WINDOW
from spmd.ir.program import Value
from spmd.ir.types import Dense
from spmd.lowering.local.dynamic_slice import pick
from spmd.lowering.local.fetch import Split, assemble, parts_of
from spmd.lowering.local.neighbours import Dims, base_of, note_of, read
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
            kept = op.b.types[piece].with_dim(dim, type_.shape[dim])
            piece = op.b.local_slice(piece, kept, axes, dim)
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


# ---------------------------------------------------------------------------------------------
# Ops that move elements. Each fetches what its piece of the result reads, then is the op itself
# without padding along the split dims.


@local("stablehlo.slice")
def _slice(op: LocalOp) -> tuple[Value, ...]:
    """Elements that a piece takes lie next to each other, `stride` apart."""
    b, (x,), dims = op.b, op.operands, Dims(op)
    result = op.result_types()[0].shape
    starts, limits = list(op.attrs["start_indices"]), list(op.attrs["limit_indices"])
    strides = list(op.attrs["strides"])
    for d, size in enumerate(op.op.kind.operands[0].shape):
        axes = op.choice.operands[0].dims[d]
        if not axes:
            continue
        if dims.split(d, REDUCE, of_result=False):
            start = b.constant(starts[d], "i32")
            x = pick(op, x, d, size, axes, start, 1)
        elif dims.split(d, WINDOW):
            window = Window(op.op.kind.results[0].shape[d], strides[d], -starts[d])
            x, _ = read(op, 0, x, d, window, axes, None)
        if not dims.split(d, WINDOW):
            strides[d] = 1
        starts[d], limits[d] = 0, (result[d] - 1) * strides[d] + 1
    names = ("start_indices", "limit_indices", "strides")
    return op.emit([x], **dict(zip(names, map(tuple, (starts, limits, strides)), strict=True)))


@local("stablehlo.reverse")
def _reverse(op: LocalOp) -> tuple[Value, ...]:
    """The tile at the other end, reversed."""
    (x,), dims = op.operands, Dims(op)
    for d in op.attrs["dimensions"]:
        axes = dims.split(d, WINDOW)
        if axes:
            window = Window(op.op.kind.results[0].shape[d], reverse=True)
            x, _ = read(op, 0, x, d, window, axes, None)
    return op.emit([x])


@local("stablehlo.pad")
def _pad(op: LocalOp) -> tuple[Value, ...]:
    """Fetches the elements that a piece reads, with padding for those beyond the operand's ends."""
    (x, fill), dims = op.operands, Dims(op)
    amounts = {
        name: list(op.attrs[name])
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    }
    low, high, interior = amounts.values()
    for d, size in enumerate(op.op.kind.results[0].shape):
        axes = dims.split(d, WINDOW)
        if axes:
            window = Window(size, 1, low[d], interior[d] + 1)
            x, low[d], high[d], dilation = base_of(op, 0, x, d, window, axes, fill)
            interior[d] = dilation - 1
    return op.emit([x, fill], **{name: tuple(amount) for name, amount in amounts.items()})


@local("stablehlo.concatenate")
def _concatenate(op: LocalOp) -> tuple[Value, ...]:
    """Each device joins the elements of all operands that fall into its piece."""
    b, along = op.b, op.attrs["dimension"]
    axes = op.choice.results[0].dims[along]
    if not axes or len(op.operands) == 1:
        return op.emit()
    total = op.op.kind.results[0].shape[along]
    parts, start = [], 0
    for i, x in enumerate(op.operands):
        size = op.op.kind.operands[i].shape[along]
        if size:
            need = reads_of(Window(total, 1, start), size, axes, op.mesh).need
            source = op.choice.operands[i].dims[along]
            with b.noted(note_of(op, i, along)):
                parts += parts_of(b, x, Split(along, size, source, op.mesh), need)
        start += size
    return (assemble(b, parts, along, axes, op.result_types()[0]),)
