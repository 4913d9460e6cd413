"""Parts of the page about what the plan decided against: marks and conflicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from spmd.explain.decisions import ConflictRow, loser_text, marks_title
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.facts import Facts
from spmd.explain.page import parts as h
from spmd.explain.price import Price
from spmd.explain.words import seconds_text, spec_text


def mark_table(facts: Facts) -> str:
    """Marks that forbid something cheaper."""
    if facts.prices is None or not facts.prices.marks.groups:
        return ""
    rows = [
        (
            source(marks.name),
            code(spec_text(marks.sharding, facts.plan.mesh)),
            count(len(marks.values)),
            number(seconds_text(-price.seconds), -price.seconds),
            Cell(price.text, style="w"),
        )
        for marks, price in facts.prices.marks.reliefs
    ]
    heads = ("mark", "sharding", "values", "costs", "without it")
    found = h.table(Table(heads, rows, sort="costs"))
    none = "<p>None of them costs 1% of the collectives' time or more.</p>"
    return f"<p>{escape(marks_title(facts.prices).capitalize())}.</p>{found or none}"


def conflict_table(conflicts: Sequence[ConflictRow]) -> str:
    """Disagreements that the planner settled."""
    rows = [
        (
            _html(f"{escape(row.op)}<br>{h.source(row.source)}", f"{row.op} {row.source}"),
            count(row.ops),
            _html("<br>".join(map(_claim, row.claims)), str(row.claims)),
            _html(f"<b>{escape(row.taken)}</b>", row.taken, "t"),
            _html(_losers(row.losers), _least(row.losers)),
        )
        for row in conflicts
    ]
    heads = ("op", "n", "who wants what", "the plan took", "what else would cost")
    return h.table(Table(heads, rows, search="an op, an argument, an axis"))


def _html(shown: str, key: str | float, style: str = "w") -> Cell:
    return Cell(shown, "html", key, style)


def _claim(claim: tuple[str, str, int, str]) -> str:
    name, type_, dim, axes = claim
    return (
        f"<b>{escape(axes)}</b> on dim {dim} of <code>{h.breakable(name)}</code> "
        f'<code class="soft">{escape(type_)}</code>'
    )


_Losers = Sequence[tuple[str, Price | None]]


def _losers(losers: _Losers | None) -> str:
    if losers is None:
        return '<span class="soft">not asked</span>'
    return "<br>".join(f"<b>{escape(axes)}</b>: {escape(loser_text(p))}" for axes, p in losers)


def _least(losers: _Losers | None) -> float:
    return min((price.seconds for _, price in losers or () if price), default=math.inf)
