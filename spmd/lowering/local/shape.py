"""Local lowerings of constants, slices, pads, concatenates, gathers and scatters."""

from collections.abc import Container, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.halo import reads_of
from spmd.ir.program import Value
from spmd.ir.types import Dense, GatherDims, ScatterDims, TensorType
from spmd.lowering.local.dims import Split, clamped_index, dynamic_take_dim, own_piece
from spmd.lowering.local.fetch import assembled, base_of, note_of, parts_of, read_around
from spmd.lowering.local.table import LocalOp, local, or_identity
from spmd.propagation.projection import reduced_axes


@local("stablehlo.constant")
def _constant(op: LocalOp) -> tuple[Value, ...]:
    """Makes this device's piece of a constant: a smaller splat, or a slice of all elements."""
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
    """Makes an iota of local shape and adds the index at which this device's piece starts."""
    type_ = op.result_types()[0]
    dim = op.attrs["iota_dimension"]
    (count,) = op.emit()
    axes = op.choice.results[0].dims[dim]
    if not axes:
        return (count,)
    split = Split(dim, op.op.kind.results[0].shape[dim], axes, op.mesh)
    start = op.b.convert(split.start(op.b), type_.dtype)
    return (op.b.binary("add", count, op.b.broadcast(start, type_.shape)),)


# Ops that move elements. Each fetches what its piece of the result reads, then is the op itself
# without padding along the split dims.


@local("stablehlo.slice")
def _slice(op: LocalOp) -> tuple[Value, ...]:
    """Fetches what this device's piece of the result reads along split dims, and slices that."""
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
    """Fetches this device's elements from the other end of split dims, and reverses them."""
    return op.emit([read_around(op, op.operands[0])])


@local("stablehlo.pad")
def _pad(op: LocalOp) -> tuple[Value, ...]:
    """Fetches what this device's piece of the result reads, and pads that where still needed."""
    x, fill = op.operands
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    low, high, interior = (list(op.attrs[name]) for name in names)
    for d, read in op.reads(0).items():
        x, low[d], high[d], dilation = base_of(op, 0, x, d, *read, fill)
        interior[d] = dilation - 1
    return op.emit([x, fill], **dict(zip(names, map(tuple, (low, high, interior)), strict=True)))


@local("stablehlo.concatenate")
def _concatenate(op: LocalOp) -> tuple[Value, ...]:
    """Joins, on each device, the elements of all operands that are in its piece of the result."""
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
    return (assembled(b, parts, op.result_types()[0], along, axes),)


# Slices whose starts are computed.


def pick(b: Builder, x: Value, split: Split, start: Value, length: int) -> Value:
    """Returns elements `[start, start + length)` of a global dim, 0 where another tile has them."""
    dim = split.dim
    have = b.types[x].shape[dim]
    width = min(have, length)
    here = b.binary("subtract", start, split.start(b))
    at = clamped_index(b, here, have - width)
    x = dynamic_take_dim(b, x, dim, at, width)
    x = _shifted(b, x, dim, b.binary("subtract", here, at), length)
    inside = _within(b, length, here, split.own_count(b))
    return b.select(b.broadcast(inside, b.types[x].shape, (dim,)), x, b.splat(0, b.types[x]))


def _shifted(b: Builder, x: Value, dim: int, by: Value, length: int) -> Value:
    """Returns `length` elements of a local dim from position `by` on, with 0 beyond its ends."""
    have = b.types[x].shape[dim]
    if have == 1 and length == 1:
        return x
    x = b.pad_dim(x, dim, length, length, b.splat(0, b.types[x].with_shape(())))
    start = b.binary("add", by, b.constant(length, "i32"))
    return dynamic_take_dim(b, x, dim, clamped_index(b, start, have + length), length)


def _within(b: Builder, length: int, first: Value, count: Value) -> Value:
    """Returns `length` flags: whether position `first + i` is in `[0, count)`."""
    line = TensorType((length,), "i32")
    position = b.binary("add", b.iota(line, 0), b.broadcast(first, line.shape))
    return _between(b, position, b.splat(0, line), b.broadcast(count, line.shape))


def _between(b: Builder, x: Value, low: Value, end: Value) -> Value:
    """Returns flags: whether elements of `x` are in `[low, end)`."""
    return b.binary("and", b.compare("GE", x, low), b.compare("LT", x, end))


def _global_starts(op: LocalOp, starts: Sequence[Value], sizes: Sequence[int]) -> list[Value]:
    """Clamps starts so that a slice of `sizes` is in the global operand 0; returns i32 scalars."""
    b = op.b
    return [
        b.convert(clamped_index(b, start, whole - size), "i32")
        for start, whole, size in zip(starts, op.op.kind.operands[0].shape, sizes, strict=True)
    ]


def _cut_dims(op: LocalOp, sizes: Sequence[int]) -> list[int]:
    """Returns the split dims of the first operand of which a slice of `sizes` takes only a part."""
    dims = (op.dim(0, d) for d in range(len(sizes)))
    return [d.dim for d in dims if d.axes and sizes[d.dim] < d.size]


@local("stablehlo.dynamic_slice")
def _dynamic_slice(op: LocalOp) -> tuple[Value, ...]:
    """Slices this device's piece: a term of a sum, with 0 for elements of other devices.

    The start of a dim taken whole is a constant 0: XLA adds starts of nested slices unclamped.
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
    """Writes those elements of the update that are in this device's piece, in place.

    It overwrites a window of at most the update's size, where other elements keep their values.
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
        here = b.binary("subtract", starts[d], op.dim(0, d).start(b))
        starts[d] = clamped_index(b, here, b.types[x].shape[d] - width)
        shift = b.binary("subtract", starts[d], here)
        update = _shifted(b, update, d, shift, width)
        flags.append((d, _within(b, width, shift, b.constant(sizes[d], "i32"))))
    type_ = b.types[update]
    there = b.dynamic_slice(x, starts, type_.shape)
    masks = [b.broadcast(flag, type_.shape, (d,)) for d, flag in flags]
    inside = reduce(lambda one, other: b.binary("and", one, other), masks)
    return op.emit([x, b.select(inside, update, there), *starts])


# Look-ups by indices.


@local("stablehlo.gather")
def _gather(op: LocalOp) -> tuple[Value, ...]:
    """Looks indices up in this device's piece of the table: a term of a sum, with 0 for the others.

    Indices out of range are clamped to the global table first, as StableHLO specifies.
    """
    # A table of 8 rows in two pieces, indices 1 6 9:
    #   clamped    1 6 7     against the whole table, so that 9 means the last row
    #   device 0   1 6 7 - 0, of which 1 is in its piece: row 1, 0, 0
    #   device 1   1 6 7 - 4 = -3 2 3: 0, row 6, row 7
    # Their sum, the reduction that is owed, is what was asked for.
    b = op.b
    dims: GatherDims = op.attrs["dimension_numbers"]
    wanted, (table, indices) = op.attrs["slice_sizes"], op.operands
    piece, whole = b.types[table].shape, op.op.kind.operands[0].shape
    sizes = tuple(
        piece[d] if size == whole[d] and size > 1 else size for d, size in enumerate(wanted)
    )
    places = _indexed(op, dims.start_index_map, {d for d, n in enumerate(wanted) if n == 1})
    is_split = any(place.axes for place in places)
    if not is_split and b.types[indices].size != len(places):
        return op.emit(slice_sizes=sizes)
    indices = _as_signed(b, indices)
    vector = _VectorDim(b, b.types[indices], dims.index_vector_dim)
    clamped = vector.clamped(indices, [place.size - wanted[place.dim] for place in places])
    if not is_split:  # XLA makes it a dynamic slice, which must be in range (see `expand`)
        return op.emit([table, clamped], slice_sizes=sizes)
    starts = vector.join([place.start(b) for place in places])
    ends = vector.join([place.own_count(b) for place in places])
    local_index = b.binary("subtract", clamped, starts)
    inside = _between(b, local_index, vector.of([0] * len(places)), ends)
    (found,) = op.emit([table, local_index], slice_sizes=sizes)
    type_ = b.types[found]
    batch = [d for d in range(type_.rank) if d not in dims.offset_dims]
    mask = b.broadcast(vector.all(inside), type_.shape, batch)
    return (b.select(mask, found, b.splat(0, type_)),)


@local("stablehlo.scatter")
def _scatter(op: LocalOp) -> tuple[Value, ...]:
    """Scatters into this device's piece; updates of other pieces are out of range, so dropped."""
    b = op.b
    dims: ScatterDims = op.attrs["scatter_dimension_numbers"]
    count = (len(op.operands) - 1) // 2
    tables, indices, updates = op.operands[:count], op.operands[count], op.operands[count + 1 :]
    axes = reduced_axes(op.rule, op.choice.assignment)
    reducer = op.attrs["reducer"]
    if axes:  # padded updates must change nothing, wherever their padded indices point
        updates = tuple(op.masked(i) for i in range(count + 1, len(op.operands)))
        if reducer not in ("max", "min", "and", "or"):  # by which a table may be joined repeatedly
            is_first = b.compare("EQ", b.axis_index(axes), b.constant(0, "i32"))
            tables = tuple(or_identity(b, is_first, t, reducer) for t in tables)
    places = _indexed(op, dims.scatter_dims_to_operand_dims, dims.inserted_window_dims)
    if any(place.axes for place in places):
        indices = _as_signed(b, indices)
        vector = _VectorDim(b, b.types[indices], dims.index_vector_dim)
        starts = vector.join([place.start(b) for place in places])
        indices = b.binary("subtract", indices, starts)
        if b.types[indices].size == len(places):
            return _scatter_one(op, tables, indices, updates)
    return op.emit([*tables, indices, *updates])


def _scatter_one(
    op: LocalOp, tables: Sequence[Value], indices: Value, updates: Sequence[Value]
) -> tuple[Value, ...]:
    """Scatters a single slice into this device's piece, from whose start `indices` count.

    A slice that is not all in the piece changes nothing. Its index is clamped nevertheless: XLA
    makes the op a dynamic slice and an update slice, which must be in range (see `expand`).
    """
    b, dims, reducer = op.b, op.attrs["scatter_dimension_numbers"], op.attrs["reducer"]
    piece, update = b.types[tables[0]].shape, b.types[updates[0]].shape
    windows = iter(dims.update_window_dims)
    single = {*dims.inserted_window_dims, *dims.input_batching_dims}
    sizes = [1 if d in single else update[next(windows)] for d in range(len(piece))]
    vector = _VectorDim(b, b.types[indices], dims.index_vector_dim)
    places = dims.scatter_dims_to_operand_dims
    room = [piece[d] - sizes[d] for d in places]
    first, last = vector.of([0] * len(places)), vector.of(room)
    inside = b.binary("and", b.compare("GE", indices, first), b.compare("LE", indices, last))
    belongs = b.reshape(vector.all(inside), ())
    indices = vector.clamped(indices, room)
    if not reducer:
        results = op.emit([*tables, indices, *updates])
        return tuple(b.select(belongs, r, t) for r, t in zip(results, tables, strict=True))
    return op.emit([*tables, indices, *[or_identity(b, belongs, u, reducer) for u in updates]])


def _indexed(op: LocalOp, dims: Sequence[int], picked: Container[int]) -> list[Split]:
    """Returns how each of `dims` of operand 0 is split; a dim not in `picked` counts as unsplit."""
    found = [op.dim(0, d) for d in dims]
    return [split if split.dim in picked else split._replace(axes=()) for split in found]


def _as_signed(b: Builder, indices: Value) -> Value:
    type_ = b.types[indices]
    if type_.dtype in ("ui32", "ui64"):  # one past all tables stays there
        indices = b.binary("minimum", indices, b.splat(np.iinfo(np.int32).max, type_))
    return indices if type_.dtype in ("i32", "i64") else b.convert(indices, "i32")


class _VectorDim(NamedTuple):
    """The dim of an index tensor along which the components of an index are; it may be implicit."""

    b: Builder
    type: TensorType  # of the indices
    dim: int  # the rank of `type` if it is implicit: each element is an index

    def of(self, numbers: Sequence[int]) -> Value:
        """Broadcasts constants, one for each component of an index, to the type of the indices."""
        return self.spread(self.b.constant(np.asarray(numbers), self.type.dtype))

    def clamped(self, indices: Value, last: Sequence[int]) -> Value:
        above = self.b.binary("maximum", indices, self.of([0] * len(last)))
        return self.b.binary("minimum", above, self.of(last))

    def join(self, scalars: Sequence[Value]) -> Value:
        """Broadcasts scalars, one for each component of an index, to the type of the indices."""
        b = self.b
        parts = [b.reshape(b.convert(s, self.type.dtype), (1,)) for s in scalars]
        return self.spread(b.concatenate(parts, 0))

    def spread(self, vector: Value) -> Value:
        is_implicit = self.dim == self.type.rank
        x, dims = (self.b.reshape(vector, ()), ()) if is_implicit else (vector, (self.dim,))
        return self.b.broadcast(x, self.type.shape, dims)

    def all(self, flags: Value) -> Value:
        return flags if self.dim == self.type.rank else self.b.reduce("and", flags, (self.dim,))
