"""What a user can mend ends a script with one message instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def one_message(*kinds: type[Exception]) -> Iterator[None]:
    """The inside of a script's `main`: errors of these kinds become `error: ...` and exit code 1.

    All others are mistakes of the program, and keep their traceback. The exit carries the message,
    so that `launch.stopping_peers` around it hands it on to other processes.

    Args:
        kinds: what a user can mend.

    Example:
        >>> with one_message(WeightsError, OSError):
        ...     run(given, console)
    """
    try:
        yield
    except kinds as error:
        sys.exit(f"error: {error}")
