"""What a user can mend, or does, ends a script with one message instead of a traceback."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from spmd.launch.restart import exit_code
from spmd.models.training.paths import is_url


@contextlib.contextmanager
def one_message(*kinds: type[Exception]) -> Iterator[None]:
    """The inside of a script's `main`: errors of these kinds become `error: ...` and exit code 1.

    Under a launcher that would start it again it is 78 where that would help nobody. All others are
    mistakes of the program, and keep their traceback. The exit carries the message, so that
    `launch.stopping_peers` around it hands it on to other processes.

    Args:
        kinds: what a user can mend.

    Example:
        >>> with one_message(WeightsError, OSError):
        ...     run(given, console)
    """
    try:
        yield
    except kinds as error:
        code = exit_code(error, mends=True)
        if code == 1:
            sys.exit(f"error: {error}")
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(code) from error


INTERRUPTED_EXIT_CODE = 130
"""What shells say of a program that Ctrl-C ended."""


@contextlib.contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """The inside of a script that keeps nothing of work half done: Ctrl-C ends it with a word."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)


def on_disk(text: str) -> Path:
    """A local path; a URL of an object store ends the program with what to do instead."""
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is on an object store, and this program works on a disk: copy with the "
            "store's own tools, such as `aws s3 sync` or `gcloud storage rsync`"
        )
    return Path(text)
