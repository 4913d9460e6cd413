"""Divides the predicted time of one run among its collectives and the user's source lines.

Arithmetic costs the seconds that it takes. A collective costs its seconds less the *hidden* ones:
`Chip.overlap` times the seconds in which arithmetic runs at the same time. Equal layers run the
same source lines, so their costs are summed.
"""

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.words import K
from spmd.ir.control_flow import Index
from spmd.ir.program import Frame, Op, Region, numberless
from spmd.lowering.partition import Partitioned
from spmd.measure.labels import layer_of
from spmd.measure.profile import shares
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axis_refs
from spmd.mesh.topology import Topology
from spmd.predict.ops import Transfer
from spmd.predict.timeline import COMPUTE, Slot, Timeline

MOST = 5  # costs that a report opens with


class Collective(NamedTuple):
    """Describes one collective op of a local program: what it sends, how often, and why."""

    kind: str  # as in `spmd.reshard.comm.KINDS`
    axes: tuple[str, ...]  # the mesh axes (or sub-axes) along which devices transfer
    bytes: int  # that one device sends in one execution, by the algorithm that the backend uses
    # executions in one run of the program (loops multiply)
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: str  # the user's source line, and its caller's
    reason: str  # a sentence: which op needed which sharding, or that the user wrote it
    seconds: float  # predicted time of one execution
    layer: str  # the part of the user's model; see `spmd.measure.labels.layer_of`


def list_collectives(partitioned: Partitioned, topology: Topology) -> tuple[Collective, ...]:
    """Returns the collectives of a local program, and other ops that send, in program order."""
    program, mesh = partitioned.program, partitioned.mesh
    return tuple(
        Collective(
            transfer.kind,
            tuple(str(ref) for ref in axis_refs(transfer.axes, mesh)),
            transfer.sent_bytes(mesh, topology),
            times,
            op.loc.trail,
            op.loc.note if op.collective else f"{op.label} is split over what splits its rows, too",
            transfer.seconds(mesh, topology),
            layer_of(op.loc),
        )
        for op, times in with_runs(program.body, Index(program))
        if (transfer := Transfer.of(op, mesh)) is not None
    )


def with_runs(region: Region, index: Index, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Yields (op, how often it runs) if a region runs `times` times; a loop follows its body."""
    for op in region.ops:
        for inner in op.regions:
            yield from with_runs(inner, index, times * index.runs(op))
        yield op, times


class Total(NamedTuple):
    """Holds what several collectives with something in common do together in one run."""

    like: Collective  # the first of them
    ops: int = 0  # how many collective ops they are
    runs: int = 0  # how often these are executed, all together
    bytes: int = 0  # that one device sends for all of them
    seconds: float = 0.0  # predicted, of all executions one after another


def totals(collectives: Iterable[Collective], look: Callable[[Collective], K]) -> dict[K, Total]:
    """Maps each key that `look` returns to the total of those collectives, most bytes first."""
    found = {
        key: Total(
            alike[0],
            len(alike),
            sum(c.count for c in alike),
            sum(c.bytes * c.count for c in alike),
            sum(c.seconds * c.count for c in alike),
        )
        for key, alike in w.grouped(collectives, look).items()
    }
    order = sorted(found.items(), key=lambda x: (-x[1].bytes, -x[1].seconds, x[1].like.kind))
    return dict(order)


def collective_section(collectives: Sequence[Collective]) -> w.Section:
    """Returns the report's table of collectives: equal ones in one row, with the reason below."""
    rows = [
        (like.kind, ", ".join(like.axes), ops, runs, like.bytes, *sums, (like.source, like.reason))
        for like, ops, runs, *sums in totals(collectives, lambda c: c._replace(layer="")).values()
    ]
    heads = ("kind", "axes", "ops", "runs", "each", "bytes", "time", "source")
    table = w.Table(heads, rows, "bytes", "all_gather data mlp")
    sent = w.bytes_text(sum(c.bytes * c.count for c in collectives))
    said = f"{len(collectives)}, {sent} sent by each device in one run"
    return w.Section("collectives", said, table, "none")


def traffic_table(collectives: Iterable[Collective]) -> w.Table:
    """Lists what collectives do in one run, those of one kind and axes together."""
    found = totals(collectives, lambda c: (c.kind, c.axes)).values()
    rows = [(like.kind, ", ".join(like.axes), *sums) for like, *sums in found]
    return w.Table(("kind", "axes", "ops", "runs", "bytes", "time"), rows)


class Spent(NamedTuple):
    """Holds by how many seconds an op makes a run longer, all of its executions together."""

    slot: Slot  # the op, and when it runs
    seconds: float
    hidden: float  # what arithmetic hides of a collective beyond `seconds`; 0 for arithmetic


def spent(timeline: Timeline, topology: Topology) -> list[Spent]:
    """Returns how much longer each op makes a run; loops and conditionals themselves are left out.

    Ops whose slots overlap in time run at the same time: nothing runs beside a loop, and slots in
    its body have the times of its first iteration. Arithmetic hides collectives; of those that run
    at the same time each counts for its share.
    """
    slots = [slot for slot in timeline.slots if not slot.op.regions]
    made = []
    parts = shares([(slot.lane != COMPUTE, slot.start, slot.end) for slot in slots])
    for slot, (exposed, beside) in zip(slots, parts, strict=True):
        saved = topology.chip.overlap * beside
        own = slot.seconds if slot.lane == COMPUTE else exposed + beside - saved
        made.append(Spent(slot, own * slot.trips, saved * slot.trips))
    return made


class Cost(NamedTuple):
    """Holds the cost of a source line's arithmetic, or of its collectives of one kind and axes."""

    kind: str  # `compute`, `spmd.predict.timeline.MOVES`, or the collective's kind
    axes: str  # the mesh axes along which the collectives send, as `data, model`; empty for compute
    frames: tuple[Frame, ...]  # the user's source line and its caller's, innermost first
    reason: str  # why the largest of the collectives is there; empty of compute
    # ops, runs: how many ops it is, and how often they run together; loops multiply
    ops: int
    runs: int
    bytes: int  # what one device sends for them
    seconds: float  # how much longer they make a run
    hidden: float  # how much of a collective's time is hidden behind arithmetic, seconds

    @property
    def title(self) -> str:
        """The kind, and the axes if there are any: `all_gather over data`, `compute`."""
        return f"{self.kind} over {self.axes}" if self.axes else self.kind

    @property
    def remark(self) -> str:
        """Its counts as text: `24 ops, 12 MiB sent, 0.1 ms more hidden behind compute`."""
        parts = [w.plural(self.ops, "op") + (f" in {self.runs} runs" * (self.runs > self.ops))]
        parts += [f"{w.bytes_text(self.bytes)} sent"] * bool(self.axes)
        is_hidden = self.hidden > self.seconds / 100
        parts += [f"{w.seconds_text(self.hidden)} more hidden behind compute"] * is_hidden
        return ", ".join(parts)


def costs(timeline: Timeline, mesh: Mesh, topology: Topology) -> tuple[Cost, ...]:
    """Returns a run's costs, one for each source line, kind and axes, most seconds first."""
    alike = w.grouped(
        spent(timeline, topology),
        lambda part: (part.slot.lane, part.slot.kind, part.slot.op.loc.user_frames[:2]),
    )
    made = [cost_of(parts, mesh, topology) for parts in alike.values()]
    return tuple(sorted(made, key=lambda cost: -cost.seconds))


def cost_of(parts: Sequence[Spent], mesh: Mesh, topology: Topology) -> Cost:
    """Adds up what ops of the same kind, axes and source line cost; there must be at least one."""
    slots = [part.slot for part in parts]
    longest = max(slots, key=lambda slot: slot.seconds * slot.trips)
    is_compute = slots[0].lane == COMPUTE
    sent = [] if is_compute else [(Transfer.of(slot.op, mesh), slot.trips) for slot in slots]
    return Cost(
        slots[0].kind,
        "" if is_compute else slots[0].lane,
        slots[0].op.loc.user_frames[:2],
        "" if is_compute else numberless(longest.op.loc.note),  # kernels keep notes of exchanges
        len(slots),
        sum(slot.trips for slot in slots),
        sum(each.sent_bytes(mesh, topology) * trips for each, trips in sent if each),
        sum(part.seconds for part in parts),
        sum(part.hidden for part in parts),
    )


def largest(found: Sequence[Cost], seconds: float) -> tuple[str, Sequence[Cost]]:
    """Returns (a title with their share of `seconds`, the first `MOST` costs that are not 0)."""
    most = [cost for cost in found[:MOST] if cost.seconds]
    share = w.share_text(sum(cost.seconds for cost in most), seconds)
    title = f"the {len(most)} largest of {w.plural(len(found), 'cost')}: {share} of the predicted"
    return f"{title} {w.seconds_text(seconds)}", most


def seconds_by_kind(found: Iterable[Cost]) -> dict[str, float]:
    """Maps `compute`, then kinds of collectives, to the seconds of their costs; without zeros."""
    by_kind = {COMPUTE: 0.0}
    for cost in found:
        by_kind[cost.kind] = by_kind.get(cost.kind, 0.0) + cost.seconds
    return {kind: seconds for kind, seconds in by_kind.items() if seconds}


def code_of(found: Iterable[Cost]) -> dict[str, str]:
    """Maps `file:line (function)` to the code in that line, of the frames of costs."""
    frames = dict.fromkeys(frame for cost in found for frame in cost.frames)
    return {str(f): linecache.getline(f.file, f.line).strip() for f in frames}


def code_lines(cost: Cost, code: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns (`file:line (function)`, code in that line) of a cost's frames; code may be ""."""
    return tuple((str(frame), code.get(str(frame), "")) for frame in cost.frames)
