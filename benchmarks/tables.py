"""Tables for a page, printed line by line, or written into it."""

import re
from collections.abc import Iterable, Sequence


def row_line(cells: Iterable[str]) -> str:
    """A row as Markdown has it."""
    return f"| {' | '.join(cells)} |"


def print_head(heads: Sequence[str]) -> None:
    """The first two lines of a table."""
    print_line(heads)
    print("|" + " --- |" * len(heads), flush=True)


def print_line(line: Sequence[str], problem: str = "") -> None:
    """One more line, and below it why it is empty."""
    print(row_line(line), flush=True)
    if problem:
        print(f"    {problem}", flush=True)


def print_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A whole table, each line when it is there."""
    print_head(heads)
    for line in lines:
        print_line(line)


def with_rows(page: str, heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    r"""A page with other rows in the table that has these heads.

    Raises:
      ValueError: the page has no such table, or several.

    >>> with_rows("| a | b |\n| --- | --- |\n| 1 | 2 |\n", ("a", "b"), [("3", "4")])
    '| a | b |\n| --- | --- |\n| 3 | 4 |\n'
    """
    table = rf"(?m)^({re.escape(row_line(heads))}\n\|[-| ]+\n)(\|.*\n)*"
    lines = "".join(f"{row_line(row)}\n" for row in rows)
    text, count = re.subn(table, lambda found: found[1] + lines, page)
    if count != 1:
        raise ValueError(f"the page has {count} tables {row_line(heads)}")
    return text
