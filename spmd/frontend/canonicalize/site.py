"""`Site`: one op to canonicalize, and small steps that several canonicalizations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from spmd.errors import UnsupportedOpError
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Value
from spmd.ir.types import Attribute, TensorType


class Site(NamedTuple):
    """One op to rewrite.

    Attributes:
      b: where the new ops go.
      op: the op as it was.
      operands: its operands, as new values.
      producers: for each old value, the op that defined it.
    """

    b: Builder
    op: Op
    operands: tuple[Value, ...]
    producers: Mapping[Value, Op]

    @property
    def attrs(self) -> Mapping[str, Attribute]:
        """The op's attributes."""
        return self.op.kind.attrs

    @property
    def result(self) -> TensorType:
        """Type of the first result."""
        return self.op.kind.results[0]

    def ints(self, operand: int) -> tuple[int, ...] | None:
        """Elements of a constant integer operand, flattened; None if it is not constant."""
        return constant_ints(self.producers, self.op.operands[operand])

    def fail(self, why: str, fix: str) -> NoReturn:
        """Raises the error of a form that cannot be rewritten."""
        raise UnsupportedOpError(
            f"{self.op.name} cannot be partitioned: {why}",
            op=f"{self.op.name}({', '.join(map(str, self.op.kind.operands))}) -> {self.result}",
            source=self.op.loc.source,
            fix=fix,
        )


Canonical = Callable[[Site], Sequence[Value]]

CANONICAL: dict[str, Canonical] = {}
"""Op (or `custom_call:` and its target) -> how it is written with other ops."""


def canonical(*names: str) -> Callable[[Canonical], Canonical]:
    """Decorator: the function writes these ops with others."""

    def register(function: Canonical) -> Canonical:
        CANONICAL.update(dict.fromkeys(names, function))
        return function

    return register


_SAME_ELEMENTS = {"stablehlo.convert", "stablehlo.reshape"}


def constant_ints(producers: Mapping[Value, Op], value: Value) -> tuple[int, ...] | None:
    """Elements of an integer value that is made of constants, flattened."""
    op = producers.get(value)
    if op is None:
        return None
    if op.name == "stablehlo.constant":
        return tuple(int(n) for n in op.kind.attrs["value"].array().reshape(-1))
    if op.name in _SAME_ELEMENTS:
        return constant_ints(producers, op.operands[0])
    if op.name == "stablehlo.get_dimension_size":
        return (op.kind.operands[0].shape[op.kind.attrs["dimension"]],)
    if op.name == "stablehlo.concatenate" and op.kind.results[0].rank == 1:
        parts = [constant_ints(producers, v) for v in op.operands]
        return None if None in parts else tuple(n for part in parts for n in part or ())
    return None


def reduce_add(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    """The sum over some dims; `x` itself for none."""
    if not dims:
        return x
    return b.reduce("add", x, tuple(sorted(dims)), **{"spmd.neutral": True})
