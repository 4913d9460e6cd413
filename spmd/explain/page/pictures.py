"""Pictures, as SVG: the predicted timeline, and memory over time.

What is drawn has tooltips. When a chart has the keyboard's focus, arrow keys go from one segment to
the next (see report.js).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.costs import loop_text, occurrences
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page.html import Html, joined, line, rect, tag, words
from spmd.predict.timeline import COMPUTE, Timeline

LEFT, ACROSS = 92, 1016  # where the drawn part of a chart begins, behind labels; and its width
_RIGHT = LEFT + ACROSS
_LANE, _GAP, _TOP = 30, 8, 8
_FINEST = 1000  # parts of a timeline below which neighbours are drawn as one

_HEIGHT, _STEPS = 240, 700  # of the chart of memory: its height, and at most so many steps
MEMORY_COLOURS = ("var(--arguments)", "var(--results)", "var(--saved)", "var(--temporary)")

# ---------------------------------------------------------------------------------------------
# The timeline: a lane for compute, and one for each set of mesh axes whose links are used together.


class Bar(NamedTuple):
    """Holds one bar of a timeline: an op or collective, or several that are drawn as one."""

    lane: str  # as in `Slot`
    kind: str  # `compute`, or the collective's kind
    label: str  # what it is: an op, or a collective and what it moves; empty of different ones
    place: str  # the user's source line and its caller's; empty of several lines
    start: float  # seconds after the run began
    seconds: float  # how long it takes
    ops: int = 1  # how many ops are drawn as this one

    @property
    def end(self) -> float:
        """When the bar ends, in seconds from the same moment as `start`."""
        return self.start + self.seconds


def bars_of(timeline: Timeline) -> list[Bar]:
    """Returns the bars of a timeline; of a loop those of the first iteration, stretched."""
    bars = []
    for slot, start, seconds in occurrences(timeline.slots, whole=False):
        if not slot.op.regions:
            is_compute = slot.lane == COMPUTE
            label = slot.op.label if is_compute else f"{slot.kind} over {slot.lane}"
            bars.append(Bar(slot.lane, slot.kind, label, slot.op.loc.trail, start, seconds))
    return bars


def merged(bars: Sequence[Bar], least: float) -> list[Bar]:
    """Joins bars of one kind that follow each other in a lane, so that fewer are drawn.

    They are at most `least / 4` seconds apart, and one of the two takes less than `least` seconds.
    """
    made: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.lane, bar.start)):
        before = made[-1] if made else bar
        is_alike = before is not bar and (before.lane, before.kind) == (bar.lane, bar.kind)
        is_short = min(before.seconds, bar.seconds) < least
        if is_alike and is_short and bar.start - before.end <= least / 4:
            made[-1] = before._replace(
                label=before.label if before.label == bar.label else "",
                place=before.place if before.place == bar.place else "",
                seconds=bar.end - before.start,
                ops=before.ops + bar.ops,
            )
        else:
            made.append(bar)
    return made


def timeline_svg(timeline: Timeline) -> Html:
    """Draws a timeline, with brackets for its loops."""
    bars = bars_of(timeline)
    lanes = list(dict.fromkeys((COMPUTE, *(bar.lane for bar in bars))))
    loops = [slot for slot in timeline.slots if slot.op.regions and slot.depth == 0]
    total = timeline.scheduled_seconds or 1.0
    scale = ACROSS / total
    shown = merged(bars, total / _FINEST)
    top = _TOP + (24 if loops else 0)
    bottom = top + len(lanes) * (_LANE + _GAP)
    parts: list[Html] = []
    for loop in loops:
        x, width = LEFT + loop.start * scale, loop.seconds * scale
        label = f"{loop_text(loop)}, {w.seconds_text(loop.seconds)}"
        title = f"{label}, at {w.source_text(loop.op.loc.trail) or 'an unknown place'}"
        parts += [
            rect("loop", (x, top - 4, width, bottom - top - _GAP + 8), title),
            tag("path.bracket", d=f"M{x:.1f} {top - 2}v-6h{width:.1f}v6"),
            words(x + 4, top - 12, label, "soft") if width > 6.8 * len(label) else Html(),
        ]
    for row, lane in enumerate(lanes):
        y = top + row * (_LANE + _GAP)
        busy = sum(bar.seconds for bar in bars if bar.lane == lane)
        parts += [
            words(0, y + 13, lane if len(lane) <= 13 else f"{lane[:12]}…"),
            words(0, y + 26, f"busy {busy / total:.0%}", "soft"),
            rect("lane", (LEFT, y, ACROSS, _LANE)),
        ]
        for bar in (bar for bar in shown if bar.lane == lane):
            x, width = LEFT + bar.start * scale, max(bar.seconds * scale, 0.5)
            width -= 0.6 if width > 3 else 0.0  # tells it from the next one
            what = bar.label or bar.kind
            what += f" ({bar.ops} ops)" if bar.ops > 1 else ""
            where = f" at {w.source_text(bar.place)}" if bar.place else ""
            times = f"{w.seconds_text(bar.seconds)}, from {w.seconds_text(bar.start)}"
            box = (x, y, width, _LANE)
            parts.append(rect("seg", box, f"{what}{where}: {times}", fill=f"var(--{bar.kind})"))
            # The caller says more than a helper.
            name = (re.findall(r"\(([^()]*)\)", bar.place) or [""])[-1].rpartition(".")[2]
            if name and bar.kind == COMPUTE and width > 7.2 * len(name) + 8:
                parts.append(words(x + 5, y + 19, name, "in"))
    for k in range(9):
        x, anchor = LEFT + k * ACROSS / 8, "start" if k == 0 else "end" if k == 8 else "middle"
        text = w.seconds_text(total * k / 8) if k else "0"
        parts.append(line("tick", x, bottom - 4, x, bottom))
        parts.append(words(x, bottom + 14, text, "soft", text_anchor=anchor))
    return _chart("timeline", bottom + 24, parts, "timeline of one run")


def memory_svg(curve: MemoryCurve, limit: int) -> Html:
    """Draws bytes held over the kernels of a run, the peak, and `limit` if the peak is near it."""
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
        label = words(LEFT - 8, y + 4, w.bytes_text(level), "soft", text_anchor="end")
        parts += [line("grid", LEFT, y, _RIGHT, y), label]
    # Only steps at which bytes change; of long runs, the worst moment of each stretch.
    width = max(1, math.ceil(count / _STEPS))
    steps: list[tuple[int, tuple[int, ...]]] = []
    for first in range(0, count, width):
        has_peak = first <= curve.peak < first + width
        stretch = curve.steps[first : first + width]
        held = curve.steps[curve.peak] if has_peak else max(stretch, key=sum)
        if not steps or steps[-1][1] != held:
            steps.append((first, held))
    for kind in reversed(range(len(KINDS))):
        outline = "".join(
            f"H{LEFT + first * ACROSS / count:.1f}V{y_of(sum(held[: kind + 1])):.1f}"
            for first, held in steps
        )
        path = f"M{LEFT} {base:.1f}{outline}H{_RIGHT}V{base:.1f}Z"
        parts.append(tag("path", tag("title", KINDS[kind]), fill=MEMORY_COLOURS[kind], d=path))
    x = LEFT + (curve.peak + 0.5) * ACROSS / count
    shift, anchor = (-10, "end") if x > LEFT + ACROSS / 2 else (10, "start")
    peak = f"peak {w.bytes_text(most)}"
    parts += [
        line("peak", x, peak_y, x, base),
        tag("circle.mark", cx=x, cy=peak_y, r=4),
        words(x + shift, max(peak_y - 6, 12), peak, "strong", text_anchor=anchor),
    ]
    if is_near:
        y, text = y_of(limit), f"the device's {w.bytes_text(limit)}"
        parts += [line("limit", LEFT, y, _RIGHT, y), words(_RIGHT, y - 5, text, text_anchor="end")]
    last = f"last of {count} kernels of the local program"
    parts.append(words(LEFT, base + 16, "first kernel", "soft"))
    parts.append(words(_RIGHT, base + 16, last, "soft", text_anchor="end"))
    return _chart("memory", base + 24, parts, "memory over time")


def _chart(look: str, height: float, parts: Sequence[Html], label: str) -> Html:
    """Returns a chart that can have the focus, and a line in which report.js shows one segment."""
    size = {"viewBox": f"0 0 {_RIGHT + 8} {height:.0f}", "width": _RIGHT + 8, "height": height}
    about = {"role": "img", "aria_label": label, "tabindex": 0}
    made = tag(f"svg.chart {look}", *parts, **size, **about)
    return joined(tag("div.scroll", made), tag("output.readout"))
