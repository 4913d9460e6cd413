"""Pictures, as SVG: the predicted timeline, memory over time, steps of pipelines, tiles.

What is drawn has tooltips. When a chart has the keyboard's focus, arrow keys go from one segment to
the next (see report.js).
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.data import PlanReport, PlanSlot, PlanTimeline, loop_text, occurrences
from spmd.explain.facts import group_leaves, pattern
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page import html as h
from spmd.explain.page.html import Html, drawing, joined, line, rect, tag, words
from spmd.ir.pipelines import Pipeline
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.predict.timeline import COMPUTE

LEFT, ACROSS = 92, 1016  # where the drawn part of a chart begins, behind labels; and its width
_RIGHT = LEFT + ACROSS
_LANE, _GAP, _TOP = 30, 8, 8
_FINEST = 1000  # parts of a timeline below which neighbours are drawn as one

_HEIGHT, _STEPS = 240, 700  # of the chart of memory: its height, and at most so many steps
MEMORY_COLOURS = ("var(--arguments)", "var(--results)", "var(--saved)", "var(--temporary)")

# The timeline: a lane for compute, and one for each set of mesh axes whose links are used together.


def bars_of(timeline: PlanTimeline) -> list[PlanSlot]:
    """Returns the slots of a timeline's ops; of a loop those of the first iteration, stretched."""
    return [slot for slot in occurrences(timeline.slots, whole=False) if not slot.opens]


def merged(bars: Sequence[PlanSlot], least: float) -> list[tuple[PlanSlot, int]]:
    """Joins bars of one kind that follow each other in a lane; returns (bar, how many it is).

    They are at most `least / 4` seconds apart, and one of the two takes less than `least` seconds.
    Of different ones label and source are empty.
    """
    made: list[tuple[PlanSlot, int]] = []
    for bar in sorted(bars, key=lambda bar: (bar.lane, bar.start)):
        before, ops = made[-1] if made else (bar, 0)
        is_alike = ops > 0 and (before.lane, before.kind) == (bar.lane, bar.kind)
        is_short = min(before.seconds, bar.seconds) < least
        if is_alike and is_short and bar.start - before.end <= least / 4:
            label = before.label if before.label == bar.label else ""
            source = before.source if before.source == bar.source else ""
            joint = before._replace(label=label, source=source, seconds=bar.end - before.start)
            made[-1] = joint, ops + 1
        else:
            made.append((bar, 1))
    return made


def timeline_svg(timeline: PlanTimeline) -> Html:
    """Draws a timeline, with brackets for its loops."""
    bars = bars_of(timeline)
    lanes = list(dict.fromkeys((COMPUTE, *(bar.lane for bar in bars))))
    loops = [slot for slot in timeline.slots if slot.opens and slot.depth == 0]
    total = timeline.scheduled_seconds or 1.0
    scale = ACROSS / total
    shown = merged(bars, total / _FINEST)
    top = _TOP + (24 if loops else 0)
    bottom = top + len(lanes) * (_LANE + _GAP)
    parts: list[Html] = []
    for loop in loops:
        x, width = LEFT + loop.start * scale, loop.seconds * scale
        label = f"{loop_text(loop)}, {w.seconds_text(loop.seconds)}"
        title = f"{label}, at {w.source_text(loop.source) or 'an unknown place'}"
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
        for bar, ops in ((bar, ops) for bar, ops in shown if bar.lane == lane):
            x, width = LEFT + bar.start * scale, max(bar.seconds * scale, 0.5)
            width -= 0.6 if width > 3 else 0.0  # tells it from the next one
            what = bar.label or bar.kind
            what += f" ({ops} ops)" if ops > 1 else ""
            where = f" at {w.source_text(bar.source)}" if bar.source else ""
            times = f"{w.seconds_text(bar.seconds)}, from {w.seconds_text(bar.start)}"
            box = (x, y, width, _LANE)
            parts.append(rect("seg", box, f"{what}{where}: {times}", fill=f"var(--{bar.kind})"))
            # The caller says more than a helper.
            name = (re.findall(r"\(([^()]*)\)", bar.source) or [""])[-1].rpartition(".")[2]
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
    made = drawing(f"chart {look}", _RIGHT + 8, height, parts, label, tabindex=0)
    return joined(tag("div.scroll", made), tag("output.readout"))


# Grids: which device holds what, and what the stages of a pipeline do in each step. A device has
# one colour in all pictures: the hue is its coordinate along the first mesh axis, the lightness
# that along the others. A tile that several devices hold shows their colours under a hatch.

PICTURES = 8  # how many arguments are drawn, and the mesh
MAX_DEVICES = 256  # devices that a mesh's picture shows
MAX_PIECES = 32  # pieces of one dim that a picture shows
MOST_WORKERS, MOST_COLUMNS = 16, 128  # stages and steps of a pipeline that a picture shows

_MAX_BANDS = 8
_TILE_WIDTH, _TILE_HEIGHT, _TILE_LEAST = 190, 150, 26

HATCH = Html(
    '<svg width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs></svg>'
)
"""Markup that defines the hatch used by pictures; a page with pictures contains it once."""


class Tile(NamedTuple):
    """Holds one rectangle of a grid: its colours as bands, labels side by side, and a tooltip."""

    colours: Sequence[str]
    labels: Sequence[str]
    title: str = ""


Picture = tuple[Html, str, str]  # an SVG, and what lies down and across in it


def pipelines(report: PlanReport) -> Html:
    """Draws for each pipeline of a program what its stages do in each step."""
    intro = tag(
        "p",
        "The forward pass: stages below each other, steps from left to right. A number is the "
        "microbatch that a stage works on; where there is none it has nothing to do. A lighter "
        "tile is of a later chunk of the stage's layers. A gradient goes through the same steps "
        "from right to left.",
    )
    return joined(intro, *(_figure(*steps_picture(row.of), row.title) for row in report.pipelines))


def steps_picture(of: Pipeline) -> Picture:
    """Draws what the first `MOST_WORKERS` stages do in the first `MOST_COLUMNS` steps."""
    rows, columns = min(of.stages, MOST_WORKERS), min(of.steps, MOST_COLUMNS)
    tiles = {}
    for stage, step in itertools.product(range(rows), range(columns)):
        when = f"step {step}: stage {stage}"
        if (work := of.work(stage, step)) is None:
            tiles[stage, step] = Tile((), (), f"{when} has nothing to do")
            continue
        microbatch, chunk = work
        layers = f", chunk {chunk} of its layers" if of.chunks > 1 else ""
        colour = _colour(microbatch / of.microbatches, chunk / max(1, of.chunks - 1))
        title = f"{when} works on microbatch {microbatch}{layers}"
        tiles[stage, step] = Tile((colour,), (str(microbatch),), title)
    down, across = _side("stages", of.stages, rows), _side("steps", of.steps, columns)
    drawn = _grid(tiles, columns * 30, rows * 24, label := f"steps of {of.stages} stages")
    return tag("div.scroll", drawn, tabindex=0, role="group", aria_label=label), down, across


def tiles(report: PlanReport) -> Html:
    """Draws the mesh and the largest arguments, to show which device holds which piece."""
    mesh = report.mesh
    shown = [(mesh_picture(mesh), "the mesh", (f"{mesh}", "device ids"))]
    # The largest argument of every sharding first, then the next largest ones.
    groups = [group for group in group_leaves(report.arguments) if group[0].type.rank]
    groups.sort(key=lambda group: -group[0].type.bytes)
    largest = {group[0].sharding: group for group in reversed(groups)}
    groups.sort(key=lambda group: largest[group[0].sharding] is not group)
    for group in groups[: PICTURES - 1]:
        leaf, name = group[0], pattern(leaf.name for leaf in group)
        caption = f"{w.type_text(leaf.type)} {leaf.spec}"
        picture = tile_picture(leaf.type, leaf.sharding, mesh)
        shown.append((picture, name, (caption, f"{w.type_text(leaf.local)} on each device")))
    figures = [_figure(*picture, title, *captions) for picture, title, captions in shown]
    intro = tag(
        "p",
        "Every device has its colour. A tile shows the devices that hold it; hatched ones are "
        "held by several. Of a tensor with more than two dims two are drawn, split ones first: ↓ "
        "says what lies down the picture, → what lies across.",
    )
    return joined(intro, tag("div.tiles", *figures))


def _figure(svg: Html, down: str, across: str, title: str, *captions: str) -> Html:
    sides = [f"{arrow} {side}" for arrow, side in (("↓", down), ("→", across)) if side]
    lines = [tag("span", tag("code", text)) for text in (*captions, *sides)]
    return tag("figure", svg, tag("figcaption", tag("b", h.breakable(title)), *lines))


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
    """Returns `text`, and how many are drawn if not all `pieces`: `steps (128 of 200 drawn)`."""
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
    mesh: Mesh, holders: Mapping[tuple[int, int], Sequence[int]], width: int, height: int, what: str
) -> Html:
    """Draws tiles; `holders` maps (row, column) to the mesh positions of devices that hold it."""
    first = mesh.sizes[0] if mesh.sizes else 1
    rest = max(1, mesh.size // first)
    colours = [_colour(i // rest / first, i % rest / max(1, rest - 1)) for i in range(mesh.size)]
    tiles = {}
    for place, held in holders.items():
        ids = [str(mesh.device_ids[position]) for position in held]
        labels = ids if len(held) <= _MAX_BANDS else [f"×{len(held)}"]
        tiles[place] = Tile([colours[position] for position in held[:_MAX_BANDS]], labels)
    return _grid(tiles, width, height, what)


def _colour(hue: float, light: float) -> str:
    """Returns a CSS colour; `hue` and `light` are from 0 to 1."""
    return f"hsl({(205 + 300 * hue) % 360:.0f} 52% {62 + 20 * light:.0f}%)"


def _grid(tiles: Mapping[tuple[int, int], Tile], width: int, height: int, what: str) -> Html:
    """Draws tiles, by (row, column), in a box of `width` x `height` pixels that `what` names."""
    rows, columns = (1 + max(place) for place in zip(*tiles, strict=True))
    wide, high = width / columns, height / rows
    shapes: list[Html] = []
    for (row, column), tile in tiles.items():
        x, y = 1 + column * wide, 1 + row * high
        for i, colour in enumerate(tile.colours):
            band = wide / len(tile.colours)
            shapes.append(rect("", (x + i * band, y, band, high), fill=colour))
        if len(tile.colours) > 1:
            shapes.append(rect("", (x, y, wide, high), fill="url(#hatch)"))
        shapes.append(rect("edge", (x, y, wide, high), tile.title))
        share = wide / max(1, len(tile.labels))
        if max(map(len, tile.labels), default=0) * 6.8 <= share and high >= 12:
            shapes += [
                words(x + (i + 0.5) * share, y + high / 2 + 4, label, "on", text_anchor="middle")
                for i, label in enumerate(tile.labels)
            ]
    shapes.append(rect("frame", (1, 1, width, height)))
    return drawing("", width + 2, height + 2, shapes, what)
