"""Pictures of a run, as SVG: the predicted timeline, and memory over time.

The timeline has a lane for compute and one for the links of each mesh axis. What runs when,
`spmd.predict.timeline` says; here it only gets names, and loops get bodies whose times are their
own. Every rectangle has a title, for hovering; a chart can be focused, and then the arrow keys go
from one segment to the next (see report.js).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from spmd.explain.costs import Nested, nested
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page.html import Html, drawing, joined, line, rect, tag, words
from spmd.explain.words import bytes_text, seconds_text, source_text
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.mesh.mesh import Mesh
from spmd.predict.ops import Transfer
from spmd.predict.timeline import COMPUTE, Timeline

LEFT, ACROSS = 92, 1016
"""Where the drawn part of a chart begins, and its width; before it are labels."""

_RIGHT = LEFT + ACROSS
_LANE, _GAP, _TOP = 30, 8, 8
_FINEST = 1000  # parts of a timeline below which neighbours are drawn as one

MEMORY_COLOURS = ("var(--arguments)", "var(--results)", "var(--saved)", "var(--temporary)")

_HEIGHT, _STEPS = 240, 700

# ---------------------------------------------------------------------------------------------
# A timeline as bars.


class Segment(NamedTuple):
    """Something that takes time, seconds after the run, or the loop's iteration, began."""

    lanes: tuple[str, ...]  # `compute`, or the names of the mesh axes whose links are busy
    kind: str  # `compute`, or the collective's kind
    label: str  # what it is: an op, or a collective and what it moves
    group: str  # the user's source line and its caller's; `in f` for several lines of one function
    start: float
    seconds: float
    ops: int = 1  # how many ops are drawn as this one

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.seconds


class Bars(NamedTuple):
    """What happens in a region, in order: in a program, a branch, or one iteration of a loop."""

    segments: tuple[Segment, ...]  # ops and collectives outside of inner loops
    loops: tuple[Bars, ...]  # the loops and conditionals, of whose equal iterations one is shown
    once: float  # seconds of all of it, once
    start: float  # when it begins first, seconds after what is around it began
    seconds: float  # all iterations together
    title: str = ""  # of a loop, how often it runs: `loop ×4`
    place: str = ""  # of a loop, the user's source line and its caller's

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
    segments, loops = _region(nested(timeline.slots), mesh, 0.0)
    whole = timeline.scheduled_seconds
    return Bars(segments, loops, whole, 0.0, whole)


def _region(
    slots: Iterable[Nested], mesh: Mesh, begin: float
) -> tuple[tuple[Segment, ...], tuple[Bars, ...]]:
    """Ops and loops of a region that begins at some time; a loop's own times are its body's."""
    segments: list[Segment] = []
    loops: list[Bars] = []
    for slot, inside in slots:
        op, start, trail = slot.op, slot.start - begin, slot.op.loc.trail
        if op.regions:
            once = slot.seconds / ((UNKNOWN_TRIPS if slot.runs is None else slot.runs) or 1)
            trips = "loop, taken as ×16" if slot.runs is None else f"loop ×{slot.runs}"
            title, place = trips if op.is_loop else "conditional", trail or "an unknown place"
            body = _region(inside, mesh, slot.start)
            loops.append(Bars(*body, once, start, slot.seconds, title, place))
        elif slot.lane == COMPUTE:
            segments.append(Segment((COMPUTE,), COMPUTE, op.label, trail, start, slot.seconds))
        else:
            transfer = Transfer.of(op, mesh)
            atoms = transfer.axes if transfer else ()
            axes = dict.fromkeys(mesh.axis_names[mesh.atoms[a].axis] for a in atoms)
            label = f"{slot.kind} over {slot.lane}"
            segments.append(Segment(tuple(axes), slot.kind, label, trail, start, slot.seconds))
    return tuple(segments), tuple(loops)


def merged(segments: Sequence[Segment], least: float) -> list[Segment]:
    """Fewer segments, to draw: neighbours of one kind and function are one, and all that are short.

    Those below `least` seconds are joined to the one before them in their lane, if that is of the
    same kind and not further away.
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


# ---------------------------------------------------------------------------------------------
# Drawings.


def timeline_svg(timeline: Bars, axes: Sequence[str], what: str) -> Html:
    """A timeline, loops stretched to their whole time under a bracket."""
    lanes = (COMPUTE, *axes)
    total = timeline.once or 1.0
    scale = ACROSS / total
    shown = merged(list(timeline.flat()), total / _FINEST)
    top = _TOP + (24 if timeline.loops else 0)
    parts = [_bracket(loop, scale, top, len(lanes)) for loop in timeline.loops]
    for row, lane in enumerate(lanes):
        y = top + row * (_LANE + _GAP)
        parts += [
            words(0, y + 13, lane if len(lane) <= 13 else f"{lane[:12]}…"),
            words(0, y + 26, f"busy {timeline.lane_seconds(lane) / total:.0%}", "soft"),
            rect("lane", (LEFT, y, ACROSS, _LANE)),
            *(_bar(s, scale, y) for s in shown if lane in s.lanes),
        ]
    bottom = top + len(lanes) * (_LANE + _GAP)
    return _chart("timeline", bottom + 24, [*parts, *_time_axis(total, scale, bottom)], what)


def _bar(s: Segment, scale: float, y: int) -> Html:
    x, width = LEFT + s.start * scale, max(s.seconds * scale, 0.5)
    width -= 0.6 if width > 3 else 0.0  # tells it from the next one
    what = s.label or (f"{s.ops} ops" if s.kind == COMPUTE else f"{s.ops} {s.kind}")
    if s.label and s.ops > 1:
        what += f" ({s.ops} ops)"
    place = "at " if s.group and not s.group.startswith("in ") else ""
    where = f" {place}{source_text(s.group)}" if s.group else ""
    title = f"{what}{where}: {seconds_text(s.seconds)}, from {seconds_text(s.start)}"
    drawn = rect("seg", (x, y, width, _LANE), title, fill=f"var(--{s.kind})")
    # The caller says more than a helper.
    name = next(iter(functions_of(s.group)), "")
    if name and s.kind == COMPUTE and width > 7.2 * len(name) + 8:
        return joined(drawn, words(x + 5, y + 19, name, "in"))
    return drawn


def _bracket(loop: Bars, scale: float, top: int, lanes: int) -> Html:
    """A loop: a band behind the lanes and how often it runs."""
    x, width = LEFT + loop.start * scale, loop.seconds * scale
    height = lanes * (_LANE + _GAP) - _GAP + 8
    label = f"{loop.title}, {seconds_text(loop.seconds)}"
    title = f"{loop.title} at {source_text(loop.place)}: {seconds_text(loop.seconds)}"
    return joined(
        rect("loop", (x, top - 4, width, height), title),
        tag("path.bracket", d=f"M{x:.1f} {top - 2}v-6h{width:.1f}v6"),
        words(x + 4, top - 12, label, "soft") if width > 6.8 * len(label) else "",
    )


def _time_axis(total: float, scale: float, y: float) -> list[Html]:
    # The next larger 1, 2 or 5 times a power of ten.
    least = total / 8
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= least * 0.999)
    parts = []
    for k in range(int(total / step) + 1):
        x = LEFT + k * step * scale
        text = seconds_text(k * step) if k else "0"
        anchor = "end" if x > _RIGHT - 32 else "middle" if k else "start"
        parts += [line("tick", x, y - 4, x, y), words(x, y + 14, text, "soft", text_anchor=anchor)]
    return parts


def memory_svg(curve: MemoryCurve, limit: int) -> Html:
    """Memory over the kernels of a run, stacked, with its peak and (if near) the device's limit."""
    if not curve.steps:
        return Html()
    most = max(sum(curve.steps[curve.peak]), 1)
    is_near = limit and limit < 1.6 * most
    top = max(most, limit if is_near else 0) * 1.08
    count = len(curve.steps)

    def y_of(level: float) -> float:
        return 10 + (_HEIGHT - 10) * (1 - level / top)

    base, peak_y = y_of(0), y_of(most)
    parts: list[Html] = []
    for level in (most * quarter / 4 for quarter in range(5)):
        y = y_of(level)
        label = words(LEFT - 8, y + 4, bytes_text(level), "soft", text_anchor="end")
        parts += [line("grid", LEFT, y, _RIGHT, y), label]
    steps = _coarse(curve.steps, curve.peak)
    for kind in reversed(range(len(KINDS))):
        outline = "".join(
            f"H{LEFT + first * ACROSS / count:.1f}V{y_of(sum(held[: kind + 1])):.1f}"
            for first, held in steps
        )
        path = f"M{LEFT} {base:.1f}{outline}H{_RIGHT}V{base:.1f}Z"
        parts.append(tag("path", tag("title", KINDS[kind]), fill=MEMORY_COLOURS[kind], d=path))
    x = LEFT + (curve.peak + 0.5) * ACROSS / count
    shift, anchor = (-10, "end") if x > LEFT + ACROSS / 2 else (10, "start")
    peak = f"peak {bytes_text(most)}"
    parts += [
        line("peak", x, peak_y, x, base),
        tag("circle.mark", cx=x, cy=peak_y, r=4),
        words(x + shift, max(peak_y - 6, 12), peak, "strong", text_anchor=anchor),
    ]
    if is_near:
        y, text = y_of(limit), f"the device's {bytes_text(limit)}"
        parts += [line("limit", LEFT, y, _RIGHT, y), words(_RIGHT, y - 5, text, text_anchor="end")]
    last = f"last of {count} kernels of the local program"
    parts += [
        words(LEFT, base + 16, "first kernel", "soft"),
        words(_RIGHT, base + 16, last, "soft", text_anchor="end"),
    ]
    return _chart("memory", base + 24, parts, "memory over time")


def _coarse(steps: Sequence[tuple[int, ...]], peak: int) -> list[tuple[int, tuple[int, ...]]]:
    """(first op, bytes) where they change; long runs keep the worst moment of each stretch."""
    width = max(1, math.ceil(len(steps) / _STEPS))
    made: list[tuple[int, tuple[int, ...]]] = []
    for first in range(0, len(steps), width):
        worst = max(steps[first : first + width], key=sum)
        if first <= peak < first + width:
            worst = steps[peak]
        if not made or made[-1][1] != worst:
            made.append((first, worst))
    return made


def _chart(look: str, height: float, parts: Sequence[Html], label: str) -> Html:
    """A chart that can be focused, and a line below it that report.js writes into."""
    made = drawing(f"chart {look}", _RIGHT + 8, height, parts, label, tabindex=0)
    return joined(made, tag("output.readout"))
