"""`Builder` makes a program op by op, for the importer, the partitioner and the rewrites."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from spmd.ir.dialect.reducers import identity_element, reducer_body
from spmd.ir.program import Loc, Op, OpKind, Region, Value
from spmd.ir.types import Attribute, Dense, Opaque, TensorType, numpy_dtype
from spmd.mesh.sharding import Axes

# one device's coordinate along the atoms `axes`, major to minor: an i32 scalar
AXIS_INDEX = "spmd.axis_index"
# one device's piece of a value that it holds whole: dim `dim` is split over the atoms `axes`
LOCAL_SLICE = "spmd.local_slice"

Made = TypeVar("Made", Value, tuple[Value, ...])


@dataclass
class _Block:
    isolated: bool
    ops: list[Op] = field(default_factory=list)
    shared: dict[Any, Any] = field(default_factory=dict)  # what `Builder.once` made in it


class Builder:
    """Appends ops, at location `loc`, to the region that is open, and numbers their results."""

    def __init__(self, types: Sequence[TensorType] = ()) -> None:
        self.types = list(types)
        self.loc = Loc()
        self._open = [_Block(isolated=True)]  # the regions that are open, the outermost first

    @contextmanager
    def noted(self, note: str) -> Iterator[None]:
        """Notes in the `Loc` of ops made inside the `with` block why the compiler made them."""
        outer = self.loc
        self.loc = outer._replace(note=note)
        yield
        self.loc = outer

    # Values, ops and regions.

    def value(self, type_: TensorType) -> Value:
        """Returns the number of a new value of a type; an op or a region has yet to define it."""
        self.types.append(type_)
        return len(self.types) - 1

    def op(
        self,
        name: str,
        operands: Sequence[Value],
        results: Sequence[TensorType],
        attrs: Mapping[str, Attribute] | None = None,
        regions: tuple[Region, ...] = (),
    ) -> tuple[Value, ...]:
        """Appends an op with results of the types `results`; returns these results."""
        types = tuple(self.types[v] for v in operands)
        kind = OpKind(name, types, tuple(results), dict(attrs or {}))
        return self.repeat(kind, tuple(operands), regions)

    def repeat(
        self, kind: OpKind, operands: tuple[Value, ...], regions: tuple[Region, ...] = ()
    ) -> tuple[Value, ...]:
        """Appends an op of a given kind, whose types are not checked; returns its results."""
        start = len(self.types)
        self.types.extend(kind.results)
        outs = tuple(range(start, len(self.types)))
        self.append(Op(kind, operands, outs, regions, self.loc))
        return outs

    @property
    def count(self) -> int:
        """How many ops the open region has so far."""
        return len(self._open[-1].ops)

    @property
    def last(self) -> Op:
        """The op appended last to the open region."""
        return self._open[-1].ops[-1]

    def append(self, op: Op) -> None:
        """Appends an op whose results have numbers already."""
        self._open[-1].ops.append(op)

    def begin(self, isolated: bool = False) -> None:
        """Opens a region inside the open one; ops are appended to it until `end` closes it.

        In an isolated region (a loop's) `once` returns no value from outside: XLA's export of a
        `while` that captures values is fragile.
        """
        self._open.append(_Block(isolated))

    def end(self, args: Sequence[Value], results: Sequence[Value]) -> Region:
        """Closes the region that `begin` opened last and returns it, with `args` and `results`."""
        return Region(tuple(args), tuple(self._open.pop().ops), tuple(results))

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns what was made for an equal `key`, if visible here; else calls `make()`."""
        # Blocks are searched from the innermost one outwards, up to the first isolated one. A value
        # made in one branch is gone with the branch's block when the other branch is built.
        for block in reversed(self._open):
            found: Made | None = block.shared.get(key)
            if found is not None:
                return found
            if block.isolated:
                break
        made = self._open[-1].shared[key] = make()
        return made

    # Small ops by name.

    def _one(
        self, name: str, operands: Sequence[Value], type_: TensorType, **attrs: Attribute
    ) -> Value:
        return self.op(f"stablehlo.{name}", operands, (type_,), attrs)[0]

    def constant(self, array: Any, dtype: str) -> Value:
        """Returns a constant that has the elements of a numpy array, converted to `dtype`."""
        return self._constant(Dense.of(array, dtype))

    def splat(self, number: Any, type_: TensorType) -> Value:
        """Returns a constant of a type whose elements are all `number`."""
        # An integer 0 becomes the element without a bit, also where the type has no zero.
        dtype, is_zero = numpy_dtype(type_.dtype), isinstance(number, int) and not number
        element = np.zeros((), dtype) if is_zero else np.asarray(number, dtype)
        return self._constant(Dense(type_, element.tobytes(), True))

    def _constant(self, dense: Dense) -> Value:
        return self.once(dense, lambda: self._one("constant", (), dense.type, value=dense))

    def unary(self, name: str, x: Value) -> Value:
        """Appends `stablehlo.<name>` of one operand; the result has the operand's type."""
        return self._one(name, (x,), self.types[x])

    def binary(self, name: str, x: Value, y: Value) -> Value:
        """Appends `stablehlo.<name>` of two operands of one type, which the result has, too."""
        return self._one(name, (x, y), self.types[x])

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """Appends `stablehlo.compare` with a direction such as `LT`; the result is of `i1`."""
        way = Opaque(f"#stablehlo<comparison_direction {direction}>")
        type_ = TensorType(self.types[x].shape, "i1")
        return self._one("compare", (x, y), type_, comparison_direction=way)

    def select(self, pred: Value, x: Value, y: Value) -> Value:
        """Appends `stablehlo.select`, `x` where `pred`, else `y`; `pred` may be a scalar."""
        return self._one("select", (pred, x, y), self.types[x])

    def convert(self, x: Value, dtype: str) -> Value:
        """Appends `stablehlo.convert` to `dtype`; returns `x` itself if it has that already."""
        type_ = self.types[x]
        if type_.dtype == dtype:
            return x
        return self._one("convert", (x,), TensorType(type_.shape, dtype))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Appends `stablehlo.reshape` to `shape`; returns `x` itself if it has that already."""
        type_ = self.types[x]
        if type_.shape == tuple(shape):
            return x
        return self._one("reshape", (x,), type_.with_shape(tuple(shape)))

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Appends `stablehlo.transpose`; returns `x` itself if the permutation is the identity."""
        if list(permutation) == list(range(len(permutation))):
            return x
        type_ = self.types[x].with_shape(tuple(self.types[x].shape[p] for p in permutation))
        return self._one("transpose", (x,), type_, permutation=tuple(permutation))

    def broadcast(self, x: Value, shape: Sequence[int], dims: Sequence[int] = ()) -> Value:
        """Appends `stablehlo.broadcast_in_dim`: dim i of `x` is dim `dims[i]` of the result."""
        type_ = self.types[x].with_shape(tuple(shape))
        return self._one("broadcast_in_dim", (x,), type_, broadcast_dimensions=tuple(dims))

    def iota(self, type_: TensorType, dim: int) -> Value:
        """Appends `stablehlo.iota`: each element is its index along `dim`."""
        return self._one("iota", (), type_, iota_dimension=dim)

    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
        """Appends `stablehlo.dynamic_slice`: `sizes` elements of `x` from scalars `starts` on."""
        type_ = self.types[x].with_shape(tuple(sizes))
        return self._one("dynamic_slice", (x, *starts), type_, slice_sizes=tuple(sizes))

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """Appends `stablehlo.dynamic_update_slice`: `x` with `update` in it from `starts` on."""
        return self._one("dynamic_update_slice", (x, update, *starts), self.types[x])

    def barrier(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """Appends an `optimization_barrier`: no result exists before all of `values` do."""
        return self.op("stablehlo.optimization_barrier", values, [self.types[v] for v in values])

    def slice(self, x: Value, starts: Sequence[int], limits: Sequence[int]) -> Value:
        """Appends `stablehlo.slice` with strides of 1: `x[starts[0]:limits[0], ...]`."""
        shape = tuple(limit - start for start, limit in zip(starts, limits, strict=True))
        attrs = {
            "start_indices": tuple(starts),
            "limit_indices": tuple(limits),
            "strides": (1,) * len(shape),
        }
        return self._one("slice", (x,), self.types[x].with_shape(shape), **attrs)

    def slice_dim(self, x: Value, dim: int, start: int, limit: int) -> Value:
        """Appends `stablehlo.slice` of one dim; returns `x` itself if that takes the whole dim."""
        shape = self.types[x].shape
        if (start, limit) == (0, shape[dim]):
            return x
        return self.slice(x, resized((0,) * len(shape), dim, start), resized(shape, dim, limit))

    def pad_dim(
        self, x: Value, dim: int, low: int, high: int, fill: Value, interior: int = 0
    ) -> Value:
        """Appends `stablehlo.pad` of one dim with scalar `fill`; returns `x` if it adds nothing."""
        if (low, high, interior) == (0, 0, 0):
            return x
        type_ = self.types[x]
        none, size = (0,) * type_.rank, type_.shape[dim]
        attrs = {
            "edge_padding_low": resized(none, dim, low),
            "edge_padding_high": resized(none, dim, high),
            "interior_padding": resized(none, dim, interior),
        }
        size += low + high + max(0, size - 1) * interior
        return self._one("pad", (x, fill), type_.with_dim(dim, size), **attrs)

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Appends `stablehlo.concatenate` along `dim`; returns a single value as it is."""
        if len(values) == 1:
            return values[0]
        type_ = self.types[values[0]].with_dim(dim, sum(self.types[v].shape[dim] for v in values))
        return self._one("concatenate", values, type_, dimension=dim)

    def reduce(self, kind: str, x: Value, dims: Sequence[int]) -> Value:
        """Appends `stablehlo.reduce` of `x` over `dims` by `kind`: `add`, `max`, ..."""
        type_ = self.types[x]
        shape = tuple(n for d, n in enumerate(type_.shape) if d not in dims)
        init = self.constant(identity_element(kind, type_.dtype), type_.dtype)
        body = reducer_body(kind, type_.dtype)
        attrs = {"dimensions": tuple(dims), "body": body, "reducer": kind}
        return self._one("reduce", (x, init), type_.with_shape(shape), **attrs)

    # Ops of one device's program.

    def collective(
        self, kind: str, x: Value, type_: TensorType, axes: Axes, **attrs: Attribute
    ) -> Value:
        """Appends the collective `stablehlo.<kind>` over atoms; the result has type `type_`."""
        return self._one(kind, (x,), type_, axes=axes, **attrs)

    def axis_index(self, axes: Axes) -> Value:
        """Returns this device's coordinate along atoms, major to minor, as an i32 scalar."""
        scalar, attrs = TensorType((), "i32"), {"axes": axes}
        return self.once((AXIS_INDEX, axes), lambda: self.op(AXIS_INDEX, (), (scalar,), attrs)[0])

    def local_slice(self, x: Value, type_: TensorType, axes: Axes, dim: int) -> Value:
        """Appends `spmd.local_slice`: this device's piece of `x`, whose `dim` the atoms split."""
        return self.op(LOCAL_SLICE, (x,), (type_,), {"axes": axes, "dim": dim})[0]


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Returns a shape with `size` as the size of dim `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])
