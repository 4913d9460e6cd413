"""Parts of the page about what the plan decided against: marks and conflicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from spmd.explain.decisions import ConflictRow, LosingClaim, mark_rows, marks_title
from spmd.explain.page import parts as h
from spmd.explain.page.parts import Cell
from spmd.explain.prices import Prices
from spmd.explain.words import seconds_text
from spmd.pipeline import Stages


def mark_table(stages: Stages, prices: Prices | None) -> str:
    """Marks that forbid something cheaper."""
    if prices is None or not prices.marks.groups:
        return ""
    rows = [
        (
            Cell(h.source(row.name), row.name, "w"),
            h.code(row.sharding),
            h.number(str(row.values), row.values),
            h.number(seconds_text(-row.seconds), -row.seconds),
            Cell(escape(row.text), row.text, "w"),
        )
        for row in mark_rows(stages, prices)
    ]
    heads = ("mark", "sharding", "values", "costs", "without it")
    found = h.table(heads, rows, sort="costs")
    none = "<p>None of them costs 1% of the collectives' time or more.</p>"
    return f"<p>{escape(marks_title(prices).capitalize())}.</p>{found or none}"


def conflict_table(conflicts: Sequence[ConflictRow]) -> str:
    """Disagreements that the planner settled."""
    rows = [
        (
            Cell(f"{escape(row.op)}<br>{h.source(row.source)}", f"{row.op} {row.source}", "w"),
            h.number(str(row.ops), row.ops),
            Cell("<br>".join(map(_claim, row.claims)), str(row.claims), "w"),
            Cell(f"<b>{escape(row.taken)}</b>", row.taken, "t"),
            Cell(_losers(row.losers), _least(row.losers), "w"),
        )
        for row in conflicts
    ]
    heads = ("op", "n", "who wants what", "the plan took", "what else would cost")
    return h.table(heads, rows, search="an op, an argument, an axis")


def _claim(claim: tuple[str, str, int, str]) -> str:
    name, type_, dim, axes = claim
    return (
        f"<b>{escape(axes)}</b> on dim {dim} of <code>{h.breakable(name)}</code> "
        f'<code class="soft">{escape(type_)}</code>'
    )


def _losers(losers: Sequence[LosingClaim] | None) -> str:
    if losers is None:
        return '<span class="soft">not asked</span>'
    return "<br>".join(f"<b>{escape(x.axes)}</b>: {escape(x.text)}" for x in losers)


def _least(losers: Sequence[LosingClaim] | None) -> float:
    return min((x.seconds for x in losers or () if x.seconds is not None), default=math.inf)
