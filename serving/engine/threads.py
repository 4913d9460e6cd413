"""The ends of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence


def ended(threads: Sequence[threading.Thread]) -> bool:
    """Whether none of them runs; those that never began count as ended."""
    return not any(thread.is_alive() for thread in threads)


def join(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Waits for all of them together, `timeout` seconds at most."""
    end = time.monotonic() + timeout
    for thread in threads:
        if thread.ident is not None:  # it has begun
            thread.join(max(0.0, end - time.monotonic()))
