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
from spmd.predict.ops import Transfer
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


class Bars(NamedTuple):
    """What happens in a region, in order: in a program, a branch, or one iteration of a loop.

    Attributes:
      segments: ops and collectives outside of inner loops.
      loops: the loops and conditionals, of whose equal iterations one is shown.
      once: seconds of all of it, once.
      start: when it begins first, seconds after what is around it began.
      seconds: all iterations together.
      title: of a loop, how often it runs: `loop ×4`.
      place: of a loop, the user's source line and its caller's.
    """

    segments: tuple[Segment, ...]
    loops: tuple[Bars, ...]
    once: float
    start: float
    seconds: float
    title: str = ""
    place: str = ""

    def lane_seconds(self, lane: str) -> float:
        """How long a lane is busy in one iteration, inner loops included."""
        return sum(s.seconds for s in self.flat() if lane in s.lanes)

    def flat(self) -> Iterator[Segment]:
        """Every segment of one iteration, those of inner loops stretched to all of theirs."""
        yield from self.segments
        for loop in self.loops:
            scale = loop.seconds / loop.once if loop.once else 0.0
            for s in loop.flat():
                yield s._replace(start=loop.start + s.start * scale, seconds=s.seconds * scale)


def bars_of(timeline: Timeline, mesh: Mesh) -> Bars:
    """The predicted run of a program on a mesh, as bars."""
    segments, loops = _region(list(reversed(timeline.slots)), mesh, 0, 0.0)
    whole = timeline.scheduled_seconds
    return Bars(segments, loops, whole, 0.0, whole)


def _region(
    waiting: list[Slot], mesh: Mesh, depth: int, begin: float
) -> tuple[tuple[Segment, ...], tuple[Bars, ...]]:
    """Takes the slots of one region off the end of `waiting`, with those of its loops."""
    segments: list[Segment] = []
    loops: list[Bars] = []
    while waiting and waiting[-1].depth >= depth:
        slot = waiting.pop()
        if not slot.op.regions:
            segments.append(_segment(slot, mesh, begin))
            continue
        inside = _region(waiting, mesh, depth + 1, slot.start)
        once = slot.seconds / ((UNKNOWN_TRIPS if slot.runs is None else slot.runs) or 1)
        trips = "loop, taken as ×16" if slot.runs is None else f"loop ×{slot.runs}"
        title = trips if slot.op.is_loop else "conditional"
        place = slot.op.loc.trail or "an unknown place"
        loops.append(Bars(*inside, once, slot.start - begin, slot.seconds, title, place))
    return tuple(segments), tuple(loops)


def _segment(slot: Slot, mesh: Mesh, begin: float) -> Segment:
    op, start = slot.op, slot.start - begin
    if slot.lane == COMPUTE:
        return Segment((COMPUTE,), COMPUTE, op.label, op.loc.trail, start, slot.seconds)
    transfer = Transfer.of(op, mesh)
    atoms = transfer.axes if transfer else ()
    axes = dict.fromkeys(mesh.axis_names[mesh.atoms[a].axis] for a in atoms)
    label = f"{slot.kind} over {slot.lane}"
    return Segment(tuple(axes), slot.kind, label, op.loc.trail, start, slot.seconds)


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
