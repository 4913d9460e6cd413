"""Waiting for what another thread or process does: for the thing itself, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 1200.0
"""Seconds after which something that should have happened never will. Only a failing test waits
this long, however loaded the machine is."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seen: Callable[[], object] = lambda: "") -> T:
    """Waits for a condition.

    Args:
      condition: called until it is true.
      seen: what the failure shows, if it never is.

    Returns:
      What `condition` returned.
    """
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen in time; {seen()}"
        time.sleep(0.005)
    return found
