"""The largest values inside a program: the results of ops, and copies in other shardings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spmd.ir.program import Op, Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.sharding import Sharding
from spmd.pipeline import Stages
from spmd.planning.plan import Plan


class LargeValue(NamedTuple):
    """Values made inside the program that are alike.

    Attributes:
      op: the op that makes the value, or that reads the copy.
      copy: whether it is a copy, made because an op needs the value in another sharding.
      type: its whole type.
      sharding: how it lies on the mesh.
      local: the type of one device's piece.
      source: the user's source line.
      values: how many are like this.
    """

    op: str
    copy: bool
    type: TensorType
    sharding: Sharding
    local: TensorType
    source: str
    values: int


def largest_values(stages: Stages, n: int = 12) -> tuple[LargeValue, ...]:
    """The `n` largest values by what one device holds of them, the largest first."""
    plan = stages.plan
    found: dict[LargeValue, int] = {}

    def note(op: Op, copy: bool, value: Value, sharding: Sharding) -> None:
        type_ = plan.program.types[value]
        local = local_type(type_, sharding, plan.mesh)
        row = LargeValue(op.label, copy, type_, sharding, local, op.loc.trail, 1)
        found[row] = found.get(row, 0) + 1

    copies: set[tuple[Value, Sharding]] = set()
    for op in plan.program.walk():
        for value in op.results:
            if (state := plan.states[value]) is not None:
                note(op, False, value, state)
        for value, wanted in _demands(plan, op):
            if wanted != plan.states[value] and (value, wanted) not in copies:
                copies.add((value, wanted))
                note(op, True, value, wanted)
    rows = [row._replace(values=count) for row, count in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.local.bytes)[:n])


def _demands(plan: Plan, op: Op) -> Iterator[tuple[Value, Sharding]]:
    """(operand, sharding that the op wants it in), for operands that have a sharding at all."""
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is None:
        return
    for value, wanted in zip(op.operands, choice.operands, strict=False):
        if plan.states[value] is not None:
            yield value, wanted
