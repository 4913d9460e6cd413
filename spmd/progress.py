"""`progress`: one line on the terminal that says what a long compilation is doing.

    with progress("train_step", wanted=True):
        doing("plan")
        ...                      # after a while, on stderr: spmd: train_step, plan (3 s)

The line appears when the work takes longer than people wait gladly, and is erased at the end. Logs
never see it: what is written to a file or a pipe stays as it is. A `Stopwatch` tells it of stages.
The processes of a job read the same from `under_way`, for their signs of life.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE, EVERY = 1.5, 0.5  # seconds before the line appears, and between its updates


@contextmanager
def progress(
    what: str, wanted: bool, stream: TextIO | None = None, *, kind: str = ""
) -> Iterator[None]:
    """Shows, if `wanted`, a line on a terminal or in a notebook, if what is done inside takes long.

    The line names the work, `what`, and its stage. `kind` names the work to other processes, shown
    or not. Inside another `progress` it does nothing. The stream is stderr when left out.
    """
    if _work.get() is not None:
        yield
        return
    work, stream = _Work(what, kind), stream or sys.stderr
    line = threading.Thread(target=work.show, args=[stream], name="spmd progress", daemon=True)
    token = _work.set(work)
    _open.append(work)
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    is_shown = wanted and (in_notebook or stream.isatty())
    if is_shown:
        line.start()
    try:
        yield
    finally:
        _work.reset(token)
        _open.remove(work)
        work.done.set()
        if is_shown:
            line.join()


def doing(stage: str) -> None:
    """Tells the work that is under way in this thread, if any, which stage of it begins now."""
    work = _work.get()
    if work is not None:
        work.stage = stage


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Makes `waiting for <what>`, while inside, the stage of the work under way, or of new work."""
    with progress(what, False):
        work = _work.get()
        assert work is not None
        before, work.stage = work.stage, f"waiting for {what}"
        try:
            yield
        finally:
            work.stage = before


def kind_here() -> str:
    """Returns the kind of the work that is under way in this thread; empty if none is."""
    work = _work.get()
    return "" if work is None else work.kind


def under_way() -> str:
    """Returns `<kind>, <stage>` of the newest work that any thread has under way; empty if none."""
    work = next(reversed(_open.copy()), None)
    return "" if work is None else ", ".join(filter(None, (work.kind, work.stage)))


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
        try:
            return run(*args, **kwargs)
        finally:  # a stage that fails may be tried in another way
            whole = time.perf_counter() - start
            own, self._inside = whole - self._inside, outside + whole
            self.seconds[stage] += own
            if self.verbose:
                print(f"spmd: {stage:<12} {own * 1e3:9.1f} ms", file=sys.stderr)


@dataclass(eq=False)
class _Work:
    what: str
    kind: str
    stage: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def show(self, stream: TextIO) -> None:
        """Keeps a line with the stage and its seconds up to date, and erases it at the end."""
        begin, wait, width = time.monotonic(), PATIENCE, 0
        while not self.done.wait(wait):
            stage = f", {self.stage}" if self.stage else ""
            text = f"spmd: {self.what}{stage} ({time.monotonic() - begin:.0f} s)"
            text = text[: shutil.get_terminal_size().columns - 1]
            # A terminal keeps what the text before had more: blanks go over it.
            stream.write(f"\r{text.ljust(width)}")
            stream.flush()
            wait, width = EVERY, len(text)
        stream.write(f"\r{' ' * width}\r" if width else "")
        stream.flush()


_work: ContextVar[_Work | None] = ContextVar("spmd progress", default=None)
_open: list[_Work] = []  # of all threads, the oldest first
