"""Reports what devices do step by step: in pipelines (`spmd.pipeline`), and in rings.

In a ring each device has a piece of an operand (attention's keys), and passes pieces on to the next
device while it computes. An op that could do so may instead gather all pieces first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain import words as w
from spmd.explain.costs import Cost, Nested, cost_of, nested, spent
from spmd.explain.prices import Price, Prices
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.registry import rule_of
from spmd.ir.pipelines import SHIFT, Pipeline, pipeline_of
from spmd.ir.program import Op
from spmd.ops.attention_split import ring_reason
from spmd.planning.plan import Plan
from spmd.predict.ops import ring_pieces, ring_seconds, share_seconds
from spmd.predict.timeline import Slot
from spmd.propagation.projection import ring_axes

# Pieces that a device has during a ring: its own, one that it reads, and one that it receives.
AT_ONCE = 3


def _travel_text(travel: Cost | None) -> str:
    """Returns the cost of permutes as text: `704 KiB in 22 permutes, 12 us of waiting`."""
    if travel is None:
        return "0 B in 0 permutes, no waiting"
    waiting = f"{w.seconds_text(travel.seconds)} of" if travel.seconds else "no"
    sends = w.plural(travel.runs, "permute")
    return f"{w.bytes_text(travel.bytes)} in {sends}, {waiting} waiting"


class PipelineRow(NamedTuple):
    """Holds the figures of a pipeline in one run of a program, on one device."""

    of: Pipeline  # its stages, microbatches and schedule
    source: str  # the source line that calls it
    # steps of the forward pass, as the program's loops count; a stage has work in `of.busy_steps`
    steps: int
    seconds: float  # what its loops are predicted to take, forward and backward
    travel: Cost | None  # of sending to neighbour stages; None if nothing is sent
    # bytes of what forward loops make and backward loops read; if steps are computed again for the
    # gradient, also what that makes for one window of steps. 0 without a gradient
    held: int

    @property
    def idle(self) -> float:
        """The share of steps in which a stage has nothing to do, 0 to 1: the bubble."""
        return 1 - self.of.busy_steps / self.steps

    @property
    def title(self) -> str:
        """The pipeline in words: `4 stages over stage, 8 microbatches, schedule gpipe`."""
        of = self.of
        chunks = f" of {of.chunks} chunks" if of.chunks > 1 else ""
        return (
            f"{w.plural(of.stages, 'stage')}{chunks} over {of.axis}, "
            f"{of.microbatches} microbatches, schedule {of.schedule}"
        )

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Rows (name, figures) for a report: bubble, bytes sent, bytes held for the gradient."""
        bubble = (
            f"{w.share_text(self.seconds * self.idle, self.seconds)} of "
            f"{w.seconds_text(self.seconds)} in its loops: "
            f"{self.steps - self.of.busy_steps} of {self.steps} steps fill and drain"
        )
        rows = [("bubble", bubble), ("sent to neighbours", _travel_text(self.travel))]
        if self.held:
            rows.append(("held for the gradient", w.bytes_text(self.held)))
        return tuple(rows)


def pipeline_rows(stages: Stages) -> list[PipelineRow]:
    """Returns the figures of each pipeline of a program, in program order."""
    plan = stages.plan
    outermost = [loop for loop in nested(stages.timeline.slots) if loop.slot.op.is_loop]
    found = w.grouped(
        outermost, lambda loop: (pipeline_of(loop.slot.op.loc.scope), loop.slot.op.loc.trail)
    )
    rows = []
    for (of, source), loops in found.items():
        if of is None:
            continue
        forward = [loop for loop in loops if "transpose(" not in loop.slot.op.loc.scope]
        backward = [loop for loop in loops if "transpose(" in loop.slot.op.loc.scope]
        steps = 0
        for loop in forward:
            runs, windows = loop.slot.runs, _loops_in(loop)
            if of.is_lean and runs == of.busy_steps // of.window and windows:
                steps += max(slot.trips * (slot.runs or 1) for slot in windows)
            else:
                steps += runs or 0
        inside = {id(slot) for loop in loops for slot in loop.slots()}
        shifts = [
            part
            for part in spent(stages.timeline, plan.topology)
            if id(part.slot) in inside
            and part.slot.op.collective
            and SHIFT in part.slot.op.loc.scope
        ]
        held = _passed([loop.slot for loop in forward], [loop.slot for loop in backward])
        again = (_passed(inner[:-1], inner[1:]) for inner in map(_loops_in, backward))
        seconds = sum(loop.slot.seconds for loop in loops)
        travel = cost_of(shifts, plan.mesh, plan.topology) if shifts else None
        figures = steps or of.steps, seconds, travel
        rows.append(PipelineRow(of, source, *figures, held + max(again, default=0)))
    return rows


def _loops_in(loop: Nested) -> list[Slot]:
    return [inner.slot for inner in loop.inside if inner.slot.op.is_loop]


def _passed(makers: Sequence[Slot], readers: Sequence[Slot]) -> int:
    """Returns the bytes of all results of the loops in `makers` that loops in `readers` read."""
    read = {value for slot in readers for value in slot.op.operands}
    made = {
        value: type_.bytes
        for slot in makers
        for value, type_ in zip(slot.op.results, slot.op.kind.results, strict=True)
    }
    return sum(size for value, size in made.items() if value in read)


class RingRow(NamedTuple):
    """Holds figures of equal ops that use, or could use, a ring of devices for an operand."""

    op: str
    source: str
    ops: int  # how many ops are like this
    # axes, pieces: the mesh axes that split the operand, into how many pieces
    axes: str
    pieces: int
    goes_round: bool  # whether pieces are passed round a ring; else they are gathered
    is_zigzag: bool  # whether positions are in zigzag order
    piece: int  # bytes of one device's piece, of all that may go round together
    # exchange, arithmetic: seconds of one op: what going round takes, and what it hides behind
    exchange: float
    arithmetic: float
    # if pieces go round, what all ops of this name at this line send
    travel: Cost | None = None
    # of gathering instead of a ring, or the reverse; None if not asked for, or no plan does so
    other: Price | None = None

    @property
    def title(self) -> str:
        """The op in words: `spmd.attention (3 alike): 8 pieces go round seq in zigzag order`."""
        alike = f" ({self.ops} alike)" if self.ops > 1 else ""
        did = "go round" if self.goes_round else "are gathered over"
        order = " in zigzag order" if self.is_zigzag else ""
        return f"{self.op}{alike}: {self.pieces} pieces {did} {self.axes}{order}"

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Rows (name, figures) for a report: time, bytes sent and held, price of `other`."""
        exchange, arithmetic = w.seconds_text(self.exchange), w.seconds_text(self.arithmetic)
        going = w.bytes_text(min(AT_ONCE, self.pieces) * self.piece)
        gathered = w.bytes_text(self.pieces * self.piece)
        sent = w.bytes_text((self.pieces - 1) * self.piece)
        if self.goes_round:
            held, other = f"{going}; gathered {gathered}", "gathered instead"
        else:
            held, other = f"{gathered}; going round {going}", "going round instead"
        rows = [
            ("time to go round", f"{exchange}, beside {arithmetic} of arithmetic"),
            ("each sends", f"{sent}, gathered or round"),
            ("each holds", held),
        ]
        if self.goes_round:
            rows.append(("in a run", _travel_text(self.travel)))
        if self.other is not None:
            rows.append((other, self.other._replace(bytes=0).run_text))  # links carry the same
        return tuple(rows)


def ring_rows(stages: Stages, prices: Prices | None = None) -> list[RingRow]:
    """Returns figures of ops that use, or could use, a ring, equal ones as one, in program order.

    With `prices`, the first rows get `other`: the price of gathering instead, or of the reverse.
    """
    plan = stages.plan
    found = [
        (row, op, factor)
        for op in plan.program.walk()
        if op.results and op.results[0] in plan.choices and not op.regions and not op.is_mark
        for factor, _ in rule_of(op.kind, op.loc).rings
        if (row := _ring(plan, op, factor)) is not None
    ]
    if not found:
        return []
    exchanges = [part for part in spent(stages.timeline, plan.topology) if part.slot.op.collective]
    rows: list[RingRow] = []
    for row, ((_, op, factor), *others) in w.grouped(found, lambda ring: ring[0]).items():
        travel = other = None
        if row.goes_round:
            reason = ring_reason(row.op)
            own = [
                part
                for part in exchanges
                if part.slot.op.loc.note.startswith(reason) and part.slot.op.loc.trail == row.source
            ]
            travel = cost_of(own, plan.mesh, plan.topology) if own else None
        if prices is not None and len(rows) < prices.most_conflicts:
            other = prices.of_ring(op, factor)
        rows.append(row._replace(ops=1 + len(others), travel=travel, other=other))
    return rows


def _ring(plan: Plan, op: Op, factor: int) -> RingRow | None:
    """Returns the figures of one op's ring factor; None if its pieces cannot go round a ring."""
    rule, mesh, topology = rule_of(op.kind, op.loc), plan.mesh, plan.topology
    assignment = plan.choice(op).assignment
    axes = ring_axes(rule, factor, assignment, mesh.atom_sizes)
    if not axes:
        return None
    going = tuple(axes if i == factor else own for i, own in enumerate(assignment))
    return RingRow(
        op.label,
        op.loc.trail,
        1,
        w.axes_text(axes, mesh),
        mesh.extent(axes),
        bool(assignment[factor]),
        arguments_of(op.kind).get("zigzag", 1) > 1,
        sum(piece.bytes for _, piece in ring_pieces(op.kind, rule, going, mesh)),
        ring_seconds(op.kind, rule, going, mesh, topology),
        share_seconds(op.kind, rule, going, mesh, topology),
    )
