"""A run as a trace for ui.perfetto.dev: the predicted timeline, and the measured step beside it.

Format: Trace Event Format (Google), complete events (`ph` X) with times in microseconds; a process
is what was predicted or measured, a thread is a lane of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spmd.explain.facts import Facts
from spmd.explain.measured import Worked
from spmd.explain.words import seconds_text
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.labels import COLLECTIVES, Label, label_of
from spmd.predict.timeline import COMPUTE, Slot

MOST_SLOTS = 100_000
"""Up to so many slots every iteration of every loop is written; with more, the first ones alone."""

PREDICTED, MEASURED = 1, 2
"""Numbers of the two processes."""


class Slice(NamedTuple):
    """One rectangle of a trace.

    Attributes:
      lane: the name of its row.
      name: what is written on it.
      start, end: seconds.
      more: what is shown when it is selected.
    """

    lane: str
    name: str
    start: float
    end: float
    more: dict[str, Any]


def trace_of(facts: Facts) -> dict[str, Any]:
    """The trace of a program, as JSON's objects."""
    on = f"{facts.title} on {facts.plan.mesh}"
    seconds = seconds_text(facts.timeline.scheduled_seconds)
    events = _process(PREDICTED, f"predicted: {on}, {seconds}", list(_predicted(facts)))
    if facts.measured is not None and facts.measured.step:
        step = facts.measured.step
        title = f"measured: {on}, device {step[0].event.device}"
        events += _process(MEASURED, title, list(_measured(step)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, title: str, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(s.lane for s in slices), 1)}
    names = [("process_name", 0, title), *(("thread_name", n, lane) for lane, n in lanes.items())]
    heads = [
        {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
        for what, tid, name in names
    ]
    return heads + [_event(pid, lanes[s.lane], s) for s in slices]


def _event(pid: int, tid: int, s: Slice) -> dict[str, Any]:
    # Whole nanoseconds, so that neighbours still touch and do not overlap.
    start, end = round(s.start * 1e9), round(s.end * 1e9)
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "pid": pid, "tid": tid, "name": s.name, **times, "args": s.more}


# ---------------------------------------------------------------------------------------------
# What was predicted.


def _predicted(facts: Facts) -> Iterator[Slice]:
    slots = facts.timeline.slots
    whole = sum(slot.trips for slot in slots if not slot.op.regions) <= MOST_SLOTS
    labels = {id(slot.op): label_of(slot.op, facts.plan.mesh) for slot in slots}
    yield from _region(slots, labels, 0.0, whole)


def _region(
    slots: Sequence[Slot], labels: Mapping[int, Label], shift: float, whole: bool
) -> Iterator[Slice]:
    """The slots of a region, those of its loops for every iteration; all of them later by `shift`.

    Args:
      slots: a loop before what is inside it.
      labels: id of an op -> what it is.
      shift: seconds.
      whole: whether all iterations are written, and not only the first.
    """
    at = 0
    while at < len(slots):
        slot = slots[at]
        start, end = slot.start + shift, slot.end + shift
        inside = next(
            (i for i in range(at + 1, len(slots)) if slots[i].depth <= slot.depth), len(slots)
        )
        if not slot.op.regions:
            label = labels[id(slot.op)]
            more = {"source": slot.op.loc.trail, "layer": label.layer, "kind": label.kind}
            if slot.op.collective:
                more["reason"] = slot.op.loc.note
            yield Slice(slot.lane, label.collective or slot.op.label, start, end, more)
        else:
            runs = UNKNOWN_TRIPS if slot.runs is None else slot.runs
            name = f"loop ×{runs}" if slot.op.is_loop else "conditional"
            lane = "loops" if slot.depth == 0 else f"loops in {slot.depth} loops"
            yield Slice(lane, name, start, end, {"source": slot.op.loc.trail})
            once = slot.seconds / max(runs, 1)
            for turn in range(runs if whole else min(runs, 1)):
                yield from _region(slots[at + 1 : inside], labels, shift + turn * once, whole)
            if not whole and runs > 1:
                name = f"{runs - 1} more iterations like the first"
                yield Slice(COMPUTE, name, start + once, end, {})
        at = inside


# ---------------------------------------------------------------------------------------------
# What was measured.


def _measured(step: Sequence[Worked]) -> Iterator[Slice]:
    """Collectives and all else on lanes of their own, several where things run side by side."""
    ends: dict[str, list[float]] = {"compute": [], "collectives": []}
    for work in sorted(step, key=lambda work: work.event.start):
        event, label = work.event, work.label
        lane = "collectives" if label.kind == COLLECTIVES else "compute"
        free = next((i for i, end in enumerate(ends[lane]) if end <= event.start), len(ends[lane]))
        ends[lane][free : free + 1] = [event.end]
        more = {"op": event.op, "layer": label.layer, "kind": label.kind}
        if label.collective:
            more["hidden"] = seconds_text(work.hidden)
        row = f"{lane} {free + 1}" if free else lane
        yield Slice(row, label.collective or event.name, event.start, event.end, more)
