"""Pictures of a run, as SVG: a timeline, and memory over time.

The timeline has a lane for compute and one for the links of each mesh axis.
Every rectangle has a title, for hovering; a chart can be focused, and then the arrow keys go from
one segment to the next (see report.js).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page.bars import Bars, Loop, Segment, functions_of, merged
from spmd.explain.words import bytes_text, seconds_text, source_text
from spmd.predict.timeline import COMPUTE

WIDTH, LEFT, RIGHT = 1116, 92, 8
_LANE, _GAP, _TOP = 30, 8, 8
_FINEST = 1000
"""Parts of a timeline below which neighbours are drawn as one."""

MEMORY_COLOURS = ("var(--arguments)", "var(--results)", "var(--saved)", "var(--temporary)")

_HEIGHT, _STEPS = 240, 700


def timeline_svg(timeline: Bars, axes: Sequence[str], what: str) -> str:
    """A timeline, loops stretched to their whole time under a bracket."""
    lanes = (COMPUTE, *axes)
    total = timeline.seconds or 1.0
    scale = (WIDTH - LEFT - RIGHT) / total
    shown = merged(list(timeline.flat()), total / _FINEST)
    top = _TOP + (24 if timeline.loops else 0)
    parts = [_bracket(loop, scale, top, len(lanes)) for loop in timeline.loops]
    for row, lane in enumerate(lanes):
        y = top + row * (_LANE + _GAP)
        busy = f"{100 * timeline.lane_seconds(lane) / total:.0f}%"
        parts.append(
            f'<text x="0" y="{y + 13}">{escape(_short(lane, 13))}</text>'
            f'<text class="soft" x="0" y="{y + 26}">busy {busy}</text>'
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{_LANE}"/>'
        )
        parts += [_bar(s, scale, y, total) for s in shown if lane in s.lanes]
    bottom = top + len(lanes) * (_LANE + _GAP)
    parts.append(_time_axis(total, scale, bottom))
    return _svg(bottom + 24, parts, what, "timeline")


def _bar(s: Segment, scale: float, y: int, total: float) -> str:
    x, width = LEFT + s.start * scale, max(s.seconds * scale, 0.5)
    width -= 0.6 if width > 3 else 0.0  # tells it from the next one
    what = s.label or (f"{s.ops} ops" if s.kind == COMPUTE else f"{s.ops} {s.kind}")
    if s.label and s.ops > 1:
        what += f" ({s.ops} ops)"
    place = "at " if s.group and not s.group.startswith("in ") else ""
    where = f" {place}{source_text(s.group)}" if s.group else ""
    info = f"{what}{where}: {seconds_text(s.seconds)}, from {seconds_text(s.start)}"
    drawn = (
        f'<rect class="seg" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE}" '
        f'fill="var(--{s.kind})"><title>{escape(info)}</title></rect>'
    )
    name = _function(s.group)
    if name and s.kind == COMPUTE and width > 7.2 * len(name) + 8:
        drawn += f'<text class="in" x="{x + 5:.1f}" y="{y + 19}">{escape(name)}</text>'
    return drawn


def _bracket(loop: Loop, scale: float, top: int, lanes: int) -> str:
    """A loop: a band behind the lanes and how often it runs."""
    x, width = LEFT + loop.start * scale, loop.seconds * scale
    height = lanes * (_LANE + _GAP) - _GAP + 8
    label = f"{trips_text(loop)}, {seconds_text(loop.seconds)}"
    text = ""
    if width > 6.8 * len(label):
        text = f'<text class="soft" x="{x + 4:.1f}" y="{top - 12}">{escape(label)}</text>'
    title = escape(f"{source_text(loop.label)}: {label}")
    return (
        f'<rect class="loop" x="{x:.1f}" y="{top - 4}" width="{width:.1f}" height="{height}">'
        f'<title>{title}</title></rect><path class="bracket" d="M{x:.1f} {top - 2}v-6h{width:.1f}'
        f'v6"/>{text}'
    )


def trips_text(loop: Loop) -> str:
    """How often a loop runs: `loop ×4`."""
    if not loop.label.startswith("loop"):
        return "conditional"
    return "loop, taken as ×16" if loop.trips is None else f"loop ×{loop.trips}"


def _time_axis(total: float, scale: float, y: float) -> str:
    step = _nice(total / 8)
    parts = []
    for k in range(int(total / step) + 1):
        x = LEFT + k * step * scale
        text = seconds_text(k * step) if k else "0"
        anchor = "end" if x > WIDTH - 40 else "middle" if k else "start"
        parts.append(
            f'<line class="tick" x1="{x:.1f}" y1="{y - 4}" x2="{x:.1f}" y2="{y}"/>'
            f'<text class="soft" x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}">{text}</text>'
        )
    return "".join(parts)


def memory_svg(curve: MemoryCurve, limit: int) -> str:
    """Memory over the kernels of a run, stacked, with its peak and (if near) the device's limit."""
    steps = _coarse(curve.steps, curve.peak)
    if not steps:
        return ""
    most = max(sum(curve.steps[curve.peak]), 1)
    near = limit if limit and limit < 1.6 * most else 0
    top = max(most, near) * 1.08
    count = len(curve.steps)
    across = (WIDTH - LEFT - RIGHT) / count
    parts = []
    for share in range(5):
        level = most * share / 4
        y = _y(level, top)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{bytes_text(level)}</text>"
        )
    for kind in reversed(range(len(KINDS))):
        line = "".join(
            f"H{LEFT + first * across:.1f}V{_y(sum(held[: kind + 1]), top):.1f}"
            for first, held in steps
        )
        parts.append(
            f'<path fill="{MEMORY_COLOURS[kind]}" d="M{LEFT} {_y(0, top):.1f}{line}'
            f'H{WIDTH - RIGHT}V{_y(0, top):.1f}Z"><title>{KINDS[kind]}</title></path>'
        )
    x, y = LEFT + (curve.peak + 0.5) * across, _y(most, top)
    anchor = "end" if x > WIDTH / 2 else "start"
    shift = -10 if anchor == "end" else 10
    parts.append(
        f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{_y(0, top):.1f}"/>'
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        f'<text class="strong" x="{x + shift:.1f}" y="{max(y - 6, 12):.1f}" '
        f'text-anchor="{anchor}">peak {bytes_text(most)}</text>'
    )
    if near:
        y = _y(limit, top)
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">the device\'s '
            f"{bytes_text(limit)}</text>"
        )
    base = _y(0, top)
    parts.append(
        f'<text class="soft" x="{LEFT}" y="{base + 16:.0f}">first kernel</text>'
        f'<text class="soft" x="{WIDTH - RIGHT}" y="{base + 16:.0f}" text-anchor="end">last of '
        f"{count} kernels of the local program</text>"
    )
    return _svg(base + 24, parts, "memory over time", "memory")


def _y(level: float, top: float) -> float:
    return 10 + (_HEIGHT - 10) * (1 - level / top)


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


def _nice(step: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _function(group: str) -> str:
    """The function to write onto a bar: the caller, which says more than a helper."""
    return next(iter(functions_of(group)), "")


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _svg(height: float, parts: Sequence[str], what: str, style: str) -> str:
    return (
        f'<svg class="chart {style}" viewBox="0 0 {WIDTH} {height:.0f}" tabindex="0" role="img" '
        f'aria-label="{escape(what)}">{"".join(parts)}</svg><output class="readout"></output>'
    )
