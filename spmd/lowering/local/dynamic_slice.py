"""Local lowerings of slices whose starts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.lowering.expand import clamped_index
from spmd.lowering.local.dims import dynamic_take_dim
from spmd.lowering.local.padding import Split, own_count, start_of
from spmd.lowering.local.table import LocalOp, local


def pick(b: Builder, x: Value, split: Split, start: Value, length: int) -> Value:
    """The elements `[start, start + length)` of a split dim that this device holds, else zeros.

    Args:
      b: the builder that ops are appended to.
      x: the local tile.
      split: the dim.
      start: an i32 scalar such that the range exists.
      length: how many elements.
    """
    dim = split.dim
    have = b.types[x].shape[dim]
    width = min(have, length)
    here = b.binary("subtract", start, start_of(b, split))
    at = clamped_index(b, here, have - width)
    x = dynamic_take_dim(b, x, dim, at, width)
    x = _shifted(b, x, dim, b.binary("subtract", here, at), length)
    inside = _within(b, length, here, own_count(b, split))
    return b.select(b.broadcast(inside, b.types[x].shape, (dim,)), x, b.splat(0, b.types[x]))


def _shifted(b: Builder, x: Value, dim: int, by: Value, length: int) -> Value:
    """`length` elements of a dim from position `by` on, with zeros where that is out of range."""
    have = b.types[x].shape[dim]
    if have == 1 and length == 1:
        return x
    x = b.pad_dim(x, dim, length, length, b.splat(0, b.types[x].with_shape(())))
    start = b.binary("add", by, b.constant(length, "i32"))
    return dynamic_take_dim(b, x, dim, clamped_index(b, start, have + length), length)


def _within(b: Builder, length: int, first: Value, count: Value) -> Value:
    """Which of the positions `first + [0, length)` are in `[0, count)`."""
    line = TensorType((length,), "i32")
    position = b.binary("add", b.iota(line, 0), b.broadcast(first, line.shape))
    return b.binary(
        "and",
        b.compare("GE", position, b.splat(0, line)),
        b.compare("LT", position, b.broadcast(count, line.shape)),
    )


def _global_starts(op: LocalOp, starts: Sequence[Value], sizes: Sequence[int]) -> list[Value]:
    """Starts as the specification means them: clamped to where a slice of the sizes fits."""
    b = op.b
    return [
        b.convert(clamped_index(b, start, whole - size), "i32")
        for start, whole, size in zip(starts, op.op.kind.operands[0].shape, sizes, strict=True)
    ]


def _cut_dims(op: LocalOp, sizes: Sequence[int]) -> list[int]:
    """Dims of the first operand that are split, and of which a slice of the sizes is a part."""
    dims = (op.dim(0, d) for d in range(len(sizes)))
    return [d.dim for d in dims if d.axes and sizes[d.dim] < d.size]


@local("stablehlo.dynamic_slice")
def _dynamic_slice(op: LocalOp) -> tuple[Value, ...]:
    """Dims taken whole are taken whole locally, from 0: any other start is clamped to that.

    Written as 0, because XLA adds it to the start of another slice before it clamps.
    """
    b, (x, *starts), wanted = op.b, op.operands, op.attrs["slice_sizes"]
    split = _cut_dims(op, wanted)
    if split:
        starts = _global_starts(op, starts, wanted)
        for d in split:
            x = pick(b, x, op.dim(0, d), starts[d], wanted[d])
    sizes = op.result_types()[0].shape
    starts = [
        b.constant(0, b.types[start].dtype) if size == whole else start
        for start, size, whole in zip(starts, sizes, b.types[x].shape, strict=True)
    ]
    return op.emit([x, *starts], slice_sizes=sizes)


@local("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(op: LocalOp) -> tuple[Value, ...]:
    """Each device overwrites a window of its piece, with what is there outside of the update.

    So no more is read and written than the update is large, and it can be done in place.
    """
    # An update of 3 at 3 reaches into the tile [4, 8) with its last two elements:
    #   here = 3 - 4 = -1     clamped to 0, so the window is [0, 3) of the tile
    #   shift = 0 - -1 = 1    the update moves up by one, and is 1 2 0 there
    #   flags = T T F         positions 1 2 3 of the update, of which the last does not exist
    b, (x, update, *starts) = op.b, op.operands
    sizes = op.op.kind.operands[1].shape
    split = _cut_dims(op, sizes)
    if not split:
        return op.emit()
    starts = _global_starts(op, starts, sizes)
    flags = []
    for d in split:
        width = min(sizes[d], b.types[x].shape[d])
        here = b.binary("subtract", starts[d], start_of(b, op.dim(0, d)))
        starts[d] = clamped_index(b, here, b.types[x].shape[d] - width)
        shift = b.binary("subtract", starts[d], here)
        update = _shifted(b, update, d, shift, width)
        flags.append((d, _within(b, width, shift, b.constant(sizes[d], "i32"))))
    type_ = b.types[update]
    there = b.dynamic_slice(x, starts, type_.shape)
    masks = [b.broadcast(flag, type_.shape, (d,)) for d, flag in flags]
    inside = reduce(lambda one, other: b.binary("and", one, other), masks)
    return op.emit([x, b.select(inside, update, there), *starts])
