"""XLA's CPU backend has no `ragged_dot`: for tests, local ones become what jax writes for CPUs."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

import spmd
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.contract import RaggedDims
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, append_ops, edit_ops
from spmd.ir.types import numpy_dtype
from spmd.lowering.expand import expand
from tests.ir.examples import program_of


def expand_for_cpu(program: Program, mesh: spmd.Mesh) -> Program:
    """`expand`, and then every `chlo.ragged_dot` as jax has it."""

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        if op.name != "chlo.ragged_dot":
            return None
        dims, dot = RaggedDims.of(op.kind), RaggedDims.of(op.kind).dot
        numbers = lax.RaggedDotDimensionNumbers(
            ((dot.lhs_contract, dot.rhs_contract), (dot.lhs_batch, dot.rhs_batch)),
            [dims.ragged], [] if dims.group is None else [dims.group],
        )  # fmt: skip
        structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in op.kind.operands]

        def product(x: Any, w: Any, sizes: Any) -> Any:
            return lax.ragged_dot_general(x, w, sizes, numbers)

        return append_ops(b, program_of(product, *structs), op.operands, op.loc)

    return edit_ops(expand(program, mesh), edit)
