"""A progress bar for what moves many bytes."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]
"""Called with the number of bytes that are done."""

_LONG_BYTES = 2**28
"""Below this there is no time to look at a bar."""


@contextlib.contextmanager
def bytes_bar(what: str, total: int, console: Console | None) -> Iterator[Advance]:
    """A bar on process 0's terminal, if there are many bytes; else nothing.

    Args:
        what: what is going on, such as "loading weights".
        console: where it goes; None is nowhere.
    """
    if console is None or not console.is_terminal or jax.process_index() or total < _LONG_BYTES:
        yield lambda done: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
