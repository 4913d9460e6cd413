"""Parts of the page about one run: the plan, the timeline, the collectives, memory."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.explain.collectives import collective_rows, traffic
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.facts import Facts, memory_rows, quality_rows
from spmd.explain.measured import part_table
from spmd.explain.memory import KINDS, memory_curve
from spmd.explain.page import charts
from spmd.explain.page import parts as h
from spmd.explain.page.bars import Bars, bars_of
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.recomputed import recomputed_rows
from spmd.explain.tables import collective_table, recomputed_table
from spmd.explain.words import bytes_text, seconds_text, share_text
from spmd.predict.timeline import COMPUTE, Timeline

TOP_VALUES = 15
"""Rows of the table of what is alive at the peak."""


def quality(facts: Facts) -> Html:
    """This plan beside the greedy one and the best there can be."""
    seconds = facts.timeline.seconds
    rows = [("this plan", seconds, seconds_text(seconds), "var(--accent)")]
    return h.bars(rows + [(*row, "var(--soft)") for row in quality_rows(facts)])


def recomputed(facts: Facts) -> Html:
    """What is made again rather than held."""
    rows = recomputed_rows(facts.plan)
    return h.table(recomputed_table(rows)) if rows else Html()


def timeline_chart(facts: Facts) -> Html:
    """The predicted run as a picture."""
    drawn = bars_of(facts.timeline, facts.plan.mesh)
    if not drawn.seconds:
        return Html()
    axes = [name for name, atoms in facts.plan.mesh.axis_atoms.items() if atoms]
    kinds = dict.fromkeys((COMPUTE, *(segment.kind for segment in drawn.flat())))
    intro = tag(
        "p",
        "Compute, and the links of every mesh axis. A collective starts when its operands are "
        "there and its links are free; whoever reads its result waits for it. Iterations of a loop "
        "do not overlap.",
    )
    lost = facts.timeline.seconds - drawn.seconds
    slower = tag(
        "p",
        f"The prediction adds {seconds_text(lost)} to what is drawn: on this chip arithmetic and "
        "communication that run side by side slow each other.",
    )
    return joined(
        intro,
        slower if lost > drawn.seconds / 1000 else "",
        h.legend((kind, f"var(--{kind})") for kind in kinds),
        charts.timeline_svg(drawn, axes, "timeline of one run"),
        *(_loop(loop, axes) for loop in drawn.loops),
        h.folded("time by source line", _lines(facts.timeline)),
    )


def _loop(loop: Bars, axes: Sequence[str]) -> Html:
    """One iteration of a loop, to unfold, with the loops inside it."""
    each = f": {seconds_text(loop.once)}"
    return tag(
        "details.iteration",
        tag("summary", f"one iteration of the {loop.title} at ", h.source(loop.place), each),
        charts.timeline_svg(loop, axes, "timeline of one iteration"),
        *(_loop(inside, axes) for inside in loop.loops),
    )


def _lines(timeline: Timeline) -> Html:
    """Time by source line."""
    totals: dict[str, list[float]] = {}
    for slot in timeline.slots:
        if not slot.op.regions:
            both = totals.setdefault(slot.op.loc.trail, [0.0, 0.0])
            both[slot.lane != COMPUTE] += slot.seconds * slot.trips
    busy = timeline.compute_seconds + timeline.comm_seconds
    rows = [
        (
            source(trail),
            number(seconds_text(compute), compute),
            number(seconds_text(comm), comm),
            number(seconds_text(compute + comm), compute + comm),
            number(share_text(compute + comm, busy), compute + comm),
        )
        for trail, (compute, comm) in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    heads = ("source", "compute", "collectives", "together", "share")
    return h.table(Table(heads, rows, sort="together", search="a function or a file"))


def collectives(facts: Facts) -> Html:
    """Every collective, equal ones together, those that take longest first."""
    ordered = sorted(collective_rows(facts.collectives), key=lambda row: -row.seconds)
    made = collective_table(ordered).without("ms")
    made = made._replace(heads=(*made.heads[:-1], "source and reason"))
    return h.table(made) or tag("p", "None: no device ever waits for another.")


def bytes_by_kind(facts: Facts) -> Html:
    """What each device sends, by kind and axes."""
    rows = []
    for total in traffic(facts.collectives):
        kind, colour = total.like.kind, f"var(--{total.like.kind})"
        over = tag("span.soft", f" over {', '.join(total.like.axes)}")
        figures = f"{bytes_text(total.bytes)}, {total.runs}x, {seconds_text(total.seconds)}"
        rows.append((joined(h.dot(colour), kind, over), total.bytes, figures, colour))
    return h.bars(rows)


def measured(facts: Facts) -> Html:
    """What steps took, by kind, by layer and by collective, beside what was predicted."""
    if facts.measured is None:
        return Html()
    (title, kinds), *others = facts.measured.tables()
    return joined(
        tag("p", title[:1].upper(), title[1:]),
        h.table(part_table(kinds)),
        *(h.folded(title, h.table(part_table(parts))) for title, parts in others),
    )


def memory_chart(facts: Facts) -> Html:
    """Memory over a run as a picture, what is held at its peak, and the totals."""
    if facts.use is None:
        return Html()
    curve = memory_curve(facts.use, facts.stages.optimized.program)
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
    figures = [(Cell(what), Cell(size)) for what, size in memory_rows(facts)]
    intro = tag(
        "p",
        "Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        f"arguments. {facts.compiled_text}{'.' * bool(facts.compiled_text)}",
    )
    return joined(
        intro,
        h.legend(zip(KINDS, charts.MEMORY_COLOURS, strict=True)),
        charts.memory_svg(curve, facts.plan.topology.hbm_bytes),
        h.folded("the largest at the peak", h.table(Table(heads, rows, sort="bytes"))),
        h.folded("totals", h.table(Table(("what", "bytes"), figures))),
    )
