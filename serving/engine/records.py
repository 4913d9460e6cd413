"""What the engine reports about itself: requests' times, device time, and its present state."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from serving.engine.actions import Counts
from serving.engine.choice import Choice
from serving.engine.stream import Stream


class Finished(NamedTuple):
    """A request that has ended; all times are in seconds.

    Attributes:
      reason: `stop`, `length`, `error`, or `abort` if its reader went away.
      prompt_tokens: tokens of the prompt.
      generated: tokens that were drawn for it.
      queued: from its arrival until it got a slot, or until its end if it never got one.
      prefill: from there until its first token.
      decode: from there until its last token.
      total: from its arrival until its end.
    """

    reason: str
    prompt_tokens: int
    generated: int
    queued: float
    prefill: float
    decode: float
    total: float


class Observer(Protocol):
    """Is told what the engine does, on the engine's thread; the server's metrics are one."""

    def ran(self, tokens: int, seconds: float, steps: int, held: int) -> None:
        """A call of prefill or decode is done.

        Args:
          tokens: how many tokens it ran.
          seconds: how long it took.
          steps: tokens that it drew for each slot; 0 for prefill.
          held: tokens that were in the active slots.
        """

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""

    def more_tokens(self, seconds: float, tokens: int) -> None:
        """A request got `tokens` more, `seconds` after those before."""

    def finished(self, record: Finished) -> None:
        """A request has ended."""


class State(NamedTuple):
    """What the engine has to do at this moment.

    Attributes:
      waiting: requests without a slot.
      running: requests with a slot.
      used: share of all slots' positions that running requests hold, from 0 to 1.
      counts: totals since the start.
    """

    waiting: int
    running: int
    used: float
    counts: Counts


class Entry:
    """A completion that the engine works on: its text so far, its reader, and its times."""

    def __init__(self, choice: Choice, stream: Stream, now: float) -> None:
        self.choice = choice
        self.stream = stream
        self._arrived = now
        self._placed: float | None = None
        self._first: float | None = None
        self._last = now

    def note_placed(self) -> None:
        """Notes when it got its slot; later calls change nothing."""
        if self._placed is None:
            self._placed = time.monotonic()

    def note_tokens(self, tokens: int, now: float, observer: Observer | None) -> None:
        """Tells an observer of tokens that have come."""
        if not tokens or observer is None:
            return
        if self._first is None:
            self._first = now
            observer.first_token(now - self._arrived)
        else:
            observer.more_tokens(now - self._last, tokens)
        self._last = now

    def finished(self, reason: str, now: float) -> Finished:
        """The record of it, at its end."""
        placed = now if self._placed is None else self._placed
        first = now if self._first is None else self._first
        return Finished(
            reason,
            len(self.choice.job.prompt),
            self.choice.generated,
            queued=placed - self._arrived,
            prefill=first - placed,
            decode=now - first,
            total=now - self._arrived,
        )
