"""Which operands come in pieces that go round, and which could: what the planner weighed."""

from __future__ import annotations

from typing import NamedTuple

from spmd.explain.price import Price
from spmd.explain.prices import Prices
from spmd.explain.words import axes_text, seconds_text
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op
from spmd.planning.cost import ring_seconds
from spmd.planning.plan import Plan
from spmd.predict.arithmetic import arithmetic_seconds
from spmd.propagation.projection import Assignment, ring_axes


class RingRow(NamedTuple):
    """Ops that read all pieces of something, gathered or one after another.

    Attributes:
      op: the op.
      source: the user's source line, and its caller's.
      ops: how many ops are like this.
      axes: what splits it.
      pieces: how many there are.
      goes_round: whether they go round.
      exchange, arithmetic: seconds of one op: what going round takes, and what it hides behind.
      other: what the other way would cost; None if that was not asked, or no plan goes it.
    """

    op: str
    source: str
    ops: int
    axes: str
    pieces: int
    goes_round: bool
    exchange: float
    arithmetic: float
    other: Price | None = None


def ring_rows(plan: Plan, prices: Prices | None = None) -> list[RingRow]:
    """The ops of a plan whose operands may go round, in program order.

    With `prices`, the first few get the price of the other way.
    """
    groups: dict[RingRow, list[tuple[Op, int]]] = {}
    for op in plan.program.walk():
        choice = plan.choices.get(op.results[0]) if op.results else None
        if choice is not None and not op.regions and not op.is_mark:
            for number, _ in rule_of(op.kind, op.loc).rings:
                row = _row(plan, op, number, choice.assignment)
                if row is not None:
                    groups.setdefault(row, []).append((op, number))
    rows = [row._replace(ops=len(alike)) for row, alike in groups.items()]
    if prices is not None:
        firsts = [alike[0] for alike in groups.values()][: prices.most_conflicts]
        for i, first in enumerate(firsts):
            rows[i] = rows[i]._replace(other=prices.alternatives.of_ring(*first))
    return rows


def _row(plan: Plan, op: Op, number: int, assignment: Assignment) -> RingRow | None:
    """What there is to say of one op; None if its pieces cannot go round."""
    rule, mesh, topology = rule_of(op.kind, op.loc), plan.mesh, plan.topology
    axes = ring_axes(rule, number, assignment, mesh.atom_sizes)
    if not axes:
        return None
    split = mesh.extent({a for own in assignment for a in own})
    going = tuple(axes if i == number else own for i, own in enumerate(assignment))
    return RingRow(
        op.label,
        op.loc.trail,
        1,
        axes_text(axes, mesh),
        mesh.extent(axes),
        bool(assignment[number]),
        ring_seconds(op.kind, rule, going, mesh, topology),
        arithmetic_seconds(op.kind, topology) / split,
    )


def ring_text(row: RingRow) -> list[str]:
    """What to say of a row: what was done, and what the other way would cost."""
    more = f" ({row.ops} alike)" if row.ops > 1 else ""
    did = f"{row.pieces} pieces go round {row.axes}" if row.goes_round else f"gathers {row.axes}"
    lines = [
        f"{row.op} at {row.source}{more}: {did}; "
        f"{seconds_text(row.exchange)} to go round, {seconds_text(row.arithmetic)} of arithmetic"
    ]
    other = "gathered" if row.goes_round else "going round"
    if row.other is None:
        return lines
    more = "more" if row.other.seconds > 0 else "less"  # bytes on the links are the same
    return [*lines, f"  {other} instead: {seconds_text(abs(row.other.seconds))} {more}"]
