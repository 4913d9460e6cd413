"""Rewrite: an all-reduce of which every device keeps only its own slice is a reduce-scatter.

before: `%2 = all_reduce %1 {data}; %3 = local_slice %2 {data} dim=0`   (no other use of `%2`)
after:  `%3 = reduce_scatter %1 {data} dim=0`

It halves the bytes, and the whole sum never exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.builder import Builder
from spmd.ir.control_flow import producers_of, users_of
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import rewrite_ops


def reduce_scatter(program: Program) -> Program:
    """Fuses each all-reduce with the slices over the same axes that are its only uses."""
    producers = producers_of(program)
    fused: dict[Value, Op] = {}
    for value, uses in users_of(program).items():
        op = producers.get(value)
        if op is None or op.name != "stablehlo.all_reduce" or len(op.results) != 1:
            continue
        if "groups" in op.kind.attrs:
            continue
        slices = [user for user, _ in uses if user is not None]
        dims = {s.kind.attrs.get("dim") for s in slices}
        axes = op.kind.attrs["axes"]
        whole = all(s.name == "spmd.local_slice" and s.kind.attrs["axes"] == axes for s in slices)
        if slices and len(slices) == len(uses) and whole and len(dims) == 1:
            fused[value] = op

    new_operand: dict[Value, Value] = {}

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if op.results and op.results[0] in fused:
            new_operand[op.results[0]] = operands[0]
            return operands
        if op.name != "spmd.local_slice" or op.operands[0] not in fused:
            return None
        sum_ = fused[op.operands[0]].kind.attrs
        attrs = {
            "axes": sum_["axes"],
            "body": sum_["body"],
            "scatter_dimension": op.kind.attrs["dim"],
        }
        return b.op(
            "stablehlo.reduce_scatter", (new_operand[op.operands[0]],), op.kind.results, attrs
        )

    return rewrite_ops(program, rewrite) if fused else program
