"""Tables of a report, before they are text or a part of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Look = Literal["text", "number", "code", "path", "name", "source", "kind"]
"""What a cell holds: a `path` may break at its slashes, a `name` is a path in a fixed-width font, a
`source` is a source line and its caller's, a `kind` that of a collective."""


class Cell(NamedTuple):
    """One cell of a table.

    Attributes:
      text: what it says.
      look: what that is.
      key: what the page's table sorts by; the text if left out.
      style: its class on the page: `t` stays on one line, `w` takes the room that is left.
      parts: what the page unfolds: (name, remark) of each thing that the cell stands for.
      note: a sentence below it.
    """

    text: str
    look: Look = "text"
    key: str | float | None = None
    style: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    note: str = ""


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
    """A table.

    Attributes:
      heads: the columns' names.
      rows: their cells.
      sort: the column by which the rows already are in order, descending.
      search: what the rows are, for a box on the page that filters them; no box if empty.
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
