"""Pieces of HTML that the report is made of: cells, sortable tables, bars, source lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from spmd.explain.words import source_text


class Cell(NamedTuple):
    """A table cell: its HTML, what it sorts by, and its class (`n`: a number, flush right)."""

    html: str
    key: str | float = ""
    style: str = ""


def text(content: str, style: str = "") -> Cell:
    """Plain text."""
    return Cell(escape(content), content, style)


def code(content: str, style: str = "t") -> Cell:
    """Text in a fixed-width font."""
    return Cell(f"<code>{escape(content)}</code>", content, style)


def number(content: str, key: float) -> Cell:
    """A number as text, which sorts by `key`."""
    return Cell(escape(content), key, "n")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Cell]], sort: str = "", search: str = ""
) -> str:
    """A sortable table.

    Args:
      heads: the columns' names.
      rows: their cells.
      sort: the column by which the rows already are in order, descending.
      search: what the rows are, for a box that filters them; no box if empty.
    """
    made = list(rows)
    if not made:
        return ""
    head = "".join(
        f"<th{_class(cell.style if cell.style == 'n' else '')}"
        f'{" aria-sort=descending" if name == sort else ""}><button type="button">'
        f"{escape(name)}</button></th>"
        for name, cell in zip(heads, made[0], strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in made)
    box = (
        f'<label class="filter">filter <input type="search" placeholder="{escape(search)}">'
        f"<output>{len(made)} rows</output></label>"
        if search
        else ""
    )
    return (
        f'<div class="tabled">{box}<div class="scroll"><table class="sortable"><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _td(cell: Cell) -> str:
    return f'<td{_class(cell.style)} data-v="{escape(str(cell.key))}">{cell.html}</td>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def folded(title: str, body: str) -> str:
    """Something to unfold."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def source(trail: str) -> str:
    """A source line with its caller; the whole paths are shown on hovering."""
    first, _, rest = source_text(trail).partition(" <- ")
    caller = f'<span class="caller"> ← {escape(rest)}</span>' if rest else ""
    return f'<code title="{escape(trail)}">{escape(first)}{caller}</code>'


def breakable(name: str) -> str:
    """A path that may go on in the next line after any of its parts."""
    return re.sub(r"([/,])", r"\1<wbr>", escape(name))


def kind(name: str) -> str:
    """A collective's kind with its colour."""
    return f'<span class="dot" style="background:var(--{escape(name)})"></span>{escape(name)}'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, CSS colour) as a row of colours."""
    return '<p class="legend">' + "".join(
        f'<span><span class="dot" style="background:{colour}"></span>{escape(name)}</span>'
        for name, colour in entries
    ) + "</p>"  # fmt: skip


def bars(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """(label as HTML, amount, text, CSS colour) as horizontal bars, the largest one full."""
    most = max((amount for _, amount, _, _ in rows), default=0) or 1
    cells = "".join(
        f'<div>{label}</div><div class="track"><div class="bar" style="width:'
        f'{100 * amount / most:.2f}%;background:{colour}"></div></div>'
        f'<div class="value">{escape(remark)}</div>'
        for label, amount, remark, colour in rows
    )
    return f'<div class="bars">{cells}</div>' if rows else ""
