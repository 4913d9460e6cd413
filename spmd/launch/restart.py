"""What a launcher that starts jobs again tells its processes, and what they tell it."""

import os
import stat
import threading
from collections.abc import Callable

from spmd.errors import LaunchError, SpmdError

ENV_RESTART = "SPMD_RESTART"  # how many times the job was started again
ENV_MAX_RESTARTS = "SPMD_MAX_RESTARTS"  # how many times it may be
ENV_NEWS = "SPMD_NEWS"  # the pipe by which a launcher on this machine says which process was lost

EXIT_REFUSED = 78
"""What was asked for cannot be done, and was found out before anything ran: started again it would
end in the same way (`EX_CONFIG` of sysexits.h). Elsewhere than under such a launcher it is 1."""

_begun = threading.Event()


def begun() -> None:
    """Notes that this process has run something: from now on `exit_code` returns 1."""
    _begun.set()


def max_restarts() -> int:
    """Returns how many times a launcher may start this job again; 0 without such a launcher."""
    text = os.environ.get(ENV_MAX_RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def is_first_start() -> bool:
    """Whether the job was not started again yet."""
    return os.environ.get(ENV_RESTART, "0") in ("", "0")


def exit_code(error: BaseException, mends: bool = False) -> int:
    """Returns the exit code of a process that an error ends: EXIT_REFUSED or 1.

    A launcher does not start jobs again after EXIT_REFUSED. That is for SpmdErrors and, if `mends`,
    all others; but not for OSError, LaunchError, after `begun()`, or if `max_restarts()` is 0.
    """
    is_refused = mends or isinstance(error, SpmdError)
    is_passing = isinstance(error, OSError | LaunchError) or _begun.is_set()
    return EXIT_REFUSED if is_refused and not is_passing and max_restarts() else 1


def pipe_name(number: int) -> str:
    """Returns `number:inode` of the open pipe with file descriptor `number`."""
    return f"{number}:{os.fstat(number).st_ino}"


def hear_news(tell: Callable[[str], object]) -> None:
    """Calls `tell(line)` on a thread once the launcher, if any, says that a process was lost."""
    name = os.environ.pop(ENV_NEWS, "")
    number = int(name.partition(":")[0] or -1)
    try:
        if not stat.S_ISFIFO(os.fstat(number).st_mode) or pipe_name(number) != name:
            return
    except OSError:  # this program was started by another one, which does not hand it on
        return

    def wait() -> None:
        with os.fdopen(number) as news:
            if text := news.readline().strip():
                tell(text)

    threading.Thread(target=wait, name="spmd news", daemon=True).start()
