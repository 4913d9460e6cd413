"""Calls of the backend that have begun and are not done yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from serving.engine.actions import Action, Copy, Decode, Prefill
from serving.engine.backend import Backend


class _Call(NamedTuple):
    action: Action
    started: float
    results: Callable[[], Any]


class Done(NamedTuple):
    """A call that is done.

    Attributes:
      action: what was asked for.
      results: what the backend returned: `Prefilled`, `Tokens`, or None for a copy.
      seconds: how long the device worked on it.
    """

    action: Action
    results: Any
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

    def begin(self, action: Action) -> None:
        """Begins an action, and returns before it is done."""
        started = time.monotonic()
        if self._busy_since is None:
            self._busy_since = started
        self._under_way.append(_Call(action, started, self._call(action)))

    def finish(self) -> Done:
        """Waits for the oldest call."""
        action, started, results = self._under_way.popleft()
        found = results()
        now = time.monotonic()
        seconds = now - max(started, self._busy_since or 0.0)
        self._busy_since = now if self._under_way else None
        return Done(action, found, seconds)

    def stalled(self) -> float:
        """Seconds for which the oldest call has been running; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abandon(self) -> None:
        """Nobody waits for what is under way any more, so nothing counts as stalled."""
        self._busy_since = None

    def _call(self, action: Action) -> Callable[[], Any]:
        match action:
            case Copy():
                self._backend.copy(action.source, action.target, action.length)
                return lambda: None
            case Prefill():
                return self._backend.prefill(
                    action.slot,
                    action.tokens,
                    action.start,
                    sampling=action.sampling,
                    targets=action.targets,
                )
            case Decode():
                return self._backend.decode(action.active, action.steps, action.alternatives)
