"""`Builder`: grows a program op by op; used by the importer, the partitioner and the rewrites."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class Builder:
    """Makes ops and numbers their values. `begin` opens a nested region; new ops get `loc`."""

    def __init__(self, types: Sequence[TensorType] = ()) -> None:
        self.types = list(types)
        self.loc = Loc()
        self._blocks: list[list[Op]] = [[]]
        self._shared: list[dict[Any, Any]] = [{}]
        self._isolated: list[bool] = [True]

    @contextmanager
    def noted(self, note: str) -> Iterator[None]:
        """Adds a note, why the compiler made them, to the ops made inside the `with` block."""
        outer = self.loc
        self.loc = outer._replace(note=note)
        yield
        self.loc = outer

    # Values, ops and regions.

    def value(self, type_: TensorType) -> Value:
        """A new value number."""
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
        """Appends an op and returns its results."""
        types = tuple(self.types[v] for v in operands)
        kind = OpKind(name, types, tuple(results), dict(attrs or {}))
        return self.repeat(kind, tuple(operands), regions)

    def repeat(
        self, kind: OpKind, operands: tuple[Value, ...], regions: tuple[Region, ...] = ()
    ) -> tuple[Value, ...]:
        """Appends an op of a kind whose operand types are known to be those of `operands`."""
        start = len(self.types)
        self.types.extend(kind.results)
        outs = tuple(range(start, len(self.types)))
        self._blocks[-1].append(Op(kind, operands, outs, regions, self.loc))
        return outs

    @property
    def count(self) -> int:
        """How many ops the current block has."""
        return len(self._blocks[-1])

    @property
    def last(self) -> Op:
        """The op appended last to the current block."""
        return self._blocks[-1][-1]

    def append(self, op: Op) -> None:
        """Appends an op whose results are already numbered."""
        self._blocks[-1].append(op)

    def begin(self, isolated: bool = False) -> None:
        """Opens a region; ops go there until `end`.

        An isolated region (a loop's) reads no value that `once` made outside it: XLA's export of
        a `while` that captures values is fragile.
        """
        self._blocks.append([])
        self._shared.append({})
        self._isolated.append(isolated)

    def end(self, args: Sequence[Value], results: Sequence[Value]) -> Region:
        """Closes the region that `begin` opened."""
        self._shared.pop()
        self._isolated.pop()
        return Region(tuple(args), tuple(self._blocks.pop()), tuple(results))

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns what was made for `key` before, if visible here; else calls `make()`."""
        # Scopes are searched from the innermost region outwards, up to the first isolated one. A
        # value made in one branch is gone with the branch's scope when the other branch is built.
        for scope, isolated in zip(reversed(self._shared), reversed(self._isolated), strict=True):
            found: Made | None = scope.get(key)
            if found is not None:
                return found
            if isolated:
                break
        made = make()
        self._shared[-1][key] = made
        return made

    # Small ops by name.

    def constant(self, array: Any, dtype: str) -> Value:
        """A constant from numpy elements."""
        return self._constant(Dense.of(array, dtype))

    def splat(self, number: Any, type_: TensorType) -> Value:
        """A constant of one repeated element."""
        # An integer 0 becomes the element without a bit, also where the type has no zero.
        dtype, is_zero = numpy_dtype(type_.dtype), isinstance(number, int) and not number
        element = np.zeros((), dtype) if is_zero else np.asarray(number, dtype)
        return self._constant(Dense(type_, element.tobytes(), True))

    def _constant(self, dense: Dense) -> Value:
        attrs = {"value": dense}
        return self.once(dense, lambda: self.op("stablehlo.constant", (), (dense.type,), attrs)[0])

    def unary(self, name: str, x: Value) -> Value:
        """`stablehlo.<name>` of one value, result typed like it."""
        return self.op(f"stablehlo.{name}", (x,), (self.types[x],))[0]

    def binary(self, name: str, x: Value, y: Value) -> Value:
        """`stablehlo.<name>` of two values of one type."""
        return self.op(f"stablehlo.{name}", (x, y), (self.types[x],))[0]

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """`stablehlo.compare` with a direction such as `LT`; how it compares is up to the dtype."""
        type_ = self.types[x]
        attrs = {"comparison_direction": Opaque(f"#stablehlo<comparison_direction {direction}>")}
        result = TensorType(type_.shape, "i1")
        return self.op("stablehlo.compare", (x, y), (result,), attrs)[0]

    def select(self, pred: Value, x: Value, y: Value) -> Value:
        """`stablehlo.select`; `pred` is a scalar or of the operands' shape."""
        return self.op("stablehlo.select", (pred, x, y), (self.types[x],))[0]

    def convert(self, x: Value, dtype: str) -> Value:
        """`stablehlo.convert`; returns `x` if it has the dtype already."""
        type_ = self.types[x]
        if type_.dtype == dtype:
            return x
        return self.op("stablehlo.convert", (x,), (TensorType(type_.shape, dtype),))[0]

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """`stablehlo.reshape`; returns `x` if it has the shape already."""
        type_ = self.types[x]
        if type_.shape == tuple(shape):
            return x
        return self.op("stablehlo.reshape", (x,), (type_.with_shape(tuple(shape)),))[0]

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """`stablehlo.transpose`; returns `x` if the permutation is the identity."""
        if list(permutation) == list(range(len(permutation))):
            return x
        type_ = self.types[x]
        shape = tuple(type_.shape[p] for p in permutation)
        attrs = {"permutation": tuple(permutation)}
        return self.op("stablehlo.transpose", (x,), (type_.with_shape(shape),), attrs)[0]

    def broadcast(self, x: Value, shape: Sequence[int], dims: Sequence[int] = ()) -> Value:
        """`stablehlo.broadcast_in_dim`: dim i of `x` becomes dim `dims[i]` of the result."""
        type_ = self.types[x].with_shape(tuple(shape))
        attrs = {"broadcast_dimensions": tuple(dims)}
        return self.op("stablehlo.broadcast_in_dim", (x,), (type_,), attrs)[0]

    def iota(self, type_: TensorType, dim: int) -> Value:
        """`stablehlo.iota` along `dim`."""
        return self.op("stablehlo.iota", (), (type_,), {"iota_dimension": dim})[0]

    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
        """`stablehlo.dynamic_slice`."""
        type_ = self.types[x].with_shape(tuple(sizes))
        attrs = {"slice_sizes": tuple(sizes)}
        return self.op("stablehlo.dynamic_slice", (x, *starts), (type_,), attrs)[0]

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """`stablehlo.dynamic_update_slice`."""
        return self.op("stablehlo.dynamic_update_slice", (x, update, *starts), (self.types[x],))[0]

    def barrier(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """`stablehlo.optimization_barrier`: what reads any result waits for all of the values."""
        types = [self.types[v] for v in values]
        return self.op("stablehlo.optimization_barrier", values, types)

    def slice(self, x: Value, starts: Sequence[int], limits: Sequence[int]) -> Value:
        """`stablehlo.slice` with strides of 1."""
        shape = tuple(limit - start for start, limit in zip(starts, limits, strict=True))
        attrs = {
            "start_indices": tuple(starts),
            "limit_indices": tuple(limits),
            "strides": (1,) * len(shape),
        }
        return self.op("stablehlo.slice", (x,), (self.types[x].with_shape(shape),), attrs)[0]

    def slice_dim(self, x: Value, dim: int, start: int, limit: int) -> Value:
        """`stablehlo.slice` of one dim; returns `x` if that takes the whole dim."""
        shape = self.types[x].shape
        if (start, limit) == (0, shape[dim]):
            return x
        return self.slice(x, resized((0,) * len(shape), dim, start), resized(shape, dim, limit))

    def pad_dim(
        self, x: Value, dim: int, low: int, high: int, fill: Value, interior: int = 0
    ) -> Value:
        """`stablehlo.pad` of one dim with a scalar; returns `x` if all paddings are 0."""
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
        return self.op("stablehlo.pad", (x, fill), (type_.with_dim(dim, size),), attrs)[0]

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """`stablehlo.concatenate`; returns a single value as it is."""
        if len(values) == 1:
            return values[0]
        type_ = self.types[values[0]]
        size = sum(self.types[v].shape[dim] for v in values)
        attrs = {"dimension": dim}
        return self.op("stablehlo.concatenate", values, (type_.with_dim(dim, size),), attrs)[0]

    def reduce(self, kind: str, x: Value, dims: Sequence[int]) -> Value:
        """`stablehlo.reduce` over dims by `add`, `max`, ..., with its identity as initial value."""
        type_ = self.types[x]
        shape = tuple(n for d, n in enumerate(type_.shape) if d not in dims)
        init = self.constant(identity_element(kind, type_.dtype), type_.dtype)
        body = reducer_body(kind, type_.dtype)
        attrs = {"dimensions": tuple(dims), "body": body, "reducer": kind}
        return self.op("stablehlo.reduce", (x, init), (type_.with_shape(shape),), attrs)[0]

    # Ops of one device's program.

    def collective(
        self, kind: str, x: Value, type_: TensorType, axes: Axes, **attrs: Attribute
    ) -> Value:
        """Appends a collective over atoms; its replica groups are written when it is emitted."""
        return self.op(f"stablehlo.{kind}", (x,), (type_,), {"axes": axes, **attrs})[0]

    def axis_index(self, axes: Axes) -> Value:
        """`spmd.axis_index`: this device's coordinate along some atoms, major to minor."""
        scalar, attrs = TensorType((), "i32"), {"axes": axes}
        return self.once((AXIS_INDEX, axes), lambda: self.op(AXIS_INDEX, (), (scalar,), attrs)[0])

    def local_slice(self, x: Value, type_: TensorType, axes: Axes, dim: int) -> Value:
        """`spmd.local_slice`: cuts a dim of `x` to this device's piece, which has type `type_`."""
        return self.op(LOCAL_SLICE, (x,), (type_,), {"axes": axes, "dim": dim})[0]


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size of one dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])
