"""What the engine reports about itself: requests' times, device time, and its present state."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from serving.engine.actions import Counts, Step
from serving.engine.choice import Choice
from serving.engine.stream import Stream


class Finished(NamedTuple):
    """A request that has ended; all times are in seconds.

    Attributes:
      choice: the number of the completion, among those asked for together.
      reason: `stop`, `length`, `error`, `grammar` if what it asked for left no token to draw, or
        `abort` if its reader went away.
      prompt_tokens: tokens of the prompt.
      generated: tokens that were drawn for it.
      queued: from its arrival until it got a slot, or until its end if it never got one.
      prefill: from there until its first token.
      decode: from there until its last token.
      total: from its arrival until its end.
      ended: when it ended, by `time.monotonic`.
    """

    choice: int
    reason: str
    prompt_tokens: int
    generated: int
    queued: float
    prefill: float
    decode: float
    total: float
    ended: float


class Observer(Protocol):
    """Is told what the engine does, on the engine's threads; the server's metrics are one."""

    def ran(self, step: Step, seconds: float) -> None:
        """A step is done, `seconds` after the device began it."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""

    def next_token(self, seconds: float) -> None:
        """A request got another token, `seconds` after the one before."""

    def finished(self, record: Finished) -> None:
        """A request has ended."""


class State(NamedTuple):
    """What the engine has to do at this moment.

    Attributes:
      waiting: requests without a slot.
      running: requests with a slot.
      pages: how many there are, over all groups.
      held: pages of running requests.
      cached: pages whose tokens are known, but that nobody holds.
      counts: totals since the start.
    """

    waiting: int
    running: int
    pages: int
    held: int
    cached: int
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

    def note_placed(self, now: float) -> None:
        """Notes when it got its slot; later calls change nothing."""
        if self._placed is None:
            self._placed = now

    def note_token(self, now: float, observer: Observer) -> None:
        """Tells an observer of a token that has come."""
        if self._first is None:
            self._first = now
            observer.first_token(now - self._arrived)
        else:
            observer.next_token(now - self._last)
        self._last = now

    def finished(self, reason: str, now: float) -> Finished:
        """The record of it, at its end."""
        placed = now if self._placed is None else self._placed
        first = now if self._first is None else self._first
        return Finished(
            self.choice.index,
            reason,
            len(self.choice.job.prompt),
            self.choice.generated,
            queued=placed - self._arrived,
            prefill=first - placed,
            decode=now - first,
            total=now - self._arrived,
            ended=now,
        )
