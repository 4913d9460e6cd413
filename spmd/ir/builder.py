"""`Builder`: grows a program op by op; used by the importer, the partitioner and the rewrites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.ir.program import REDUCER_OPS, Body, Loc, Op, OpKind, Region, Value
from spmd.ir.types import Attribute, Dense, Opaque, TensorType, numpy_dtype

SCALAR_I32 = TensorType((), "i32")


class Builder:
    """Collects types and ops. `region()` opens a nested region; `loc` is stamped on new ops."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.loc = Loc()
        self._blocks: list[list[Op]] = [[]]
        self._shared: list[dict[Any, Value]] = [{}]
        self._isolated: list[bool] = [True]

    @contextmanager
    def noted(self, note: str) -> Iterator[None]:
        """Stamps a note on the ops that are made meanwhile."""
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
        kind = OpKind(
            name, tuple(self.types[v] for v in operands), tuple(results), dict(attrs or {})
        )
        outs = tuple(self.value(t) for t in results)
        self._blocks[-1].append(Op(kind, tuple(operands), outs, regions, self.loc))
        return outs

    def repeat(self, kind: OpKind, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """Appends an op of a kind that is known to fit its operands."""
        start = len(self.types)
        self.types.extend(kind.results)
        outs = tuple(range(start, len(self.types)))
        self._blocks[-1].append(Op(kind, operands, outs, (), self.loc))
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

    def once(self, key: Any, make: Any) -> Value:
        """The value that `make()` built for `key` where it is visible, else a new one."""
        for scope, isolated in zip(reversed(self._shared), reversed(self._isolated), strict=True):
            if key in scope:
                found: Value = scope[key]
                return found
            if isolated:
                break
        made: Value = make()
        self._shared[-1][key] = made
        return made

    # Small ops by name.

    def constant(self, array: Any, dtype: str) -> Value:
        """A constant from numpy elements."""
        dense = Dense.of(array, dtype)
        return self.once(
            dense, lambda: self.op("stablehlo.constant", (), (dense.type,), {"value": dense})[0]
        )

    def splat(self, number: Any, type_: TensorType) -> Value:
        """A constant of one repeated element."""
        element = np.asarray(number, numpy_dtype(type_.dtype))
        dense = Dense(type_, element.tobytes(), True)
        return self.once(
            dense, lambda: self.op("stablehlo.constant", (), (type_,), {"value": dense})[0]
        )

    def unary(self, name: str, x: Value) -> Value:
        """`stablehlo.<name>` of one value, result typed like it."""
        return self.op(f"stablehlo.{name}", (x,), (self.types[x],))[0]

    def binary(self, name: str, x: Value, y: Value) -> Value:
        """`stablehlo.<name>` of two values of one type."""
        return self.op(f"stablehlo.{name}", (x, y), (self.types[x],))[0]

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """`stablehlo.compare`, e.g. direction `LT`; unsigned and float types by their dtype."""
        type_ = self.types[x]
        attrs = {"comparison_direction": Opaque(f"#stablehlo<comparison_direction {direction}>")}
        result = TensorType(type_.shape, "i1")
        return self.op("stablehlo.compare", (x, y), (result,), attrs)[0]

    def select(self, pred: Value, x: Value, y: Value) -> Value:
        """`stablehlo.select`; `pred` is a scalar or of the operands' shape."""
        return self.op("stablehlo.select", (pred, x, y), (self.types[x],))[0]

    def convert(self, x: Value, dtype: str) -> Value:
        """`stablehlo.convert`, nothing if the dtype is already right."""
        type_ = self.types[x]
        if type_.dtype == dtype:
            return x
        return self.op("stablehlo.convert", (x,), (TensorType(type_.shape, dtype),))[0]

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """`stablehlo.reshape`, nothing if the shape is already right."""
        type_ = self.types[x]
        if type_.shape == tuple(shape):
            return x
        return self.op("stablehlo.reshape", (x,), (type_.with_shape(tuple(shape)),))[0]

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """`stablehlo.transpose`, nothing for the identity."""
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


def reducer_body(kind: str, dtype: str) -> Body:
    """The body of a reduction: one op of `kind` over two scalars."""
    scalar = TensorType((), dtype)
    op_kind = OpKind(REDUCER_OPS[kind], (scalar, scalar), (scalar,), {})
    return Body((scalar,) * 3, Region((0, 1), (Op(op_kind, (0, 1), (2,)),), (2,)))


def identity_element(kind: str, dtype: str) -> Any:
    """The element that leaves a reduction of `kind` unchanged, as a numpy scalar of `dtype`."""
    np_dtype = numpy_dtype(dtype)
    if kind in ("add", "or", "xor"):
        return np.zeros((), np_dtype)
    if kind == "mul":
        return np.ones((), np_dtype)
    if kind == "and":
        return np.asarray(True) if dtype == "i1" else np.invert(np.zeros((), np_dtype))
    largest = kind == "min"
    if dtype == "i1":
        return np.asarray(largest)
    if np_dtype.kind in "iu" or dtype in ("i2", "i4", "ui2", "ui4"):
        import ml_dtypes

        limits = ml_dtypes.iinfo(np_dtype)
        return np.asarray(limits.max if largest else limits.min, np_dtype)
    return np.asarray(np.inf if largest else -np.inf, np_dtype)
