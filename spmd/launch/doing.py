"""What this process is doing, as its signs of life say it, even while its main thread hangs.

Nothing is noted where programs are called, for that is where time counts: a thread reads it off the
main thread's stack.
"""

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

from spmd.launch.store import devices_are_open
from spmd.progress import under_way

Locals = Mapping[str, Any]
RUNS: dict[CodeType, Callable[[Locals], str | None]] = {}
"""Code of functions that run programs -> says of which, given its local variables; None if that is
no program of several processes."""

_OTHERS = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class Doing(NamedTuple):
    """What a process is doing."""

    text: str
    # Whether it runs a program that others have to run, too, and does nothing else meanwhile: it
    # comes to nothing else before that ends.
    is_running: bool


def doing_now() -> Doing:
    """Reads what this process is doing: compiling, running, or at which line its program is."""
    if work := under_way():
        return Doing(work, False)
    frames = list(_frames())
    place = next((f" at {_line(f)}" for f in frames if is_users(f)), "")
    for frame in frames:
        said = RUNS[frame.f_code](frame.f_locals) if frame.f_code in RUNS else None
        if said is not None:
            return Doing(f"running {said}{place}", True)
    if is_computing():
        return Doing(f"waiting for its devices{place}", True)
    return Doing(place.strip(), False)


def is_computing() -> bool:
    """Whether this process's devices compute a result that lies on those of others, too."""
    if not devices_are_open():
        return False
    for array in jax.live_arrays():
        try:
            if not array.is_fully_addressable and not array.is_ready():
                return True
        except RuntimeError:  # deleted just now
            continue
    return False


def _frames() -> Iterator[FrameType]:
    """Calls of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Whether a call is of the user's code: not of this package, and not of what is installed."""
    return not frame.f_code.co_filename.startswith(("<frozen", *_OTHERS))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
