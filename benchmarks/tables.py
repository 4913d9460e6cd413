"""Tables for a page, printed line by line."""

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
