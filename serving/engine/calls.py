"""Calls of the backend that have begun and are not done yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from serving.engine.actions import Step
from serving.engine.backend import Backend, Stepped


class _Call(NamedTuple):
    step: Step
    started: float
    results: Callable[[], Stepped]


class Done(NamedTuple):
    """A step that is done.

    Attributes:
      step: what was asked for.
      results: what the backend returned.
      seconds: how long the device worked on it.
    """

    step: Step
    results: Stepped
    seconds: float


class Calls:
    """A queue of the calls under way; only the engine's thread begins and finishes them.

    Args:
      backend: runs the calls, one after the other.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: deque[_Call] = deque()
        # When the device began the oldest call: when that call was made, or, if another one was
        # under way then, when the other one was done.
        self._busy_since: float | None = None

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, step: Step) -> None:
        """Begins a step, and returns before it is done."""
        started = time.monotonic()
        if self._busy_since is None:
            self._busy_since = started
        for begin in step.begins:
            self._backend.begin(*begin)
        if step.masks:
            self._backend.allow(step.masks)
        results = self._backend.step(step.parts, step.alternatives)
        self._under_way.append(_Call(step, started, results))

    def finish(self) -> Done:
        """Waits for the oldest step."""
        step, started, results = self._under_way.popleft()
        found = results()
        now = time.monotonic()
        seconds = now - max(started, self._busy_since or 0.0)
        self._busy_since = now if self._under_way else None
        return Done(step, found, seconds)

    def stalled(self) -> float:
        """Seconds for which the oldest call has been running; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abandon(self) -> None:
        """Nobody waits for what is under way any more, so nothing counts as stalled."""
        self._busy_since = None
