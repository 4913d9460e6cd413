"""Makes a trace for ui.perfetto.dev of the predicted timeline, and of a measured step.

Format: Trace Event Format (Google), complete events (`ph` X) with times in microseconds. The two
are processes of the trace; compute, links and loops (lanes) are threads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from spmd.explain.data import PlanReport, PlanSlot, loop_text, occurrences
from spmd.explain.measured import Worked
from spmd.explain.words import plural, seconds_text
from spmd.measure.labels import COLLECTIVES

MOST_SLOTS = 100_000
"""Of a run of more ops than this, all iterations counted, the first ones are written, stretched."""

PREDICTED, MEASURED = 1, 2  # numbers of the trace's two processes

Slice = tuple[str, str, float, float, dict[str, Any]]
"""A rectangle: (lane, name, start and end in seconds, what is shown when it is selected)."""


def trace_of(report: PlanReport, step: Sequence[Worked] = ()) -> dict[str, Any]:
    """Returns a program's trace as data for `json.dump`: predicted, and a measured `step`."""
    on, slots = f"{report.title} on {report.mesh}", report.timeline.slots
    seconds = seconds_text(report.timeline.scheduled_seconds)
    whole = sum(slot.trips for slot in slots if not slot.opens) <= MOST_SLOTS
    title = f"predicted: {on}, {seconds}" + ", loops as long as all iterations" * (not whole)
    events = _process(PREDICTED, title, list(_predicted(slots, whole)))
    if step:
        title = f"measured: {on}, device {step[0].event.device}"
        events += _process(MEASURED, title, list(_measured(step)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, title: str, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(lane for lane, *_ in slices), 1)}
    names = [("process_name", 0, title), *(("thread_name", n, lane) for lane, n in lanes.items())]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
        for what, tid, name in names
    ]
    for lane, name, begin, stop, more in slices:
        # Whole nanoseconds, so that neighbours still touch and do not overlap.
        start, end = round(begin * 1e9), round(stop * 1e9)
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        row = {"ph": "X", "pid": pid, "tid": lanes[lane]}
        events.append({**row, "name": name, **times, "args": more})
    return events


def _predicted(slots: Sequence[PlanSlot], whole: bool) -> Iterator[Slice]:
    """Yields rectangles of slots: all iterations of loops if `whole`, else one, stretched."""
    for slot in occurrences(slots, whole):
        if slot.opens:
            lane = "loops" if slot.depth == 0 else f"loops in {plural(slot.depth, 'loop')}"
            yield lane, loop_text(slot), slot.start, slot.end, {"source": slot.source}
            continue
        more = {"source": slot.source, "layer": slot.layer, "kind": slot.work}
        if slot.reason:
            more["reason"] = slot.reason
        yield slot.lane, slot.label, slot.start, slot.end, more


def _measured(step: Sequence[Worked]) -> Iterator[Slice]:
    """Yields rectangles of events in lanes `compute`, `collectives`, on overlap `compute 2` etc."""
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
        yield row, label.collective or event.name, event.start, event.end, more
