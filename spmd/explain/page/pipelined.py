"""Parts of the page about what goes on in steps: pipelines over stages, and rings of devices."""

from __future__ import annotations

from spmd.explain.facts import Facts
from spmd.explain.page import parts as h
from spmd.explain.page.grid import Bracket, Square, grid, shown_steps
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.pipelines import PipelineRow, pipeline_rows
from spmd.explain.rings import RingRow, ring_rows
from spmd.ir.pipelines import Pipeline

MOST_STAGES, MOST_DEVICES = 16, 16
"""Lines of a picture."""


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
    title = tag("p.entry", tag("b", row.title), " at ", h.source(row.source))
    return joined(title, tag("dl.facts", *facts))


# ---------------------------------------------------------------------------------------------
# Pipelines.


def _stages(of: Pipeline) -> Html:
    """Which stage works on which microbatch in which step of the forward pass."""
    stages, steps = range(min(of.stages, MOST_STAGES)), shown_steps(of.steps)
    squares = [[None if t is None else _work(of, s, t) for t in steps] for s in stages]
    heads = ["" if t is None else str(t) for t in steps]
    # With fewer microbatches than stages there is no step in which all of them work.
    full, last = sorted((of.stages - 1, of.busy_steps))
    between = "all stages work" if of.busy_steps == last else "some work"
    named = ((0, full, "fill"), (full, last, between), (last, of.steps, "drain"))
    brackets = [
        Bracket(inside[0], inside[-1] + 1, text if len(inside) > 1 or len(text) < 6 else "")
        for first, end, text in named
        if (inside := [i for i, t in enumerate(steps) if t is not None and first <= t < end])
    ]
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
    return joined(intro, grid(names, heads, squares, brackets, f"steps of {of.stages} stages"))


def _work(of: Pipeline, stage: int, step: int) -> Square:
    work = of.work(stage, step)
    if work is None:
        return Square("", f"step {step}: stage {stage} has nothing to do")
    microbatch, chunk = work
    layers = f", chunk {chunk} of its layers" if of.chunks > 1 else ""
    hue = (205 + 300 * microbatch / of.microbatches) % 360
    light = 80 - (22 * chunk / (of.chunks - 1) if of.chunks > 1 else 8)
    title = f"step {step}: stage {stage} works on microbatch {microbatch}{layers}"
    return Square(str(microbatch), title, f"hsl({hue:.0f} 52% {light:.0f}%)")


# ---------------------------------------------------------------------------------------------
# Rings.


def _round(row: RingRow) -> Html:
    """Which piece a device has in which step, and how much of it the mask leaves to compute."""
    devices, steps = range(min(row.pieces, MOST_DEVICES)), shown_steps(row.pieces)
    squares = [[None if i is None else _piece(row, d, i) for i in steps] for d in devices]
    heads = ["" if i is None else str(i) for i in steps]
    more = f" The first {len(devices)} of {row.pieces} devices are shown."
    masked = " What is left empty the mask hides: it is handed on, not computed." * row.is_causal
    intro = tag(
        "p",
        "Devices below each other, steps from left to right. A number is the piece that a device "
        f"computes with, and sends on to the next one.{masked}"
        f"{more * (row.pieces > len(devices))}",
    )
    names = [f"{row.axes} {d}"[-9:] for d in devices]
    return joined(intro, grid(names, heads, squares, (), f"a ring of {row.pieces} devices"))


def _piece(row: RingRow, device: int, step: int) -> Square:
    piece = (device - step) % row.pieces
    share = 1.0
    if row.is_causal and step == 0:
        share = 0.5
    elif row.is_causal:
        share = 0.5 if row.is_zigzag else float(piece < device)
    title = f"step {step}: device {device} computes {share:.0%} of its scores with piece {piece}"
    if not share:
        return Square("", f"step {step}: device {device} sees nothing of piece {piece}")
    hue = (205 + 300 * piece / row.pieces) % 360
    return Square(str(piece), title, f"hsl({hue:.0f} 52% 70%)", share)
