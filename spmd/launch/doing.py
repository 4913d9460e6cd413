"""What this process is doing, as its signs of life say it, even while its main thread hangs.

Nothing is noted where programs are called, for that is where time counts: a thread reads it off the
main thread's stack.
"""

import json
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any, NamedTuple

import jax

from spmd.launch.store import JobStore, devices_are_open
from spmd.progress import under_way

Locals = Mapping[str, Any]
RUNS: dict[CodeType, Callable[[Locals], str | None]] = {}
"""Code of functions that run programs -> says of which, given its local variables; None if that is
no program of several processes."""

_OTHERS = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_PACKAGES = {"site-packages", "dist-packages"}  # what is below them is installed

ALIVE = "alive"  # folder of the signs of life in the job's store
LEFT = "left"  # sign of a process that knows why the job ends: its silence means nothing
AT_END = "nothing more, it is at its end"
WHO = f"pid {os.getpid()} on {socket.gethostname()}"


class Sign(NamedTuple):
    """A sign of life: its number (`look`), `who` gives it (pid and host), what that is `doing`."""

    look: int  # how often this process has looked after the others
    who: str
    doing: str
    # Looks in which it ran this program, which others have to run, too: it comes to nothing else
    # before that ends. 0 if it runs none.
    runs: int

    def next(self, is_leaving: bool) -> "Sign":
        """Returns this process's next sign after `self`; `is_leaving` if its program has ended."""
        doing, is_running = (AT_END, True) if is_leaving else doing_now()
        runs = (self.runs if doing == self.doing else 0) + 1 if is_running else 0
        return Sign(self.look + 1, WHO, doing, runs)


def sign_of(store: JobStore, process: int) -> Sign | None:
    """Returns a process's last sign; None if it has given none, or ends because the job does."""
    text = store.get(f"{ALIVE}/{process}")
    return None if text in (None, LEFT) else Sign(*json.loads(text))


def all_signs(store: JobStore) -> dict[int, Sign]:
    """Returns process -> last sign, without those that gave none or end because the job does."""
    found = store.all(ALIVE).items()
    return {process: Sign(*json.loads(text)) for process, text in found if text != LEFT}


def doing_now() -> tuple[str, bool]:
    """Returns (what this process is doing, whether it runs a program of several processes).

    The text says what it compiles or runs, or at which line the user's code is, else is empty.
    """
    if work := under_way():
        return work, False
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [(frame, frame.f_code, line) for frame, line in walk_stack(main)] if main else []
    of_user = ((code, line) for _, code, line in calls if is_users(code.co_filename))
    place = next((f" at {c.co_filename}:{line} ({c.co_qualname})" for c, line in of_user), "")
    for frame, code, _ in calls:
        said = RUNS[code](frame.f_locals) if code in RUNS else None
        if said is not None:
            return f"running {said}{place}", True
    if is_computing():
        return f"waiting for its devices{place}", True
    return place.strip(), False


def is_computing() -> bool:
    """Whether a result that lies on devices of other processes, too, is still being computed."""
    if not devices_are_open():
        return False
    for array in jax.live_arrays():
        try:
            if not array.is_fully_addressable and not array.is_ready():
                return True
        except RuntimeError:  # deleted just now
            continue
    return False


def is_users(file: str) -> bool:
    """Whether a file is the user's: not of this package, Python or an installed package."""
    return not file.startswith(("<frozen", *_OTHERS)) and not _PACKAGES & set(Path(file).parts)
