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
    """Says that this process has run something: what ends it now may be worth another start."""
    _begun.set()


def max_restarts() -> int:
    """Returns how many times a launcher may start this job again."""
    text = os.environ.get(ENV_MAX_RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def is_first_start() -> bool:
    """Whether the job was not started again yet."""
    return os.environ.get(ENV_RESTART, "0") in ("", "0")


def exit_code(error: BaseException, mends: bool = False) -> int:
    """Returns the exit code of a process that an error ends.

    `mends` says that it is one that a user can mend, as errors of ours are. What a disk or another
    process does may be otherwise the next time.
    """
    is_refused = mends or isinstance(error, SpmdError)
    is_passing = isinstance(error, OSError | LaunchError) or _begun.is_set()
    return EXIT_REFUSED if is_refused and not is_passing and max_restarts() else 1


def pipe_name(number: int) -> str:
    """Names an open pipe, so that no other file is taken for it."""
    return f"{number}:{os.fstat(number).st_ino}"


def hear_news(tell: Callable[[str], object]) -> None:
    """Calls `tell` once, on a thread, with the launcher's line that a process here was lost."""
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
