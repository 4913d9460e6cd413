"""Where the time of a run goes: what makes it longer, by source line, the largest first.

Arithmetic costs the time that it takes. Of a collective, the part beside which arithmetic runs is
hidden: it costs only as much as the two slow each other. Layers run the same source lines, and so
they count together.
"""

from __future__ import annotations

import linecache
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from spmd.explain.collectives import sent_bytes
from spmd.explain.words import bytes_text, plural, seconds_text, share_text
from spmd.ir.program import Frame, numberless
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.timeline import COMPUTE, Slot, Timeline

MOST = 5
"""Costs that a report opens with; the largest collective follows where none is among them."""


class Cost(NamedTuple):
    """What one source line costs in compute, or in one kind of collective.

    Attributes:
      kind: `compute`, or the collective's kind.
      axes: the mesh axes over which a collective goes, as text.
      frames: the user's source line and its caller's, innermost first.
      reason: why the largest of the collectives is there.
      ops: how many ops it is.
      runs: how often they run together; loops multiply.
      bytes: what one device sends for them.
      seconds: how much longer they make a run.
      hidden: how much of a collective's time is hidden behind arithmetic, seconds.
    """

    kind: str
    axes: str
    frames: tuple[Frame, ...]
    reason: str
    ops: int
    runs: int
    bytes: int
    seconds: float
    hidden: float

    @property
    def title(self) -> str:
        """`all_gather over data`."""
        return f"{self.kind} over {self.axes}" if self.axes else self.kind

    @property
    def remark(self) -> str:
        """`24 ops, 12 MiB sent, 0.1 ms more hidden behind compute`."""
        parts = [plural(self.ops, "op") + (f" in {self.runs} runs" * (self.runs > self.ops))]
        parts += [f"{bytes_text(self.bytes)} sent"] * (self.kind != COMPUTE)
        parts += [f"{seconds_text(self.hidden)} more hidden behind compute"] * (self.hidden > 0)
        return ", ".join(parts)


class Spent(NamedTuple):
    """What a slot adds to a run, all its runs together.

    Attributes:
      slot: the slot.
      seconds: how much longer it makes the run.
      hidden: how much of a collective's time is hidden behind arithmetic.
    """

    slot: Slot
    seconds: float
    hidden: float


def spent(timeline: Timeline, topology: Topology) -> list[Spent]:
    """What each slot but loops adds to a run."""
    slots = [slot for slot in timeline.slots if not slot.op.regions]
    hidden = [topology.chip.overlap * beside for beside in _seconds_beside(slots)]
    return [
        Spent(slot, (slot.seconds - saved) * slot.trips, saved * slot.trips)
        for slot, saved in zip(slots, hidden, strict=True)
    ]


def costs(timeline: Timeline, mesh: Mesh, topology: Topology) -> tuple[Cost, ...]:
    """What a run's time is spent on, the largest cost first."""
    found: dict[object, list[Spent]] = {}
    for part in spent(timeline, topology):
        key = (part.slot.lane, part.slot.kind, part.slot.op.loc.user_frames[:2])
        found.setdefault(key, []).append(part)
    made = [_cost(members, mesh, topology) for members in found.values()]
    return tuple(sorted(made, key=lambda cost: -cost.seconds))


def largest(found: Sequence[Cost], seconds: float) -> tuple[str, tuple[Cost, ...]]:
    """The costs that a report opens with, under their title.

    Args:
      found: all costs, the largest first.
      seconds: predicted time of a run.
    """
    most = [cost for cost in found[:MOST] if cost.seconds]
    title = f"the {len(most)} largest of {plural(len(found), 'cost')}"
    if all(cost.kind == COMPUTE for cost in most):
        more = [cost for cost in found if cost.kind != COMPUTE and cost.seconds][:1]
        title += ", and the largest collective" * len(more)
        most += more
    share = share_text(sum(cost.seconds for cost in most), seconds)
    return f"{title}: {share} of the predicted {seconds_text(seconds)}", tuple(most)


def _cost(members: Sequence[Spent], mesh: Mesh, topology: Topology) -> Cost:
    """What slots of one lane, kind and source line cost."""
    slots = [part.slot for part in members]
    longest = max(slots, key=lambda slot: slot.seconds * slot.trips)
    is_compute = longest.lane == COMPUTE
    return Cost(
        longest.kind,
        "" if is_compute else longest.lane,
        longest.op.loc.user_frames[:2],
        numberless(longest.op.loc.note),
        len(slots),
        sum(slot.trips for slot in slots),
        0
        if is_compute
        else sum(sent_bytes(slot.op, mesh, topology) * slot.trips for slot in slots),
        sum(part.seconds for part in members),
        sum(part.hidden for part in members),
    )


def _seconds_beside(slots: Sequence[Slot]) -> list[float]:
    """For each slot the seconds in which arithmetic runs beside it: of collectives alone.

    Nothing runs beside a loop, and what is inside it has the times of its first iteration: so slots
    whose times overlap do run side by side.
    """
    busy = sorted((slot.start, slot.end) for slot in slots if slot.lane == COMPUTE)
    starts = [start for start, _ in busy]
    before = list(accumulate((end - start for start, end in busy), initial=0.0))

    def busy_until(moment: float) -> float:
        # Arithmetic that began before, without what the last of it does afterwards.
        count = bisect_right(starts, moment)
        return before[count] - max(0.0, busy[count - 1][1] - moment) if count else 0.0

    return [
        0.0 if slot.lane == COMPUTE else busy_until(slot.end) - busy_until(slot.start)
        for slot in slots
    ]


def seconds_by_kind(found: Iterable[Cost]) -> dict[str, float]:
    """What compute, and each kind of collective, costs altogether; compute first."""
    totals = {COMPUTE: 0.0}
    for cost in found:
        totals[cost.kind] = totals.get(cost.kind, 0.0) + cost.seconds
    return {kind: seconds for kind, seconds in totals.items() if seconds}


def code_lines(cost: Cost) -> tuple[tuple[str, str], ...]:
    """(place, the text of that line) of a cost's source lines; no text where there is no file."""
    return tuple(
        (str(frame), linecache.getline(frame.file, frame.line).strip()) for frame in cost.frames
    )
