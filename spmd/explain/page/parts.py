"""Pieces of HTML that the report is made of: cells, sortable tables, bars, source lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from spmd.explain.document import Cell, Look, Table
from spmd.explain.words import source_text

_LOOKS: dict[Look, Callable[[str], str]] = {
    "text": escape,
    "number": escape,
    "code": lambda text: f"<code>{escape(text)}</code>",
    "path": lambda text: breakable(text),
    "name": lambda text: f"<code>{breakable(text)}</code>",
    "source": lambda text: source(text),
    "kind": lambda text: kind(text),
    "html": str,
}
"""A cell's look -> its text as HTML."""


def table(given: Table) -> str:
    """A sortable table; nothing where it has no rows."""
    if not given.rows:
        return ""
    head = "".join(
        f"<th{_class('n' if cell.look == 'number' else '')}"
        f'{" aria-sort=descending" if name == given.sort else ""}><button type="button">'
        f"{escape(name)}</button></th>"
        for name, cell in zip(given.heads, given.rows[0], strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in given.rows)
    box = (
        f'<label class="filter">filter <input type="search" placeholder="{escape(given.search)}">'
        f"<output>{len(given.rows)} rows</output></label>"
        if given.search
        else ""
    )
    return (
        f'<div class="tabled">{box}<div class="scroll"><table class="sortable"><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _td(cell: Cell) -> str:
    style = "n" if cell.look == "number" else cell.style
    key = cell.text if cell.key is None else cell.key
    shown = _LOOKS[cell.look](cell.text)
    if cell.parts:
        items = "".join(
            f"<li><code>{breakable(name)}</code> {breakable(remark)}</li>"
            for name, remark in cell.parts
        )
        shown = f"<details><summary>{shown}</summary><ul>{items}</ul></details>"
    if cell.note:
        shown += f'<span class="reason">{escape(source_text(cell.note))}</span>'
    return f'<td{_class(style)} data-v="{escape(str(key))}">{shown}</td>'


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
