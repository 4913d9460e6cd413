"""Parts of the page about one run: the plan, the timeline, the collectives."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from spmd.explain.collectives import Collective, collective_rows, traffic
from spmd.explain.overview import Overview, quality_rows
from spmd.explain.page import charts
from spmd.explain.page import parts as h
from spmd.explain.page.bars import Bars, Loop
from spmd.explain.page.parts import Cell
from spmd.explain.words import bytes_text, seconds_text, source_text
from spmd.pipeline import Stages
from spmd.predict.timeline import COMPUTE


def quality(figures: Overview) -> str:
    """This plan beside the greedy one and the best there can be."""
    remarks = dict(quality_rows(figures))
    rows = [("this plan", figures.seconds, seconds_text(figures.seconds), "var(--accent)")]
    for name, seconds in (
        ("greedy plan", figures.greedy_seconds),
        ("lower bound", figures.lower_seconds),
    ):
        if name in remarks:
            rows.append((name, seconds, remarks[name], "var(--soft)"))
    return h.bars(rows)


def timeline_chart(timeline: Bars, lost: float, stages: Stages) -> str:
    """The predicted run as a picture; `lost` is what running side by side adds, seconds."""
    if not timeline.seconds:
        return ""
    axes = [name for name, atoms in stages.plan.mesh.axis_atoms.items() if atoms]
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
            Cell(h.source(group), group, "w"),
            h.number(seconds_text(compute), compute),
            h.number(seconds_text(comm), comm),
            h.number(seconds_text(compute + comm), compute + comm),
            h.number(f"{100 * (compute + comm) / busy:.1f}%", compute + comm),
        )
        for group, (compute, comm) in ordered
    ]
    heads = ("source", "compute", "collectives", "together", "share")
    made = h.table(heads, rows, sort="together", search="a function or a file")
    return h.folded("time by source line", made)


def collective_table(collectives: Sequence[Collective]) -> str:
    """Every collective, equal ones together, those that take longest first."""
    heads = ("kind", "axes", "bytes", "times", "ops", "total", "time", "source and reason")
    ordered = sorted(collective_rows(collectives), key=lambda row: -row.seconds)
    rows = [
        (
            Cell(h.kind(row.kind), row.kind, "t"),
            h.text(", ".join(row.axes), "t"),
            h.number(bytes_text(row.bytes), row.bytes),
            h.number(str(row.count), row.count),
            h.number(str(row.ops), row.ops),
            h.number(bytes_text(row.total_bytes), row.total_bytes),
            h.number(seconds_text(row.seconds), row.seconds),
            Cell(
                f'{h.source(row.source)}<span class="reason">'
                f"{escape(source_text(row.reason))}</span>",
                row.source,
                "w",
            ),
        )
        for row in ordered
    ]
    made = h.table(heads, rows, sort="time", search="all_gather data mlp")
    return made or "<p>None: no device ever waits for another.</p>"


def bytes_by_kind(collectives: Sequence[Collective]) -> str:
    """What each device sends, by kind and axes."""
    return h.bars(
        [
            (
                f"{h.kind(total.kind)} "
                f"<span class=soft>over {escape(', '.join(total.axes))}</span>",
                total.bytes,
                f"{bytes_text(total.bytes)}, {total.runs}x, {seconds_text(total.seconds)}",
                f"var(--{total.kind})",
            )
            for total in traffic(collectives)
        ]
    )
