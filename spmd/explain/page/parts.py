"""Pieces of HTML that the report is made of: cells, sortable tables, bars, source lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from spmd.explain.document import Cell, Look, Table
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.words import source_text

_LOOKS: dict[Look, Callable[[str], Html]] = {
    "code": lambda text: tag("code", text),
    "path": lambda text: breakable(text),
    "name": lambda text: tag("code", breakable(text)),
    "source": lambda text: source(text),
    "kind": lambda text: joined(dot(f"var(--{text})"), text),
}
"""How a cell's text is shown; other looks show it as it is."""


def table(given: Table) -> Html:
    """A sortable table; nothing where it has no rows."""
    if not given.rows:
        return Html()
    heads = [
        tag(
            "th.n" if cell.look == "number" else "th",
            tag("button", name, type="button"),
            aria_sort="descending" if name == given.sort else None,
        )
        for name, cell in zip(given.heads, given.rows[0], strict=True)
    ]
    box = tag("input", type="search", placeholder=given.search)
    found = tag("output", f"{len(given.rows)} rows")
    body = tag("tbody", *(tag("tr", *map(_td, row)) for row in given.rows))
    return tag(
        "div.tabled",
        tag("label.filter", "filter ", box, found) if given.search else "",
        tag("div.scroll", tag("table.sortable", tag("thead", tag("tr", *heads)), body)),
    )


def _td(cell: Cell) -> Html:
    style = "n" if cell.look == "number" else cell.style
    shown = _LOOKS[cell.look](cell.text) if cell.look in _LOOKS else cell.text
    if cell.parts:
        items = [
            tag("li", tag("code", breakable(name)), " ", breakable(remark))
            for name, remark in cell.parts
        ]
        shown = folded(shown, tag("ul", *items))
    note = tag("span.reason", source_text(cell.note)) if cell.note else ""
    key = cell.text if cell.key is None else cell.key
    return tag(f"td.{style}", shown, note, data_v=str(key))


def folded(title: str, body: Html) -> Html:
    """Something to unfold."""
    return tag("details", tag("summary", title), body)


def source(trail: str) -> Html:
    """A source line with its caller; the whole paths are shown on hovering."""
    first, _, rest = source_text(trail).partition(" <- ")
    return tag("code", first, tag("span.caller", f" ← {rest}") if rest else "", title=trail)


def breakable(name: str) -> Html:
    """A path that may go on in the next line after any of its parts."""
    return Html(re.sub(r"([/,])", r"\1<wbr>", escape(name)))


def dot(colour: str) -> Html:
    """A dot of a colour, before what has the colour in a picture."""
    return tag("span.dot", style=f"background:{colour}")


def legend(colours: Iterable[tuple[str, str]]) -> Html:
    """(name, CSS colour) as a row of colours."""
    return tag("p.legend", *(tag("span", dot(colour), name) for name, colour in colours))


def bars(rows: Sequence[tuple[str, float, str, str]]) -> Html:
    """(label, amount, text, CSS colour) as horizontal bars, the largest one full."""
    most = max((amount for _, amount, _, _ in rows), default=0) or 1
    cells = [
        joined(
            tag("div", label),
            tag("div.track", _bar(amount / most, colour)),
            tag("div.value", remark),
        )
        for label, amount, remark, colour in rows
    ]
    return tag("div.bars", *cells) if rows else Html()


def _bar(share: float, colour: str) -> Html:
    return tag("div.bar", style=f"width:{share:.2%};background:{colour}")
