"""Reports what devices do step by step: in pipelines (`spmd.pipeline`), and in rings.

In a ring each device has a piece of an operand (attention's keys), and passes pieces on to the next
device while it computes. An op that could do so may instead gather all pieces first.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain import words as w
from spmd.explain.costs import Cost, cost_of, spent
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.registry import rule_of
from spmd.ir.pipelines import SHIFT, Pipeline, pipeline_of
from spmd.ir.program import Op
from spmd.planning.plan import Plan
from spmd.predict.ops import ring_pieces, ring_seconds, share_seconds
from spmd.propagation.projection import ring_axes

# Pieces that a device has during a ring: its own, one that it reads, and one that it receives.
AT_ONCE = 3


class PipelineRow(NamedTuple):
    """Holds the figures of a pipeline in one run of a program, on one device."""

    of: Pipeline  # its stages, microbatches and schedule
    source: str  # the source line that calls it
    seconds: float  # what its loops are predicted to take, forward and backward
    travel: Cost | None  # of sending to neighbour stages; None if nothing is sent

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
    def item(self) -> w.Item:
        """What a report says of the pipeline: its bubble, and what is sent to neighbour stages."""
        steps, idle = self.of.steps, self.of.steps - self.of.busy_steps
        bubble = (
            f"{w.share_text(idle, steps)} of {w.seconds_text(self.seconds)} in its loops: "
            f"{idle} of {steps} steps fill and drain"
        )
        rows = [("bubble", bubble)]
        if (travel := self.travel) is not None:
            sent = f"{w.bytes_text(travel.bytes)} in {w.plural(travel.runs, 'permute')}"
            waiting = f"{w.seconds_text(travel.seconds)} of waiting"
            rows.append(("sent to neighbours", f"{sent}, {waiting}"))
        return w.Item(self.title, self.source, rows)


def pipeline_rows(stages: Stages) -> list[PipelineRow]:
    """Returns the figures of each pipeline of a program, in program order."""
    plan, timeline = stages.plan, stages.timeline

    def place(op: Op) -> tuple[Pipeline | None, str]:
        return pipeline_of(op.loc.scope), op.loc.trail

    loops = [slot for slot in timeline.slots if slot.op.is_loop and slot.depth == 0]
    tops = [at for at, slot in enumerate(timeline.slots) if slot.depth == 0]
    around: dict[int, Op] = {}  # a slot -> the op of depth 0 that it is inside of, or is
    for at, end in pairwise([*tops, len(timeline.slots)]):
        around |= dict.fromkeys(map(id, timeline.slots[at:end]), timeline.slots[at].op)
    shifts = w.grouped(
        (
            part
            for part in spent(timeline, plan.topology)
            if part.slot.op.collective and SHIFT in part.slot.op.loc.scope
        ),
        lambda part: place(around[id(part.slot)]),
    )
    return [
        PipelineRow(
            of,
            source,
            sum(slot.seconds for slot in alike),
            cost_of(parts, plan.mesh, plan.topology)
            if (parts := shifts.get((of, source)))
            else None,
        )
        for (of, source), alike in w.grouped(loops, lambda slot: place(slot.op)).items()
        if of is not None
    ]


def rings(plan: Plan) -> w.Section:
    """Says of ops that use, or could use, a ring of devices what is sent and held."""
    found = Counter(
        item
        for op in plan.program.walk()
        if op.results and op.results[0] in plan.choices and not op.regions and not op.is_mark
        for factor, _ in rule_of(op.kind, op.loc).rings
        if (item := _ring(plan, op, factor)) is not None
    )
    items = [
        item._replace(title=item.title + f" ({count} alike)" * (count > 1))
        for item, count in found.items()
    ]
    return w.Section("rings", "", items)


def _ring(plan: Plan, op: Op, factor: int) -> w.Item | None:
    """Returns a ring factor's time and bytes, round and gathered; None if it cannot go round."""
    rule, mesh, topology = rule_of(op.kind, op.loc), plan.mesh, plan.topology
    assignment = plan.choice(op).assignment
    axes = ring_axes(rule, factor, assignment, mesh.atom_sizes)
    if not axes:
        return None
    round_ = tuple(axes if i == factor else own for i, own in enumerate(assignment))
    pieces, goes_round = mesh.extent(axes), bool(assignment[factor])
    # Bytes of one device's piece, of all that may go round together.
    piece = sum(piece.bytes for _, piece in ring_pieces(op.kind, rule, round_, mesh))
    took, arithmetic, sent, going, gathered = (
        w.seconds_text(ring_seconds(op.kind, rule, round_, mesh, topology)),
        w.seconds_text(share_seconds(op.kind, rule, round_, mesh, topology)),
        *(w.bytes_text(n * piece) for n in (pieces - 1, min(AT_ONCE, pieces), pieces)),
    )
    did = "go round" if goes_round else "are gathered over"
    order = " in zigzag order" if arguments_of(op.kind).get("zigzag", 1) > 1 else ""
    held = f"{going}; gathered {gathered}" if goes_round else f"{gathered}; going round {going}"
    rows = (
        ("time to go round", f"{took}, beside {arithmetic} of arithmetic"),
        ("each sends", f"{sent}, gathered or round"),
        ("each holds", held),
    )
    title = f"{op.label}: {pieces} pieces {did} {w.axes_text(axes, mesh)}{order}"
    return w.Item(title, op.loc.trail, rows)
