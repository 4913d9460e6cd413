"""Local lowerings of gather and scatter."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import identity_element
from spmd.ir.program import Value
from spmd.ir.types import GatherDims, ScatterDims
from spmd.lowering.local.dims import Split, own_count, start_of
from spmd.lowering.local.table import LocalOp, local, or_identity
from spmd.propagation.projection import reduced_axes


@local("stablehlo.gather")
def _gather(op: LocalOp) -> tuple[Value, ...]:
    """Looks up what lies in this device's piece; elsewhere the slice is zero, a term of the sum.

    Out-of-range starts are clamped against the whole table first, as the specification asks.
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
    vector = _VectorDim(b, indices, dims.index_vector_dim)
    clamped = vector.clamped(indices, [place.size - wanted[place.dim] for place in places])
    if not is_split:  # XLA makes it a dynamic slice, which must be in range (see `expand`)
        return op.emit([table, clamped], slice_sizes=sizes)
    starts = vector.join([start_of(b, place) for place in places])
    ends = vector.join([own_count(b, place) for place in places])
    local_index = b.binary("subtract", clamped, starts)
    inside = b.binary(
        "and",
        b.compare("GE", local_index, vector.of([0] * len(places))),
        b.compare("LT", local_index, ends),
    )
    (found,) = op.emit([table, local_index], slice_sizes=sizes)
    type_ = b.types[found]
    batch = [d for d in range(type_.rank) if d not in dims.offset_dims]
    mask = b.broadcast(vector.all(inside), type_.shape, batch)
    return (b.select(mask, found, b.splat(0, type_)),)


@local("stablehlo.scatter")
def _scatter(op: LocalOp) -> tuple[Value, ...]:
    """Updates that fall outside this device's piece are out of range there, and so dropped."""
    b = op.b
    dims: ScatterDims = op.attrs["scatter_dimension_numbers"]
    count = (len(op.operands) - 1) // 2
    tables, indices, updates = op.operands[:count], op.operands[count], op.operands[count + 1 :]
    axes = reduced_axes(op.rule, op.choice.assignment)
    reducer = op.attrs["reducer"]
    if axes:  # padded updates must change nothing, wherever their padded indices point
        updates = tuple(
            op.masked(i, identity_element(reducer, b.types[u].dtype))
            for i, u in enumerate(updates, count + 1)
        )
        tables = tuple(op.once(t, axes, reducer) for t in tables)
    places = _indexed(op, dims.scatter_dims_to_operand_dims, dims.inserted_window_dims)
    if any(place.axes for place in places):
        indices = _as_signed(b, indices)
        vector = _VectorDim(b, indices, dims.index_vector_dim)
        starts = vector.join([start_of(b, place) for place in places])
        indices = b.binary("subtract", indices, starts)
        if b.types[indices].size == len(places):
            return _scatter_one(op, tables, indices, updates)
    return op.emit([*tables, indices, *updates])


def _scatter_one(
    op: LocalOp, tables: Sequence[Value], indices: Value, updates: Sequence[Value]
) -> tuple[Value, ...]:
    """A scatter of one slice, moved into range; it changes nothing where it does not belong.

    XLA makes it a dynamic slice and a dynamic update slice, which must be in range (see `expand`).
    """
    b, dims, reducer = op.b, op.attrs["scatter_dimension_numbers"], op.attrs["reducer"]
    piece, update = b.types[tables[0]].shape, b.types[updates[0]].shape
    windows = iter(dims.update_window_dims)
    single = {*dims.inserted_window_dims, *dims.input_batching_dims}
    sizes = [1 if d in single else update[next(windows)] for d in range(len(piece))]
    vector = _VectorDim(b, indices, dims.index_vector_dim)
    places = dims.scatter_dims_to_operand_dims
    room = [piece[d] - sizes[d] for d in places]
    first, last = vector.of([0] * len(places)), vector.of(room)
    inside = b.binary("and", b.compare("GE", indices, first), b.compare("LE", indices, last))
    belongs = b.reshape(vector.all(inside), ())
    indices = vector.clamped(indices, room)
    if not reducer:
        results = op.emit([*tables, indices, *updates])
        return tuple(b.select(belongs, r, t) for r, t in zip(results, tables, strict=True))
    masked = [or_identity(b, belongs, u, reducer) for u in updates]
    return op.emit([*tables, indices, *masked])


def _indexed(op: LocalOp, dims: Sequence[int], picked: Container[int]) -> list[Split]:
    """The table's dims that an index has a place in; whole but for those `picked` from."""
    found = [op.dim(0, d) for d in dims]
    return [split if split.dim in picked else split._replace(axes=()) for split in found]


def _as_signed(b: Builder, indices: Value) -> Value:
    """Indices in a type that can hold a local, possibly negative, index."""
    dtype = b.types[indices].dtype
    return indices if dtype in ("i32", "i64") else b.convert(indices, "i32")


class _VectorDim:
    """The dim of an index tensor that holds the components of one index (it may be implicit)."""

    def __init__(self, b: Builder, indices: Value, dim: int) -> None:
        self.b = b
        self.type = b.types[indices]
        self.dim = dim

    def of(self, numbers: Sequence[int]) -> Value:
        """One constant a component, in the shape of the indices."""
        return self.spread(self.b.constant(np.asarray(numbers), self.type.dtype))

    def clamped(self, indices: Value, last: Sequence[int]) -> Value:
        """Each component between 0 and its last."""
        b = self.b
        above = b.binary("maximum", indices, self.of([0] * len(last)))
        return b.binary("minimum", above, self.of(last))

    def join(self, scalars: Sequence[Value]) -> Value:
        """One i32 scalar a component, in the shape and type of the indices."""
        b = self.b
        parts = [b.reshape(b.convert(s, self.type.dtype), (1,)) for s in scalars]
        return self.spread(b.concatenate(parts, 0))

    def spread(self, vector: Value) -> Value:
        b = self.b
        if self.dim == self.type.rank:
            return b.broadcast(b.reshape(vector, ()), self.type.shape)
        return b.broadcast(vector, self.type.shape, (self.dim,))

    def all(self, flags: Value) -> Value:
        """Whether all components of each index are flagged."""
        b = self.b
        if self.dim == self.type.rank:
            return flags
        return b.reduce("and", flags, (self.dim,))
