"""Parts of the page about what the plan decided against: marks and conflicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.explain.decisions import ConflictRow, Losers, loser_text, marks_title
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.facts import Facts
from spmd.explain.page import parts as h
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.words import seconds_text, spec_text

BREAK = tag("br")


def mark_table(facts: Facts) -> Html:
    """Marks that forbid something cheaper."""
    if facts.prices is None or not facts.prices.marks.groups:
        return Html()
    rows = [
        (
            source(marks.name),
            code(spec_text(marks.sharding, facts.plan.mesh)),
            count(len(marks.values)),
            number(seconds_text(-price.seconds), -price.seconds),
            Cell(price.text, style="w"),
        )
        for marks, price, *_ in facts.prices.marks.reliefs
    ]
    heads = ("mark", "sharding", "values", "costs", "without it")
    found = h.table(Table(heads, rows, sort="costs"))
    none = tag("p", "None of them costs 1% of the collectives' time or more.")
    return joined(tag("p", f"{marks_title(facts.prices).capitalize()}."), found or none)


def conflict_table(conflicts: Sequence[ConflictRow]) -> Html:
    """Disagreements that the planner settled."""
    rows = [
        (
            Cell(_place(row), key=f"{row.op} {row.source}", style="w"),
            count(row.ops),
            Cell(joined(*map(_claim, row.claims), by=BREAK), key=str(row.claims), style="w"),
            Cell(tag("b", row.taken), key=row.taken, style="t"),
            Cell(_losers(row.losers), key=_least(row.losers), style="w"),
        )
        for row in conflicts
    ]
    heads = ("op", "n", "who wants what", "the plan took", "what else would cost")
    return h.table(Table(heads, rows, search="an op, an argument, an axis"))


def _place(row: ConflictRow) -> Html:
    return joined(row.op, BREAK, h.source(row.source))


def _claim(claim: tuple[str, str, int, str]) -> Html:
    name, type_, dim, axes = claim
    return joined(
        tag("b", axes),
        f" on dim {dim} of ",
        tag("code", h.breakable(name)),
        " ",
        tag("code.soft", type_),
    )


def _losers(losers: Losers | None) -> Html:
    if losers is None:
        return tag("span.soft", "not asked")
    shown = (joined(tag("b", axes), f": {loser_text(price)}") for axes, price in losers)
    return joined(*shown, by=BREAK)


def _least(losers: Losers | None) -> float:
    return min((price.seconds for _, price in losers or () if price), default=math.inf)
