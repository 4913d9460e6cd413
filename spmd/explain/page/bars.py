"""The predicted timeline as bars to draw: lanes of links and compute, loops as one iteration.

`spmd.predict.timeline` says what runs when; here it only gets names, and loops get bodies whose
times are their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.mesh.mesh import Mesh
from spmd.predict.timeline import COMPUTE, Slot, Timeline


class Segment(NamedTuple):
    """Something that takes time.

    Attributes:
      lanes: `compute`, or the names of the mesh axes whose links are busy.
      kind: `compute`, or the collective's kind.
      label: what it is: an op, or a collective and what it moves.
      group: the user's source line and its caller's; `in f` for several lines of one function.
      start: when it begins, seconds after the run, or the loop's iteration, began.
      seconds: how long it takes.
      ops: how many ops are drawn as this one.
    """

    lanes: tuple[str, ...]
    kind: str
    label: str
    group: str
    start: float
    seconds: float
    ops: int = 1

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.seconds


class Loop(NamedTuple):
    """A loop, of whose equal iterations one is shown; or a conditional.

    Attributes:
      title: how often it runs: `loop ×4`.
      place: the user's source line, and its caller's.
      start: when its first iteration begins.
      seconds: all iterations together.
      body: one iteration, times from its own beginning.
    """

    title: str
    place: str
    start: float
    seconds: float
    body: Bars


class Bars(NamedTuple):
    """What happens in a region, in order.

    Attributes:
      segments: ops and collectives outside of inner loops.
      loops: the loops.
      seconds: all of it.
    """

    segments: tuple[Segment, ...]
    loops: tuple[Loop, ...]
    seconds: float

    def lane_seconds(self, lane: str) -> float:
        """How long a lane is busy, loops included."""
        return sum(s.seconds for s in self.flat() if lane in s.lanes)

    def flat(self) -> Iterator[Segment]:
        """Every segment, those of a loop stretched from one iteration to all."""
        yield from self.segments
        for loop in self.loops:
            if loop.body.seconds:
                scale = loop.seconds / loop.body.seconds
                for s in loop.body.flat():
                    start = loop.start + s.start * scale
                    yield s._replace(start=start, seconds=s.seconds * scale)


def bars_of(timeline: Timeline, mesh: Mesh) -> Bars:
    """The predicted run of a program on a mesh, as bars."""
    waiting = list(reversed(timeline.slots))
    return _bars(waiting, mesh, 0, 0.0, timeline.scheduled_seconds)


def _bars(waiting: list[Slot], mesh: Mesh, depth: int, begin: float, seconds: float) -> Bars:
    """Takes the slots of one region off the end of `waiting`, with those of its loops."""
    segments: list[Segment] = []
    loops: list[Loop] = []
    while waiting and waiting[-1].depth >= depth:
        slot = waiting.pop()
        if not slot.op.regions:
            segments.append(_segment(slot, mesh, begin))
            continue
        once = slot.seconds / ((UNKNOWN_TRIPS if slot.runs is None else slot.runs) or 1)
        body = _bars(waiting, mesh, depth + 1, slot.start, once)
        place = slot.op.loc.trail or "an unknown place"
        loops.append(Loop(_trips_text(slot), place, slot.start - begin, slot.seconds, body))
    return Bars(tuple(segments), tuple(loops), seconds)


def _trips_text(slot: Slot) -> str:
    if not slot.op.is_loop:
        return "conditional"
    return "loop, taken as ×16" if slot.runs is None else f"loop ×{slot.runs}"


def _segment(slot: Slot, mesh: Mesh, begin: float) -> Segment:
    op, start = slot.op, slot.start - begin
    if slot.lane == COMPUTE:
        return Segment((COMPUTE,), COMPUTE, op.label, op.loc.trail, start, slot.seconds)
    axes = dict.fromkeys(mesh.axis_names[mesh.atoms[a].axis] for a in op.kind.attrs["axes"])
    label = f"{op.collective} over {slot.lane}"
    return Segment(tuple(axes), op.collective, label, op.loc.trail, start, slot.seconds)


def merged(segments: Sequence[Segment], least: float) -> list[Segment]:
    """Fewer segments, to draw: neighbours of one kind and function are one, and all that are short.

    Args:
      segments: any.
      least: seconds below which a segment is joined to the one before it in its lane, if that is
        of the same kind and not further away.
    """
    last: dict[tuple[str, ...], int] = {}
    made: list[Segment] = []
    for s in sorted(segments, key=lambda s: s.start):
        joint = _joint(made[last[s.lanes]], s, least) if s.lanes in last else None
        if joint is None:
            last[s.lanes] = len(made)
            made.append(s)
        else:
            made[last[s.lanes]] = joint
    return made


def _joint(before: Segment, after: Segment, least: float) -> Segment | None:
    """Two neighbours of one lane as one segment, if they belong together."""
    if before.kind != after.kind or after.start - before.end > least / 4:
        return None
    group = before.group if before.group == after.group else ""
    if not group and before.kind == COMPUTE:
        names = functions_of(after.group)
        common = next((name for name in functions_of(before.group) if name in names), None)
        group = f"in ({common})" if common is not None else ""
    if not group and min(before.seconds, after.seconds) >= least:
        return None
    return before._replace(
        label=before.label if before.label == after.label else "",
        group=group,
        seconds=after.end - before.start,
        ops=before.ops + after.ops,
    )


def functions_of(group: str) -> tuple[str, ...]:
    """The functions of a source line and its caller, the caller first, without `<locals>`."""
    names = re.findall(r"\(([^()]*)\)", group)
    return tuple(name.rpartition(".")[2] for name in reversed(names))
