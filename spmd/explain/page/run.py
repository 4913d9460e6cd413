"""Parts of the page about one run: the plan, the timeline, the collectives, memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from spmd.explain.collectives import collective_rows, traffic
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.facts import Facts, memory_rows, quality_rows
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.page import charts
from spmd.explain.page import parts as h
from spmd.explain.page.bars import Bars, Loop, bars_of
from spmd.explain.tables import collective_table
from spmd.explain.words import bytes_text, seconds_text
from spmd.predict.timeline import COMPUTE

TOP_VALUES = 15
"""Rows of the table of what is alive at the peak."""


def quality(facts: Facts) -> str:
    """This plan beside the greedy one and the best there can be."""
    seconds = facts.timeline.seconds
    rows = [("this plan", seconds, seconds_text(seconds), "var(--accent)")]
    return h.bars(rows + [(*row, "var(--soft)") for row in quality_rows(facts)])


def timeline_chart(facts: Facts) -> str:
    """The predicted run as a picture."""
    timeline = bars_of(facts.timeline, facts.plan.mesh)
    if not timeline.seconds:
        return ""
    lost = facts.timeline.seconds - timeline.seconds
    axes = [name for name, atoms in facts.plan.mesh.axis_atoms.items() if atoms]
    kinds = [COMPUTE, *dict.fromkeys(s.kind for s in timeline.flat() if s.kind != COMPUTE)]
    intro = (
        "<p>Compute, and the links of every mesh axis. A collective starts when its operands are "
        "there and its links are free; whoever reads its result waits for it. Iterations of a loop "
        "do not overlap.</p>"
    )
    if lost > timeline.seconds / 1000:
        intro += (
            f"<p>The prediction adds {seconds_text(lost)} to what is drawn: on this chip "
            "arithmetic and communication that run side by side slow each other.</p>"
        )
    return (
        f"{intro}{h.legend([(kind, f'var(--{kind})') for kind in kinds])}"
        f"{charts.timeline_svg(timeline, axes, 'timeline of one run')}"
        f"{''.join(_loop(loop, axes) for loop in timeline.loops)}{_where(timeline)}"
    )


def _loop(loop: Loop, axes: Sequence[str]) -> str:
    """One iteration of a loop, to unfold, with the loops inside it."""
    inner = "".join(_loop(inside, axes) for inside in loop.body.loops)
    each = seconds_text(loop.body.seconds)
    place = h.source(loop.label.partition(" at ")[2])
    return (
        f'<details class="iteration"><summary>one iteration of the {charts.trips_text(loop)} at '
        f"{place}: {each}</summary>"
        f"{charts.timeline_svg(loop.body, axes, 'timeline of one iteration')}{inner}</details>"
    )


def _where(timeline: Bars) -> str:
    """Time by source line, to unfold."""
    totals: dict[str, list[float]] = {}
    for s in timeline.flat():
        totals.setdefault(s.group, [0.0, 0.0])[s.kind != COMPUTE] += s.seconds
    busy = sum(map(sum, totals.values()))
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    rows = [
        (
            source(group),
            number(seconds_text(compute), compute),
            number(seconds_text(comm), comm),
            number(seconds_text(compute + comm), compute + comm),
            number(f"{100 * (compute + comm) / busy:.1f}%", compute + comm),
        )
        for group, (compute, comm) in ordered
    ]
    heads = ("source", "compute", "collectives", "together", "share")
    made = Table(heads, rows, sort="together", search="a function or a file")
    return h.folded("time by source line", h.table(made))


def collectives(facts: Facts) -> str:
    """Every collective, equal ones together, those that take longest first."""
    ordered = sorted(collective_rows(facts.collectives), key=lambda row: -row.seconds)
    made = collective_table(ordered).without("ms")
    made = made._replace(heads=(*made.heads[:-1], "source and reason"))
    return h.table(made) or "<p>None: no device ever waits for another.</p>"


def bytes_by_kind(facts: Facts) -> str:
    """What each device sends, by kind and axes."""
    return h.bars(
        [
            (
                f"{h.kind(total.like.kind)} "
                f"<span class=soft>over {escape(', '.join(total.like.axes))}</span>",
                total.bytes,
                f"{bytes_text(total.bytes)}, {total.runs}x, {seconds_text(total.seconds)}",
                f"var(--{total.like.kind})",
            )
            for total in traffic(facts.collectives)
        ]
    )


def memory_chart(facts: Facts, curve: MemoryCurve) -> str:
    """Memory over a run as a picture, what is held at its peak, and the totals."""
    chart = charts.memory_svg(curve, facts.plan.topology.hbm_bytes)
    legend = h.legend(list(zip(KINDS, charts.MEMORY_COLOURS, strict=True)))
    rows = [
        (
            number(bytes_text(row.bytes), row.bytes),
            count(row.values),
            Cell(row.kind, style="t"),
            Cell(row.label, "name", style="w"),
            code(row.type),
            source(row.source),
        )
        for row in curve.at_peak[:TOP_VALUES]
    ]
    heads = ("bytes", "n", "alive as", "made by", "local type", "source")
    peak = h.folded("the largest at the peak", h.table(Table(heads, rows, sort="bytes")))
    figures = [(Cell(what), Cell(size)) for what, size in memory_rows(facts)]
    totals = h.folded("totals", h.table(Table(("what", "bytes"), figures)))
    return (
        "<p>Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        f"arguments.</p>{legend}{chart}{peak}{totals}"
    )
