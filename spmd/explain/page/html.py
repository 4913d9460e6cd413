"""Makes HTML and SVG as strings: elements, and the shapes, tables and legends of the report."""

import re
from collections.abc import Callable, Iterable, Mapping
from html import escape

from spmd.explain.words import Cell, Item, Look, Section, Table, seconds_text, source_text


class Html(str):
    """A string that is HTML or SVG markup already, so that `tag` does not escape it."""

    __slots__ = ()


def tag(look: str, *children: str, **attributes: object) -> Html:
    """Returns an element; `look` is its name, and its class behind a dot, as in a CSS selector.

    Children that are `Html` stay as they are, other text is escaped. Attributes have `_` where
    their names have dashes; those that are None or False are left out.

    >>> tag("p.soft", "a < b", title="order")
    '<p class="soft" title="order">a &lt; b</p>'
    """
    name, _, style = look.partition(".")
    shown = ""
    for key, value in {"class": style or None, **attributes}.items():
        if value is None or value is False:
            continue
        shown += f" {key.replace('_', '-')}"
        if value is not True:
            text = str(round(value, 2)) if isinstance(value, float) else str(value)
            shown += f'="{escape(text)}"'
    if name in ("br", "input", "meta"):
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{joined(*children)}</{name}>")


def joined(*parts: str) -> Html:
    """Joins markup and text; text that is not `Html` is escaped."""
    return Html("".join(p if isinstance(p, Html) else escape(p) for p in parts))


def drawing(
    look: str, width: float, height: float, shapes: Iterable[Html], label: str, **attributes: object
) -> Html:
    """Returns an SVG picture of CSS class `look`; sizes are pixels, screen readers say `label`."""
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": width, "height": height}
    return tag(f"svg.{look}", *shapes, **size, role="img", aria_label=label, **attributes)


def rect(
    look: str, box: tuple[float, float, float, float], title: str = "", **attributes: object
) -> Html:
    """Returns a rectangle of CSS class `look`; `box`: (x, y, width, height), `title`: a tooltip."""
    x, y, width, height = box
    inside = [tag("title", title)] if title else []
    return tag(f"rect.{look}", *inside, x=x, y=y, width=width, height=height, **attributes)


def line(look: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    """Returns a straight SVG line of CSS class `look` from (x1, y1) to (x2, y2)."""
    return tag(f"line.{look}", x1=x1, y1=y1, x2=x2, y2=y2)


def words(x: float, y: float, text: str, look: str = "", **attributes: object) -> Html:
    """Returns SVG text of CSS class `look` that begins at (x, y), unless `text_anchor` is given."""
    return tag(f"text.{look}", text, x=x, y=y, **attributes)


_LOOKS: dict[Look, Callable[[str], Html]] = {
    "code": lambda text: tag("code", text),
    "path": lambda text: breakable(text),
    "name": lambda text: tag("code", breakable(text)),
    "source": lambda text: source(text),
    "kind": lambda text: joined(dot(f"var(--{text})"), text),
}
"""Maps a cell's look to the function that makes markup of its text; others show the text as is."""

_WIDE = ("path", "name", "source")  # cells that take what room is left; others stay on one line


def section(given: Section) -> Html:
    """Returns a section's table or items, else its `empty` text; empty HTML if it has none."""
    empty = tag("p", given.empty) if given.empty else Html()
    if isinstance(given.body, Table):
        return table(given.body) or empty
    return joined(*map(item, given.body)) or empty


def item(given: Item) -> Html:
    """Returns a title with its source line, and below it what is said of it."""
    if not given.rows:
        return tag("p", source_text(given.title))
    at = (" at ", source(given.source)) if given.source else ()
    title = tag("p.item", tag("b", given.title), *at) if given.title else ""
    rows = (joined(tag("dt", what), tag("dd", text)) for what, text in given.rows)
    return joined(title, tag("dl.facts", *rows))


def table(given: Table) -> Html:
    """Returns an HTML table that the reader can sort by any column; empty if there are no rows."""
    if not given.rows:
        return Html()
    rows = given.cells()
    heads = [
        tag(
            "th.n" if cell.look == "number" else "th",
            tag("button", name, type="button"),
            aria_sort="descending" if name == given.sort else None,
        )
        for name, cell in zip(given.heads, rows[0], strict=True)
    ]
    box = tag("input", type="search", placeholder=given.search)
    found = tag("output", f"{len(rows)} rows")
    body = tag("tbody", *(tag("tr", *map(_td, given.heads, row)) for row in rows))
    return tag(
        "div.tabled",
        tag("label.filter", "filter ", box, found) if given.search else "",
        tag("div.scroll", tag("table.sortable", tag("thead", tag("tr", *heads)), body)),
    )


def _td(head: str, cell: Cell) -> Html:
    style = "n" if cell.look == "number" else "w" if cell.look in _WIDE else "t"
    shown = _LOOKS[cell.look](cell.text) if cell.text and cell.look in _LOOKS else cell.text
    note = tag("span.reason", source_text(cell.note)) if cell.note else ""
    key = cell.text if cell.key is None else cell.key
    return tag(f"td.{style}", shown, note, data_v=str(key), data_head=head)


def cards(rows: Iterable[tuple[str, str, str]]) -> Html:
    """Returns (label, value, remark) triples as cards beside each other."""
    shown = (
        (tag("span.label", label), tag("b", value), tag("span", rest))
        for label, value, rest in rows
    )
    return tag("div.cards", *(tag("div.card", *card) for card in shown))


def stretches(spent: Mapping[str, float], colours: Mapping[str, str]) -> list[Html]:
    """Returns the parts of a bar, as wide as the seconds `spent`, by name, in CSS `colours`."""
    whole = sum(spent.values())
    return [
        tag(
            "span",
            style=f"flex:{took / whole:.4f};background:{colours[name]}",
            title=f"{name}: {seconds_text(took)}",
        )
        for name, took in spent.items()
        if whole
    ]


def source(trail: str) -> Html:
    """Returns `m.py:2 (f) ← m.py:9 (g)` for an op's `trail`; a tooltip has the full paths."""
    first, _, rest = source_text(trail).partition(" <- ")
    return tag("code", first, tag("span.caller", f" ← {rest}") if rest else "", title=trail)


def breakable(name: str) -> Html:
    """Escapes a path, and lets the browser break the line after each `/` and `,` in it."""
    return Html(re.sub(r"([/,])", r"\1<wbr>", escape(name)))


def dot(colour: str) -> Html:
    """Returns a dot of a CSS colour, to be put before a name in a legend."""
    return tag("span.dot", style=f"background:{colour}")


def legend(colours: Iterable[tuple[str, str]]) -> Html:
    """Returns a row of names, each with a dot of its colour, from (name, CSS colour) pairs."""
    return tag("p.legend", *(tag("span", dot(colour), name) for name, colour in colours))
