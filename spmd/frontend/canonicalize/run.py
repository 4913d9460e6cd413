"""Canonicalize: ops that others can express are written with those, and no later stage sees them.

before: `%2 = stablehlo.batch_norm_inference %x, ...`
after:  `%7 = stablehlo.subtract ...; %8 = stablehlo.multiply ...`

before: `%2 = stablehlo.dynamic_reshape %x, %shape : tensor<2x12xf32>`
after:  `%2 = stablehlo.reshape %x : tensor<2x12xf32>`
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.errors import SpmdError
from spmd.frontend.canonicalize.site import CANONICAL, Site
from spmd.ir.description import key_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import rewrite_ops


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
