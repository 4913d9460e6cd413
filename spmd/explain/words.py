"""Formats what reports show: shardings, times and source lines, tables, lines of text."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from spmd.errors import bytes_text as bytes_text
from spmd.errors import seconds_text as seconds_text
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axes_text as axes_text
from spmd.mesh.sharding import spec_text as spec_text

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def parts_of_axes(text: str, *meshes: Mesh) -> list[str]:
    """Returns a sentence on each part of an axis in a text: `data:(2)4 is the inner part of ..`."""
    said = {}
    for mesh in meshes:
        for axis, whole in mesh.shape.items():
            for match in re.finditer(rf"\b{re.escape(axis)}:\((\d+)\)(\d+)", text):
                before, size = map(int, match.groups())
                sizes = before, size, whole // (before * size)
                which = "outer" if before == 1 else "middle" if sizes[2] > 1 else "inner"
                product = " x ".join(str(n) for n in sizes if n > 1)
                said[match[0]] = (
                    f"{match[0]} is the {which} part of axis {axis}, {whole} = {product}"
                )
    return list(said.values())


def share_text(part: float, whole: float) -> str:
    """Returns `part` of `whole` in percent: `12.5%`; `-` if `whole` is 0."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def plural(count: int, what: str) -> str:
    """Returns a count with its noun: `1 op`, `2 ops`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def type_text(type_: TensorType) -> str:
    """Returns a tensor's type as text: `f32[8,128]`."""
    return f"{type_.dtype}[{','.join(map(str, type_.shape))}]"


def source_text(text: str) -> str:
    """Shortens source lines in a text: `/a/llama/m.py:12 (g.<locals>.f)` -> `llama/m.py:12 (f)`."""
    text = re.sub(r"[^\s(]*/([^/\s(]+/[^/\s(]+:\d+)", r"\1", text)
    return re.sub(r"\([^\s()]*<locals>\.([^\s()]+)\)", r"(\1)", text)


def idle_text(axes: Sequence[str]) -> str:
    """Returns a sentence: nothing is split over these axes of the mesh, so devices repeat work."""
    which = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(axes)}"
    return f"nothing is split over {which} of the mesh: the devices along it repeat the same work"


# The parts of a report, which text and page both show; and the layout of text.

Look = Literal["text", "number", "code", "path", "name", "source", "kind"]
"""How a cell is shown: a `path` may break at its slashes, a `name` is a path in a fixed-width font,
a `source` is a source line and its caller's, a `kind` that of a collective."""

Rows = Sequence[tuple[str, str]]  # a name, and what is said of it


class Cell(NamedTuple):
    """Holds one cell of a table: its text, and how the HTML page shows it."""

    text: str
    look: Look = "text"
    key: float | None = None  # what the page's table sorts by; the text if left out
    note: str = ""  # a sentence below it


def _numbers(text_of: Callable[[Any], str]) -> Callable[[Any], Cell]:
    return lambda number: Cell(text_of(number), "number", number)


COLUMNS: dict[str, Callable[[Any], Cell]] = {
    **dict.fromkeys(("n", "ops", "runs"), _numbers(str)),
    **dict.fromkeys(("bytes", "each", "per device"), _numbers(bytes_text)),
    "time": _numbers(seconds_text),
    **dict.fromkeys(("predicted", "measured"), _numbers(lambda s: seconds_text(s) if s else "-")),
    "share": lambda parts: Cell(share_text(*parts), "number", parts[0]),  # (part, whole)
    **dict.fromkeys(("type", "local", "local type", "sharding"), partial(Cell, look="code")),
    "kind": partial(Cell, look="kind"),
    **dict.fromkeys(("name", "made by"), partial(Cell, look="name")),
    **dict.fromkeys(("origin", "what"), partial(Cell, look="path")),
    # a source line, or (source line, note)
    "source": lambda said: (
        Cell(said, "source") if isinstance(said, str) else Cell(said[0], "source", note=said[1])
    ),
}
"""Maps a column's head to the function that makes a cell of a value; others are plain text."""


class Table(NamedTuple):
    """Holds a table of values that are not text yet; a column's head says how to format them."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    sort: str = ""  # the column by which the rows are in order already, descending
    search: str = ""  # what the rows are, for a box on the page that filters them; no box if empty

    def by(self, head: str) -> "Table":
        """Returns the table sorted by the column `head`, of numbers, the largest first."""
        at = self.heads.index(head)
        return self._replace(rows=sorted(self.rows, key=lambda row: -row[at]), sort=head)

    def first(self, most: int) -> "Table":
        """Returns the table with only its first `most` rows."""
        return self._replace(rows=self.rows[:most])

    def cells(self) -> list[list[Cell]]:
        """Returns the rows, each value formatted as `COLUMNS` says for its column."""
        shows = [COLUMNS.get(head, Cell) for head in self.heads]
        return [[show(fact) for show, fact in zip(shows, r, strict=True)] for r in self.rows]

    def lines(self) -> list[str]:
        """Returns the table as lines of text, notes below their rows; none if there are no rows."""
        if not self.rows:
            return []
        rows = self.cells()
        right = [i for i, cell in enumerate(rows[0]) if cell.look == "number"]
        texts = [[source_text(cell.text) for cell in row] for row in rows]
        head, *lines = aligned([self.heads, *texts], right)
        made = [head]
        for line, row in zip(lines, rows, strict=True):
            made += [line, *(f"    {source_text(cell.note)}" for cell in row if cell.note)]
        return made


class Item(NamedTuple):
    """Holds a title, and rows of a name and a text; without a title they are the section's own."""

    title: str
    source: str = ""  # the user's source line and its caller's
    rows: Rows = ()

    def lines(self) -> list[str]:
        """Returns the title with the source, and the rows below it."""
        rows = [f"  {line}" if self.title else line for line in aligned(self.rows)]
        at = f", at {source_text(self.source)}" if self.source else ""
        return [f"{self.title}{at}", *rows] if self.title else rows


class Section(NamedTuple):
    """Holds one part of a report: a title, a remark beside the title, and a table or items."""

    title: str
    remark: str
    body: Table | list[Item]
    empty: str = ""  # what is said if there is nothing; if empty, the section is left out

    def lines(self) -> "Lines":
        """Yields title and body as lines of text; for an empty body `empty`, or nothing at all."""
        parts = [self.body] if isinstance(self.body, Table) else self.body
        lines = [line for part in parts for line in part.lines()]
        heading = f"{self.title}: {self.remark}" if self.remark else self.title
        yield from section(heading, lines or [self.empty] * bool(self.empty))


Lines = Iterator[str]  # what a part of a text yields, without line ends


def section(title: str, lines: Sequence[str]) -> Lines:
    """Yields a title, its lines indented, and an empty line; nothing where there are no lines."""
    if lines:
        yield title
        yield from (f"  {line}" for line in lines)
        yield ""


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines with aligned columns; columns numbered in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ).rstrip()
        for row in rows
    ]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Maps each key to the items that have it; keys are in the order of their first item."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
