"""Pictures, as SVG: the predicted timeline, memory over time, steps of pipelines, tiles.

What is drawn has tooltips. When a chart has the keyboard's focus, arrow keys go from one segment to
the next (see report.js).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.costs import Nested, nested
from spmd.explain.facts import Facts, group_leaves, pattern
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page import html as h
from spmd.explain.page.html import Html, drawing, joined, line, rect, tag, words
from spmd.explain.steps import PipelineRow, RingRow, pipeline_rows, ring_rows
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.ir.pipelines import Pipeline
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.predict.ops import Transfer
from spmd.predict.timeline import COMPUTE, Timeline

LEFT, ACROSS = 92, 1016  # where the drawn part of a chart begins, behind labels; and its width
_RIGHT = LEFT + ACROSS
_LANE, _GAP, _TOP = 30, 8, 8
_FINEST = 1000  # parts of a timeline below which neighbours are drawn as one

_HEIGHT, _STEPS = 240, 700  # of the chart of memory: its height, and at most so many steps
MEMORY_COLOURS = ("var(--arguments)", "var(--results)", "var(--saved)", "var(--temporary)")

# ---------------------------------------------------------------------------------------------
# The timeline: a lane for compute, and one for the links of each mesh axis.


class Segment(NamedTuple):
    """Holds one bar of a timeline: an op or collective, or several that are drawn as one."""

    lanes: tuple[str, ...]  # `compute`, or the names of the mesh axes whose links are busy
    kind: str  # `compute`, or the collective's kind
    label: str  # what it is: an op, or a collective and what it moves
    group: str  # the user's source line and its caller's; `in f` for several lines of one function
    start: float  # seconds after the run, or the loop's iteration, began
    seconds: float  # how long it takes
    ops: int = 1  # how many ops are drawn as this one

    @property
    def end(self) -> float:
        """When the bar ends, in seconds from the same moment as `start`."""
        return self.start + self.seconds


class Bars(NamedTuple):
    """Holds the timeline of a program, of a branch, or of one iteration of a loop."""

    segments: Sequence[Segment]  # ops and collectives outside of inner loops
    loops: Sequence[Bars]  # the loops (one iteration of each) and conditionals that it contains
    once: float  # seconds of the whole program, of the branch, or of one iteration
    start: float  # when the loop begins, in seconds after the enclosing timeline began
    seconds: float  # of all iterations together
    title: str = ""  # of a loop, how often it runs: `loop ×4`
    place: str = ""  # of a loop, the user's source line and its caller's

    def lane_seconds(self, lane: str) -> float:
        """Returns the seconds for which a lane is busy in one iteration, inner loops included."""
        return sum(s.seconds for s in self.flat() if lane in s.lanes)

    def flat(self) -> Iterator[Segment]:
        """Yields one iteration's bars; those of an inner loop are stretched to its whole time."""
        yield from self.segments
        for loop in self.loops:
            scale = loop.seconds / loop.once if loop.once else 0.0
            for s in loop.flat():
                yield s._replace(start=loop.start + s.start * scale, seconds=s.seconds * scale)


def bars_of(timeline: Timeline, mesh: Mesh) -> Bars:
    """Converts the predicted timeline of a program on a mesh into bars."""

    def region(slots: Iterable[Nested], begin: float) -> tuple[list[Segment], list[Bars]]:
        """Returns (bars of ops, timelines of loops) in a region; times are since `begin`."""
        segments: list[Segment] = []
        loops: list[Bars] = []
        for slot, inside in slots:
            op, start, trail = slot.op, slot.start - begin, slot.op.loc.trail
            if op.regions:
                runs = UNKNOWN_TRIPS if slot.runs is None else slot.runs
                trips = f"loop{', taken as' * (slot.runs is None)} ×{runs}"
                once = slot.seconds / (runs or 1)
                title, place = trips if op.is_loop else "conditional", trail or "an unknown place"
                body = region(inside, slot.start)
                loops.append(Bars(*body, once, start, slot.seconds, title, place))
            elif slot.lane == COMPUTE:
                segments.append(Segment((COMPUTE,), COMPUTE, op.label, trail, start, slot.seconds))
            else:
                transfer = Transfer.of(op, mesh)
                atoms = transfer.axes if transfer else ()
                axes = dict.fromkeys(mesh.axis_names[mesh.atoms[a].axis] for a in atoms)
                label = f"{slot.kind} over {slot.lane}"
                segments.append(Segment(tuple(axes), slot.kind, label, trail, start, slot.seconds))
        return segments, loops

    whole = timeline.scheduled_seconds
    return Bars(*region(nested(timeline.slots), 0.0), whole, 0.0, whole)


def merged(segments: Sequence[Segment], least: float) -> list[Segment]:
    """Joins bars of one kind that follow each other in a lane, so that fewer are drawn.

    They are at most `least / 4` seconds apart, and are of the same source line, or compute of the
    same function, or one of the two takes less than `least` seconds.
    """
    last: dict[tuple[str, ...], int] = {}
    made: list[Segment] = []
    for s in sorted(segments, key=lambda s: s.start):
        before = made[last[s.lanes]] if s.lanes in last else None
        group = None if before is None else _common_group(before, s, least)
        if before is None or group is None:
            last[s.lanes] = len(made)
            made.append(s)
            continue
        label = before.label if before.label == s.label else ""
        seconds, ops = s.end - before.start, before.ops + s.ops
        made[last[s.lanes]] = Segment(s.lanes, s.kind, label, group, before.start, seconds, ops)
    return made


def _common_group(before: Segment, after: Segment, least: float) -> str | None:
    """Returns the `group` of two bars joined to one, empty if mixed; None if they stay apart."""
    if before.kind != after.kind or after.start - before.end > least / 4:
        return None
    if before.group and before.group == after.group:
        return before.group
    if before.kind == COMPUTE:
        names = functions_of(after.group)
        if name := next((name for name in functions_of(before.group) if name in names), ""):
            return f"in ({name})"
    return None if min(before.seconds, after.seconds) >= least else ""


def functions_of(group: str) -> tuple[str, ...]:
    """Returns the functions, caller first: `m.py:2 (f) <- m.py:9 (C.g)` -> ("g", "f")."""
    names = re.findall(r"\(([^()]*)\)", group)
    return tuple(name.rpartition(".")[2] for name in reversed(names))


def timeline_svg(timeline: Bars, axes: Sequence[str], what: str) -> Html:
    """Draws a timeline with a lane for compute and for each of `axes`; `what` is its label."""
    lanes = (COMPUTE, *axes)
    total = timeline.once or 1.0
    scale = ACROSS / total
    shown = merged(list(timeline.flat()), total / _FINEST)
    top = _TOP + (24 if timeline.loops else 0)
    bottom = top + len(lanes) * (_LANE + _GAP)
    parts: list[Html] = []
    for loop in timeline.loops:
        x, width = LEFT + loop.start * scale, loop.seconds * scale
        label = f"{loop.title}, {w.seconds_text(loop.seconds)}"
        title = f"{loop.title} at {w.source_text(loop.place)}: {w.seconds_text(loop.seconds)}"
        parts += [
            rect("loop", (x, top - 4, width, bottom - top - _GAP + 8), title),
            tag("path.bracket", d=f"M{x:.1f} {top - 2}v-6h{width:.1f}v6"),
            words(x + 4, top - 12, label, "soft") if width > 6.8 * len(label) else Html(),
        ]
    for row, lane in enumerate(lanes):
        y = top + row * (_LANE + _GAP)
        parts += [
            words(0, y + 13, lane if len(lane) <= 13 else f"{lane[:12]}…"),
            words(0, y + 26, f"busy {timeline.lane_seconds(lane) / total:.0%}", "soft"),
            rect("lane", (LEFT, y, ACROSS, _LANE)),
        ]
        for s in (s for s in shown if lane in s.lanes):
            x, width = LEFT + s.start * scale, max(s.seconds * scale, 0.5)
            width -= 0.6 if width > 3 else 0.0  # tells it from the next one
            what = s.label or (f"{s.ops} ops" if s.kind == COMPUTE else f"{s.ops} {s.kind}")
            if s.label and s.ops > 1:
                what += f" ({s.ops} ops)"
            place = "at " if s.group and not s.group.startswith("in ") else ""
            where = f" {place}{w.source_text(s.group)}" if s.group else ""
            title = f"{what}{where}: {w.seconds_text(s.seconds)}, from {w.seconds_text(s.start)}"
            parts.append(rect("seg", (x, y, width, _LANE), title, fill=f"var(--{s.kind})"))
            # The caller says more than a helper.
            name = next(iter(functions_of(s.group)), "")
            if name and s.kind == COMPUTE and width > 7.2 * len(name) + 8:
                parts.append(words(x + 5, y + 19, name, "in"))
    # A tick at each multiple of the next larger 1, 2 or 5 times a power of ten.
    least = total / 8
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= least * 0.999)
    for k in range(int(total / step) + 1):
        x, text = LEFT + k * step * scale, w.seconds_text(k * step) if k else "0"
        anchor = "end" if x > _RIGHT - 32 else "middle" if k else "start"
        parts.append(line("tick", x, bottom - 4, x, bottom))
        parts.append(words(x, bottom + 14, text, "soft", text_anchor=anchor))
    return _chart("timeline", bottom + 24, parts, what)


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
    made = drawing(f"chart {look}", _RIGHT + 8, height, parts, label, tabindex=0)
    return joined(tag("div.scroll", made), tag("output.readout"))


# ---------------------------------------------------------------------------------------------
# Steps of pipelines: a line for each stage, a column for each step.

MOST_WORKERS = 16  # lines of a picture
MOST_COLUMNS = 34  # columns that are drawn; of more, those in the middle are left out

_WIDE, _HIGH, _NAMES, _ABOVE = 30, 24, 74, 26


def pipelines(facts: Facts) -> Html:
    """Returns for each pipeline its figures, and a picture of what each stage does in each step."""
    return joined(*(joined(_head(row), _stages(row.of)) for row in pipeline_rows(facts.stages)))


def rings(facts: Facts) -> Html:
    """Shows the figures of every op whose pieces go round a ring, or could."""
    return joined(*map(_head, ring_rows(facts.stages, facts.prices)))


def _head(row: PipelineRow | RingRow) -> Html:
    title = tag("p.entry", tag("b", row.title), " at ", h.source(row.source))
    return joined(title, h.pairs(row.parts))


def _stages(of: Pipeline) -> Html:
    drawn = min(of.stages, MOST_WORKERS)
    # With fewer microbatches than stages there is no step in which all of them work.
    full, last = sorted((of.stages - 1, of.busy_steps))
    between = "all stages work" if of.busy_steps == last else "some work"
    phases = ((0, full, "fill"), (full, last, between), (last, of.steps, "drain"))
    more = f" The first {drawn} of {of.stages} stages are shown." * (of.stages > drawn)
    shades = " A darker square is of a later chunk of the stage's layers." * (of.chunks > 1)
    again = f", and computes each {of.window} of them again first" * of.is_lean
    intro = tag(
        "p",
        "The forward pass: stages below each other, steps from left to right. A number is the "
        f"microbatch that a stage works on; crossed out it has nothing to do.{shades} A gradient "
        f"goes through the same steps from right to left{again}.{more}",
    )
    return joined(intro, _steps(of, drawn, phases))


def shown_steps(count: int, most: int = MOST_COLUMNS) -> list[int | None]:
    """Returns the numbers of the steps to draw; None stands for all that are left out.

    shown_steps(100, 5) -> [0, 1, None, 98, 99]
    """
    if count <= most:
        return list(range(count))
    begin, end = most // 2, (most - 1) // 2
    return [*range(begin), None, *range(count - end, count)]


def _steps(of: Pipeline, stages: int, phases: Sequence[tuple[int, int, str]]) -> Html:
    """Draws what the first `stages` stages do in each step, of many not those in the middle.

    A phase (first step, last step + 1, name) gets a bracket above it.
    """
    steps, bottom = shown_steps(of.steps), _ABOVE + stages * _HIGH
    parts: list[Html] = []
    for first, end, text in phases:
        inside = [i for i, t in enumerate(steps) if t is not None and first <= t < end]
        if inside:
            left, right = _NAMES + inside[0] * _WIDE + 3, _NAMES + (inside[-1] + 1) * _WIDE - 3
            shown = text if len(inside) > 1 or len(text) < 6 else ""
            parts += [
                tag("path.bracket", d=f"M{left} {_ABOVE - 2}v-5H{right}v5"),
                words((left + right) / 2, _ABOVE - 12, shown, "soft", text_anchor="middle"),
            ]
    for stage in range(stages):
        y, name = _ABOVE + stage * _HIGH, f"{of.axis} {stage}"[:9]
        parts.append(words(_NAMES - 10, y + _HIGH / 2 + 4, name, "soft", text_anchor="end"))
        parts += [_square(_NAMES + i * _WIDE, y, of, stage, t) for i, t in enumerate(steps)]
    for i, step in enumerate(steps):
        x, text = _NAMES + (i + 0.5) * _WIDE, "" if step is None else str(step)
        parts.append(words(x, bottom + 15, text, "soft", text_anchor="middle"))
    label = f"steps of {of.stages} stages"
    picture = drawing("grid", _NAMES + len(steps) * _WIDE + 2, bottom + 20, parts, label)
    return tag("div.scroll", picture, tabindex=0, role="group", aria_label=label)


def _square(x: float, y: float, of: Pipeline, stage: int, step: int | None) -> Html:
    middle = x + _WIDE / 2, y + _HIGH / 2 + 4
    if step is None:
        return words(*middle, "…", "soft", text_anchor="middle")
    box = (x + 1, y + 1, _WIDE - 2, _HIGH - 2)
    if (found := of.work(stage, step)) is None:
        corner = line("idle", x + 2, y + _HIGH - 2, x + _WIDE - 2, y + 2)
        return joined(rect("idle", box, f"step {step}: stage {stage} has nothing to do"), corner)
    microbatch, chunk = found
    layers = f", chunk {chunk} of its layers" if of.chunks > 1 else ""
    hue = (205 + 300 * microbatch / of.microbatches) % 360
    light = 80 - (22 * chunk / (of.chunks - 1) if of.chunks > 1 else 8)
    title = f"step {step}: stage {stage} works on microbatch {microbatch}{layers}"
    return joined(
        rect("", box, title, fill=f"hsl({hue:.0f} 52% {light:.0f}%)"),
        words(*middle, str(microbatch), "on", text_anchor="middle"),
    )


# ---------------------------------------------------------------------------------------------
# Mesh and tiles: which device holds what. A device has one colour in all pictures: the
# hue is its coordinate along the first mesh axis, the lightness that along the others. A tile that
# several devices hold shows the colours of all of them as bands under a hatch.

PICTURES = 8  # how many arguments are drawn, and the mesh
MAX_DEVICES = 256  # devices that a mesh's picture shows
MAX_PIECES = 32  # pieces of one dim that a picture shows

_MAX_BANDS = 8
_TILE_WIDTH, _TILE_HEIGHT, _TILE_LEAST = 190, 150, 26

HATCH = Html(
    '<svg width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs></svg>'
)
"""Markup that defines the hatch used by pictures; a page with pictures contains it once."""


def tiles(facts: Facts) -> Html:
    """Draws the mesh and the largest arguments, to show which device holds which piece."""
    mesh = facts.plan.mesh
    shown = [(mesh_picture(mesh), "the mesh", (f"{mesh}", "device ids"))]
    # The largest argument of every sharding first, then the next largest ones.
    groups = [group for group in group_leaves(facts.arguments) if group[0].type.rank]
    groups.sort(key=lambda group: -group[0].type.bytes)
    largest = {group[0].sharding: group for group in reversed(groups)}
    groups.sort(key=lambda group: largest[group[0].sharding] is not group)
    for group in groups[: PICTURES - 1]:
        leaf, name = group[0], pattern(leaf.name for leaf in group)
        caption = f"{w.type_text(leaf.type)} {w.spec_text(leaf.sharding, mesh)}"
        picture = tile_picture(leaf.type, leaf.sharding, mesh)
        shown.append((picture, name, (caption, f"{w.type_text(leaf.local)} on each device")))
    figures = []
    for (svg, down, across), title, captions in shown:
        sides = [f"{arrow} {side}" for arrow, side in (("↓", down), ("→", across)) if side]
        lines = [tag("span", tag("code", text)) for text in (*captions, *sides)]
        figures.append(tag("figure", svg, tag("figcaption", tag("b", h.breakable(title)), *lines)))
    intro = tag(
        "p",
        "Every device has its colour. A tile shows the devices that hold it; hatched ones are "
        "held by several. Of a tensor with more than two dims two are drawn, split ones first: ↓ "
        "says what lies down the picture, → what lies across.",
    )
    return joined(intro, tag("div.tiles", *figures))


Picture = tuple[Html, str, str]  # an SVG, and what lies down and across in it


def mesh_picture(mesh: Mesh) -> Picture:
    """Draws a mesh's devices as a grid: the last axis from left to right, all others downwards."""
    whole = mesh.sizes[-1] if mesh.sizes else 1
    columns, lines = min(whole, MAX_PIECES), max(1, mesh.size // whole)
    rows = min(lines, MAX_PIECES, MAX_DEVICES // columns)
    cell = max(16, min(46, 560 // max(rows, columns)))
    holders = {(r, c): [r * whole + c] for r in range(rows) for c in range(columns)}
    across = _side(mesh.axis_names[-1], whole, columns) if mesh.sizes else ""
    down = _side(" x ".join(mesh.axis_names[:-1]), lines, rows)
    return _tiled(mesh, holders, columns * cell, rows * cell, f"the mesh {mesh}"), down, across


def _side(text: str, pieces: int, shown: int = MAX_PIECES) -> str:
    """Says what lies along a side of a picture, and how much of it is drawn."""
    return f"{text} ({shown} of {pieces} drawn)" if pieces > shown else text


def tile_picture(type_: TensorType, sharding: Sharding, mesh: Mesh) -> Picture:
    """Draws a tensor as a rectangle of two of its dims, cut into the pieces that devices hold."""
    # Split dims first, then the last ones; a tensor of fewer dims is drawn one element high.
    order = sorted(range(sharding.rank), key=lambda d: (not sharding.dims[d], -d))[:2]
    shown = [(type_.shape[dim], sharding.dims[dim]) for dim in sorted(order)]
    (size_down, down), (size_across, across) = [(1, ())] * (2 - len(shown)) + shown
    holders: dict[tuple[int, int], list[int]] = {}
    for position in range(mesh.size):
        tile = mesh.coordinate(position, down), mesh.coordinate(position, across)
        if max(tile) < MAX_PIECES:
            holders.setdefault(tile, []).append(position)
    texts = [
        _side(f"{size} over {w.axes_text(axes, mesh)}", mesh.extent(axes)) if axes else str(size)
        for size, axes in shown
    ]
    text_down, text_across = [""] * (2 - len(shown)) + texts
    # The dims' ratio, softened so that both can be seen.
    ratio = math.sqrt(max(size_down, 1) / max(size_across, 1))
    height = max(_TILE_LEAST, min(_TILE_HEIGHT, round(_TILE_WIDTH * ratio)))
    width = max(_TILE_LEAST * 2, min(_TILE_WIDTH, round(height / ratio)))
    return _tiled(mesh, holders, width, height, "the tensor's tiles"), text_down, text_across


def _tiled(
    mesh: Mesh,
    holders: Mapping[tuple[int, int], Sequence[int]],
    width: int,
    height: int,
    what: str,
) -> Html:
    """Draws tiles that fill a box.

    `holders` maps a tile's (row, column) to the positions in the mesh of the devices that hold it.
    Bands in a tile have their colours and ids; a hatch says that they are several.
    """
    rows, columns = (1 + max(place) for place in zip(*holders, strict=True))
    wide, high = width / columns, height / rows
    first = mesh.sizes[0] if mesh.sizes else 1
    rest = max(1, mesh.size // first)
    shapes: list[Html] = []
    for (row, column), held in holders.items():
        x, y = 1 + column * wide, 1 + row * high
        drawn = held[:_MAX_BANDS]
        band = wide / len(drawn)
        for i, place in enumerate(drawn):
            down_mesh, across_mesh = divmod(place, rest)
            hue = (205 + 300 * down_mesh / first) % 360
            light = 62 + (20 * across_mesh / (rest - 1) if rest > 1 else 8)
            colour = f"hsl({hue:.0f} 52% {light:.0f}%)"
            shapes.append(rect("", (x + i * band, y, band, high), fill=colour))
        if len(drawn) > 1:
            shapes.append(rect("", (x, y, wide, high), fill="url(#hatch)"))
        shapes.append(rect("edge", (x, y, wide, high)))
        ids = [str(mesh.device_ids[place]) for place in held]
        labels = ids if len(held) <= _MAX_BANDS else [f"×{len(held)}"]
        share = wide / len(labels)
        if max(map(len, labels)) * 6.8 <= share and high >= 12:
            shapes += [
                words(x + (i + 0.5) * share, y + high / 2 + 4, label, "on", text_anchor="middle")
                for i, label in enumerate(labels)
            ]
    shapes.append(rect("frame", (1, 1, width, height)))
    return drawing("", width + 2, height + 2, shapes, what)
