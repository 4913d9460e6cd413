"""Text that the reports are laid out with: titled sections and aligned tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spmd.explain.document import Table
from spmd.explain.words import source_text

Lines = Iterator[str]
"""What a part of a report yields, without line ends."""


def section(title: str, lines: Sequence[str]) -> Lines:
    """Lines under a title, an empty one behind them; nothing where there are none."""
    if lines:
        yield title
        yield from (f"  {line}" for line in lines)
        yield ""


def counted(texts: Iterable[str]) -> list[str]:
    """Equal texts once, with how often they occur."""
    return [
        f"{source_text(text)}{f' ({n} times)' if n > 1 else ''}"
        for text, n in Counter(texts).items()
    ]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned columns; those numbered in `right` are flush right."""
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table_lines(table: Table) -> list[str]:
    """A table under its heads, numbers flush right, notes below their rows; none without rows."""
    if not table.rows:
        return []
    cells = [table.heads, *([source_text(cell.text) for cell in row] for row in table.rows)]
    right = [i for i, cell in enumerate(table.rows[0]) if cell.look == "number"]
    head, *lines = aligned(cells, right)
    below = [[cell.note for cell in row if cell.note] for row in table.rows]
    noted = [
        [line, *(f"    {source_text(note)}" for note in notes)]
        for line, notes in zip(lines, below, strict=True)
    ]
    return [head, *(line for lines in noted for line in lines)]
