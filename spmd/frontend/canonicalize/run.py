"""Canonicalize: ops that others can express are written with those, and no later stage sees them.

before: `%2 = stablehlo.batch_norm_inference %x, ...`
after:  `%7 = stablehlo.subtract ...; %8 = stablehlo.multiply ...`

before: `%2 = stablehlo.dynamic_reshape %x, %shape : tensor<2x12xf32>`
after:  `%2 = stablehlo.reshape %x : tensor<2x12xf32>`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from spmd.errors import SpmdError, UnsupportedOpError
from spmd.frontend.importer.module import import_module
from spmd.frontend.trace import trace
from spmd.ir.description import key_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import append_ops, rewrite_ops
from spmd.ir.types import Attribute, TensorType, needs_x64, numpy_dtype


class Site(NamedTuple):
    """One op to rewrite.

    Attributes:
      b: where the new ops go.
      op: the op as it was.
      operands: its operands, as new values.
    """

    b: Builder
    op: Op
    operands: tuple[Value, ...]

    @property
    def attrs(self) -> Mapping[str, Attribute]:
        """The op's attributes."""
        return self.op.kind.attrs

    @property
    def result(self) -> TensorType:
        """Type of the first result."""
        return self.op.kind.results[0]

    def computed(self, function: Callable[..., Any]) -> tuple[Value, ...]:
        """The op as a jax function of its operands."""
        kind = self.op.kind
        structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in kind.operands]
        try:
            with jax.enable_x64(needs_x64((*kind.operands, *kind.results))):
                module = trace(function, structs, {}, platform="cpu").module
        except (TypeError, ValueError) as error:
            self.fail(str(error).partition("\n")[0], "correct its attributes")
        return append_ops(self.b, import_module(module).program, self.operands, loc=self.op.loc)

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


def canonicalize(program: Program) -> Program:
    """Rewrites every op in the table; a program without any is returned as it is.

    Raises:
      UnsupportedOpError: a form of an op that no other ops say.
    """
    if not any(key_of(op.name, op.kind.attrs) in CANONICAL for op in program.walk()):
        return program

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        function = CANONICAL.get(key_of(op.name, op.kind.attrs))
        if function is None:
            return None
        results = function(Site(b, op, operands))
        for value, wanted in zip(results, op.kind.results, strict=True):
            if b.types[value] != wanted:
                raise SpmdError(f"{op.name} was rewritten to {b.types[value]}, not {wanted}")
        return results

    return rewrite_ops(program, rewrite)
