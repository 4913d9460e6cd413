"""`progress`: one line on the terminal that says what a long compilation is doing.

    with progress("train_step", wanted=True):
        doing("plan")
        ...                      # after a while, on stderr: spmd: train_step, plan (3 s)

The line appears after `PATIENCE` seconds and is erased at the end, on terminals and in notebooks
alone: nothing is written to files or pipes. A `Stopwatch` calls `doing` for each of its stages.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE, EVERY = 1.5, 0.5  # seconds before the line appears, and between its updates


@contextmanager
def progress(what: str, wanted: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Shows a line `spmd: <what>, <stage> (3 s)` while the code inside runs, if that takes long.

    Nothing is shown if not `wanted`, inside another `progress`, or if `stream` (stderr when left
    out) is neither a terminal nor a notebook's.
    """
    stream = stream or sys.stderr
    if not wanted or _line.get() is not None:
        yield
        return
    ipython = sys.modules.get("IPython")
    if not stream.isatty() and (ipython is None or ipython.get_ipython() is None):
        yield  # nobody looks: it is no terminal, and no notebook, whose streams are none
        return
    line = _Line(what, stream)
    token = _line.set(line)
    line.start()
    try:
        yield
    finally:
        _line.reset(token)
        line.done.set()
        line.join()


def doing(stage: str) -> None:
    """Sets the stage that the line of the `progress` around shows; without one does nothing."""
    line = _line.get()
    if line is not None:
        line.stage = stage


class Stopwatch:
    """Measures the seconds of stages, each without stages inside it; prints them if verbose."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.seconds: dict[str, float] = {}  # of each stage, in the order in which they began
        self._inside = 0.0

    def __call__(self, stage: str, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns `run(*args, **kwargs)`, and adds its seconds to `seconds[stage]`."""
        doing(stage)
        self.seconds.setdefault(stage, 0.0)
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        result = run(*args, **kwargs)
        whole = time.perf_counter() - start
        own, self._inside = whole - self._inside, outside + whole
        self.seconds[stage] += own
        if self.verbose:
            print(f"spmd: {stage:<12} {own * 1e3:9.1f} ms", file=sys.stderr)
        return result


class _Line(threading.Thread):
    """A thread that writes the line of a `progress` and keeps its seconds up to date."""

    def __init__(self, what: str, stream: TextIO) -> None:
        super().__init__(name="spmd progress", daemon=True)
        self.what, self.stream, self.stage = what, stream, ""
        self.width = 0
        self.done = threading.Event()

    def run(self) -> None:
        begin, wait = time.monotonic(), PATIENCE
        while not self.done.wait(wait):
            stage = f", {self.stage}" if self.stage else ""
            text = f"spmd: {self.what}{stage} ({time.monotonic() - begin:.0f} s)"
            self.show(text[: shutil.get_terminal_size().columns - 1])
            wait = EVERY
        if self.width:
            self.show("")
            self.stream.write("\r")
            self.stream.flush()

    def show(self, text: str) -> None:
        # A terminal keeps what the text before had more: blanks go over it.
        self.stream.write(f"\r{text.ljust(self.width)}")
        self.stream.flush()
        self.width = len(text)


_line: ContextVar[_Line | None] = ContextVar("spmd progress", default=None)
