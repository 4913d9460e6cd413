"""Parts of the page about what goes on in steps: pipelines over stages, and rings of devices.

A picture has a line for each worker and a column for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from spmd.explain.facts import Facts
from spmd.explain.page.html import Html, drawing, joined, line, rect, source, tag, words
from spmd.explain.steps import PipelineRow, RingRow, pipeline_rows, ring_rows
from spmd.ir.pipelines import Pipeline

MOST_WORKERS = 16  # lines of a picture
MOST_COLUMNS = 34  # columns that are drawn; of more, those in the middle are left out

_WIDE, _HIGH, _LEFT, _ABOVE = 30, 24, 74, 26


def pipelines(facts: Facts) -> Html:
    """Every pipeline: its figures, and which stage works on what in which step."""
    return joined(*(joined(_head(row), _stages(row.of)) for row in pipeline_rows(facts.stages)))


def rings(facts: Facts) -> Html:
    """Every op whose pieces go round, or could: its figures, and who has which piece when."""
    made: list[Html] = []
    drawn: set[tuple[object, ...]] = set()
    for row in ring_rows(facts.stages, facts.prices):
        made.append(_head(row))
        # Forward pass and gradient, and equal layers, look alike.
        look = row.pieces, row.is_causal, row.is_zigzag
        if row.goes_round and look not in drawn:
            drawn.add(look)
            made.append(_round(row))
    return joined(*made)


def _head(row: PipelineRow | RingRow) -> Html:
    facts = [joined(tag("dt", what), tag("dd", text)) for what, text in row.parts]
    title = tag("p.entry", tag("b", row.title), " at ", source(row.source))
    return joined(title, tag("dl.facts", *facts))


# ---------------------------------------------------------------------------------------------
# Pipelines.


def _stages(of: Pipeline) -> Html:
    """Which stage works on which microbatch in which step of the forward pass."""
    stages = range(min(of.stages, MOST_WORKERS))
    # With fewer microbatches than stages there is no step in which all of them work.
    full, last = sorted((of.stages - 1, of.busy_steps))
    between = "all stages work" if of.busy_steps == last else "some work"
    phases = ((0, full, "fill"), (full, last, between), (last, of.steps, "drain"))
    more = f" The first {len(stages)} of {of.stages} stages are shown." * (of.stages > len(stages))
    shades = " A darker square is of a later chunk of the stage's layers." * (of.chunks > 1)
    again = f", and computes each {of.window} of them again first" * of.is_lean
    intro = tag(
        "p",
        "The forward pass: stages below each other, steps from left to right. A number is the "
        f"microbatch that a stage works on; crossed out it has nothing to do.{shades} A gradient "
        f"goes through the same steps from right to left{again}.{more}",
    )
    names = [f"{of.axis} {s}"[:9] for s in stages]

    def work(stage: int, step: int) -> Square:
        found = of.work(stage, step)
        if found is None:
            return Square("", f"step {step}: stage {stage} has nothing to do")
        microbatch, chunk = found
        layers = f", chunk {chunk} of its layers" if of.chunks > 1 else ""
        hue = (205 + 300 * microbatch / of.microbatches) % 360
        light = 80 - (22 * chunk / (of.chunks - 1) if of.chunks > 1 else 8)
        title = f"step {step}: stage {stage} works on microbatch {microbatch}{layers}"
        return Square(str(microbatch), title, f"hsl({hue:.0f} 52% {light:.0f}%)")

    return joined(intro, grid(names, of.steps, work, phases, f"steps of {of.stages} stages"))


# ---------------------------------------------------------------------------------------------
# Rings.


def _round(row: RingRow) -> Html:
    """Which piece a device has in which step, and how much of it the mask leaves to compute."""
    devices = range(min(row.pieces, MOST_WORKERS))
    more = f" The first {len(devices)} of {row.pieces} devices are shown."
    masked = " What is left empty the mask hides: it is handed on, not computed." * row.is_causal
    intro = tag(
        "p",
        "Devices below each other, steps from left to right. A number is the piece that a device "
        f"computes with, and sends on to the next one.{masked}"
        f"{more * (row.pieces > len(devices))}",
    )
    names = [f"{row.axes} {d}"[-9:] for d in devices]

    def work(device: int, step: int) -> Square:
        piece, who = (device - step) % row.pieces, f"step {step}: device {device}"
        share = 1.0
        if row.is_causal:
            share = 0.5 if row.is_zigzag or step == 0 else float(piece < device)
        if not share:
            return Square("", f"{who} sees nothing of piece {piece}")
        hue = (205 + 300 * piece / row.pieces) % 360
        title = f"{who} computes {share:.0%} of its scores with piece {piece}"
        return Square(str(piece), title, f"hsl({hue:.0f} 52% 70%)", share)

    return joined(intro, grid(names, row.pieces, work, (), f"a ring of {row.pieces} devices"))


# ---------------------------------------------------------------------------------------------
# The picture.


class Square(NamedTuple):
    """What one worker does in one step, and how much of it; no colour where nothing is done."""

    text: str
    title: str
    colour: str = ""
    share: float = 1.0


def shown_steps(count: int, most: int = MOST_COLUMNS) -> list[int | None]:
    """The steps that get a column; None stands for those that are left out.

    Example:
      >>> shown_steps(100, 5)
      [0, 1, None, 98, 99]
    """
    if count <= most:
        return list(range(count))
    begin, end = most // 2, (most - 1) // 2
    return [*range(begin), None, *range(count - end, count)]


def grid(
    names: Sequence[str],
    count: int,
    work: Callable[[int, int], Square],
    phases: Sequence[tuple[int, int, str]],
    label: str,
) -> Html:
    """The picture: a line for each of `names`, a column for each step, but for some in the middle.

    `work` says what a worker does in a step. A phase is (first step, the one behind the last,
    name), and gets a bracket above it. `label` is what screen readers say.
    """
    steps, top = shown_steps(count), _ABOVE if phases else 0
    bottom = top + len(names) * _HIGH
    parts: list[Html] = []
    for first, end, text in phases:
        inside = [i for i, t in enumerate(steps) if t is not None and first <= t < end]
        if inside:
            left, right = _LEFT + inside[0] * _WIDE + 3, _LEFT + (inside[-1] + 1) * _WIDE - 3
            shown = text if len(inside) > 1 or len(text) < 6 else ""
            parts += [
                tag("path.bracket", d=f"M{left} {_ABOVE - 2}v-5H{right}v5"),
                words((left + right) / 2, _ABOVE - 12, shown, "soft", text_anchor="middle"),
            ]
    for row, name in enumerate(names):
        y = top + row * _HIGH
        parts.append(words(_LEFT - 10, y + _HIGH / 2 + 4, name, "soft", text_anchor="end"))
        for i, step in enumerate(steps):
            parts.append(_square(_LEFT + i * _WIDE, y, None if step is None else work(row, step)))
    for i, step in enumerate(steps):
        x, text = _LEFT + (i + 0.5) * _WIDE, "" if step is None else str(step)
        parts.append(words(x, bottom + 15, text, "soft", text_anchor="middle"))
    picture = drawing("grid", _LEFT + len(steps) * _WIDE + 2, bottom + 20, parts, label)
    return tag("div.scroll", picture, tabindex=0, role="group", aria_label=label)


def _square(x: float, y: float, square: Square | None) -> Html:
    middle = x + _WIDE / 2
    if square is None:
        return words(middle, y + _HIGH / 2 + 4, "…", "soft", text_anchor="middle")
    box = (x + 1, y + 1, _WIDE - 2, _HIGH - 2)
    if not square.colour:
        corner = line("idle", x + 2, y + _HIGH - 2, x + _WIDE - 2, y + 2)
        return joined(rect("idle", box, square.title), corner)
    # What is half done has its text beside the colour, to be read on light and dark pages.
    is_part = square.share < 1
    done = (box[0], box[1], box[2] * square.share, box[3])
    middle = (done[0] + done[2] + x + _WIDE) / 2 if is_part else middle
    return joined(
        rect("idle", box, square.title) if is_part else "",
        rect("", done, square.title, fill=square.colour),
        words(
            middle, y + _HIGH / 2 + 4, square.text, "" if is_part else "on", text_anchor="middle"
        ),
    )
