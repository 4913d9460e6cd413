"""What the engine gives to its readers, and says of itself to those who watch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from serving.engine.actions import Counts
from serving.engine.choice import Choice, Delta


class Unavailable(RuntimeError):
    """The engine takes no more requests."""


class Failed(RuntimeError):
    """The model failed; the message says how."""


class Stopped(Failed):
    """The server ended before the request did."""


class Finished(NamedTuple):
    """What is known of a request when it is over; seconds.

    Attributes:
      reason: `stop`, `length`, `abort` if its reader went away, `error`.
      prompt_tokens, generated: how many.
      queued: until its slot; of requests without one: all of its time.
      prefill: from the slot to the first token.
      decode: from there to the last one.
      total: all of it.
    """

    reason: str
    prompt_tokens: int
    generated: int
    queued: float
    prefill: float
    decode: float
    total: float


class Observer(Protocol):
    """Hears what the engine does, on its thread."""

    def ran(self, tokens: int, seconds: float, steps: int, held: int) -> None:
        """One call of prefill (no steps) or decode.

        Args:
          tokens: that it was run on.
          seconds: that it took.
          steps: tokens that it drew for each slot.
          held: tokens that were in these slots.
        """

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so long after it came."""

    def more_tokens(self, seconds: float, tokens: int) -> None:
        """A request got more of them, so long after those before."""

    def finished(self, record: Finished) -> None:
        """A request is over."""


class Stream:
    """The deltas of some completions, in the order in which they come.

    Iteration ends with the last completion; it raises `Failed` if the model fails. `close` gives up
    what is not finished; every stream has to be closed, or read to its end.

    Attributes:
      abandoned: whether it was closed before its end.
    """

    def __init__(self, keys: Sequence[int], cancel: Callable[[Sequence[int]], None]) -> None:
        self.abandoned = False
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._keys = tuple(keys)
        self._open = len(keys)
        self._ready: deque[Delta | Failed] = deque()
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while self._open and not self._ready:
            self._news.clear()
            await self._news.wait()
        if not self._open:
            raise StopAsyncIteration
        return self._take()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """All deltas that are there, again and again: more at a time where the reader is slow."""
        async for delta in self:
            batch = [delta]
            while self._ready and isinstance(self._ready[0], Delta):
                batch.append(self._take())
            yield batch

    def put(self, delta: Delta | Failed) -> None:
        """Hand one over; on the stream's own loop."""
        if not self.abandoned:
            self._ready.append(delta)
            self._news.set()

    def close(self) -> None:
        """Give up what is not finished; whoever is reading comes to the end."""
        if self._open:
            self._open = 0
            self.abandoned = True
            self._ready.clear()
            self._news.set()
            self._cancel(self._keys)

    def _take(self) -> Delta:
        delta = self._ready.popleft()
        if isinstance(delta, Failed):
            self.close()
            raise delta
        self._open -= delta.finish is not None
        return delta


class Entry:
    """A choice, whose it is, and when things happened to it."""

    def __init__(self, choice: Choice, stream: Stream, now: float) -> None:
        self.choice = choice
        self.stream = stream
        self.arrived = now
        self.placed: float | None = None
        self.first: float | None = None
        self.last = now

    def finished(self, reason: str, now: float) -> Finished:
        """The record of it, at its end."""
        placed = now if self.placed is None else self.placed
        first = now if self.first is None else self.first
        return Finished(
            reason,
            len(self.choice.job.prompt),
            self.choice.generated,
            queued=placed - self.arrived,
            prefill=first - placed,
            decode=now - first,
            total=now - self.arrived,
        )


class State(NamedTuple):
    """How things stand.

    Attributes:
      waiting, running: requests.
      used: share of the slots' room that running requests take.
      counts: totals since the start.
    """

    waiting: int
    running: int
    used: float
    counts: Counts
