"""Which operands come in pieces that go round, and which could: what the planner weighed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain.collectives import sent_bytes
from spmd.explain.costs import spent
from spmd.explain.pipelines import sent_text
from spmd.explain.price import Price
from spmd.explain.prices import Prices
from spmd.explain.words import axes_text, bytes_text, seconds_text
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op
from spmd.ops.attention_split import ring_reason
from spmd.planning.plan import Plan
from spmd.predict.ops import ring_pieces, ring_seconds, share_seconds
from spmd.propagation.projection import Assignment, ring_axes

AT_ONCE = 3
"""Pieces that a device has while they go round: its own, one that it reads, and one that comes."""


class Travel(NamedTuple):
    """What goes round in one run, by the program of one device.

    Attributes:
      sends: how many times it sends a piece on.
      sent: bytes of these, in all.
      waited: how much longer they make a run, seconds; the rest is hidden behind arithmetic.
    """

    sends: int
    sent: int
    waited: float


class RingRow(NamedTuple):
    """Ops that read all pieces of something, gathered or one after another.

    Attributes:
      op: the op.
      source: the user's source line, and its caller's.
      ops: how many ops are like this.
      axes: what splits it.
      pieces: how many there are.
      goes_round: whether they go round.
      is_zigzag: whether positions are in zigzag order.
      is_causal: whether positions see none behind them.
      piece: bytes of one device's piece, of all that may go round together.
      exchange, arithmetic: seconds of one op: what going round takes, and what it hides behind.
      travel: of those that go round, all ops of this name at this line together.
      other: what the other way would cost; None if that was not asked, or no plan goes it.
    """

    op: str
    source: str
    ops: int
    axes: str
    pieces: int
    goes_round: bool
    is_zigzag: bool
    is_causal: bool
    piece: int
    exchange: float
    arithmetic: float
    travel: Travel | None = None
    other: Price | None = None

    @property
    def held_round(self) -> int:
        """Bytes of what a device has at a time, where pieces go round."""
        return min(AT_ONCE, self.pieces) * self.piece

    @property
    def held_gathered(self) -> int:
        """Bytes of all pieces."""
        return self.pieces * self.piece

    @property
    def sent_once(self) -> int:
        """Bytes that a device sends for one op, either way."""
        return (self.pieces - 1) * self.piece

    @property
    def title(self) -> str:
        """`spmd.attention (3 alike): 8 pieces go round seq in zigzag order`."""
        alike = f" ({self.ops} alike)" if self.ops > 1 else ""
        did = "go round" if self.goes_round else "are gathered over"
        order = " in zigzag order" if self.is_zigzag else ""
        return f"{self.op}{alike}: {self.pieces} pieces {did} {self.axes}{order}"

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(what, figures) for a report."""
        held = bytes_text(self.held_round), bytes_text(self.held_gathered)
        rows = [
            (
                "time to go round",
                f"{seconds_text(self.exchange)}, beside {seconds_text(self.arithmetic)} of "
                "arithmetic",
            ),
            ("each sends", f"{bytes_text(self.sent_once)}, gathered or round"),
            (
                "each holds",
                f"{held[0]}; gathered {held[1]}"
                if self.goes_round
                else f"{held[1]}; going round {held[0]}",
            ),
        ]
        if self.travel is not None:
            sends, sent, waited = self.travel
            rows.append(("in a run", sent_text(sent, sends, waited)))
        if self.other is not None:
            more = "more" if self.other.seconds > 0 else "less"  # bytes on the links are the same
            other = "gathered instead" if self.goes_round else "going round instead"
            rows.append((other, f"{seconds_text(abs(self.other.seconds))} {more}"))
        return tuple(rows)


def ring_rows(stages: Stages, prices: Prices | None = None) -> list[RingRow]:
    """The ops of a program whose operands may go round, in program order.

    With `prices`, the first few get the price of the other way.
    """
    plan = stages.plan
    groups: dict[RingRow, list[tuple[Op, int]]] = {}
    for op in plan.program.walk():
        choice = plan.choices.get(op.results[0]) if op.results else None
        if choice is not None and not op.regions and not op.is_mark:
            for number, _ in rule_of(op.kind, op.loc).rings:
                row = _row(plan, op, number, choice.assignment)
                if row is not None:
                    groups.setdefault(row, []).append((op, number))
    rows = [row._replace(ops=len(alike)) for row, alike in groups.items()]
    if any(row.goes_round for row in rows):
        rows = _with_travels(rows, stages)
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
    going = tuple(axes if i == number else own for i, own in enumerate(assignment))
    said = arguments_of(op.kind)
    return RingRow(
        op.label,
        op.loc.trail,
        1,
        axes_text(axes, mesh),
        mesh.extent(axes),
        bool(assignment[number]),
        said.get("zigzag", 1) > 1,
        bool(said.get("causal")),
        sum(piece.bytes for _, piece in ring_pieces(op.kind, rule, going, mesh)),
        ring_seconds(op.kind, rule, going, mesh, topology),
        share_seconds(op.kind, rule, going, mesh, topology),
    )


def _with_travels(rows: Sequence[RingRow], stages: Stages) -> list[RingRow]:
    """Rows with what the program of one device sends for them."""
    mesh, topology = stages.plan.mesh, stages.plan.topology
    parts = [part for part in spent(stages.timeline, topology) if part.slot.op.collective]

    def of(row: RingRow) -> RingRow:
        if not row.goes_round:
            return row
        reason = ring_reason(row.op)
        own = [
            part
            for part in parts
            if part.slot.op.loc.note.startswith(reason) and part.slot.op.loc.trail == row.source
        ]
        sends = sum(part.slot.trips for part in own)
        sent = sum(part.slot.trips * sent_bytes(part.slot.op, mesh, topology) for part in own)
        return row._replace(travel=Travel(sends, sent, sum(part.seconds for part in own)))

    return [of(row) for row in rows]
