"""Tables of a report, before they are text or a part of a page; and how text is laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from spmd.explain.words import source_text

Look = Literal["text", "number", "code", "path", "name", "source", "kind"]
"""What a cell holds: a `path` may break at its slashes, a `name` is a path in a fixed-width font, a
`source` is a source line and its caller's, a `kind` that of a collective."""


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    look: Look = "text"
    key: str | float | None = None  # what the page's table sorts by; the text if left out
    style: str = ""  # its class on the page: `t` stays on one line, `w` takes the room that is left
    # what the page unfolds: (name, remark) of each thing that the cell stands for
    parts: tuple[tuple[str, str], ...] = ()
    note: str = ""  # a sentence below it


def count(number: int) -> Cell:
    """A number as it is."""
    return Cell(str(number), "number", number)


def number(text: str, key: float) -> Cell:
    """A number as text, which sorts by `key`."""
    return Cell(text, "number", key)


def code(text: str, style: str = "t") -> Cell:
    """Text in a fixed-width font."""
    return Cell(text, "code", style=style)


def source(trail: str, note: str = "") -> Cell:
    """A source line and its caller's."""
    return Cell(trail, "source", style="w", note=note)


class Table(NamedTuple):
    """A table, whose rows are in order by the column `sort` already, descending.

    `search` says what the rows are, for a box on the page that filters them; no box if empty.
    """

    heads: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    sort: str = ""
    search: str = ""

    def without(self, head: str) -> Table:
        """The table with one column less."""
        at = self.heads.index(head)
        rows = [(*row[:at], *row[at + 1 :]) for row in self.rows]
        return self._replace(heads=(*self.heads[:at], *self.heads[at + 1 :]), rows=rows)

    def lines(self) -> list[str]:
        """As text: numbers flush right, notes below their rows; no lines without rows."""
        if not self.rows:
            return []
        cells = [self.heads, *([source_text(cell.text) for cell in row] for row in self.rows)]
        right = [i for i, cell in enumerate(self.rows[0]) if cell.look == "number"]
        head, *lines = aligned(cells, right)
        made = [head]
        for line, row in zip(lines, self.rows, strict=True):
            made += [line, *(f"    {source_text(cell.note)}" for cell in row if cell.note)]
        return made


Lines = Iterator[str]  # what a part of a text yields, without line ends


def section(title: str, lines: Sequence[str]) -> Lines:
    """Lines under a title, an empty one behind them; nothing where there are none."""
    if lines:
        yield title
        yield from (f"  {line}" for line in lines)
        yield ""


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned columns; those numbered in `right` are flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def counted(texts: Iterable[str]) -> list[str]:
    """Equal texts once, with how often they occur."""
    return [
        f"{source_text(text)}{f' ({n} times)' if n > 1 else ''}"
        for text, n in Counter(texts).items()
    ]
