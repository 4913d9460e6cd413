"""What a reader gets of its completions: an asyncio stream of deltas, filled by another thread."""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from spmd.serving.engine.choice import Delta
from spmd.serving.engine.records import Finished


class Failed(RuntimeError):
    """The model failed; the message says how."""


class Stopped(Failed):
    """The server ended before the request did; the message says why."""


class Lost(Stopped):
    """One of the processes that run the model together was lost, and with it all of them."""


class Misguided(Failed):
    """What a request asks for leaves no token to draw; the model is well."""


SHUTTING_DOWN = "the server is shutting down"


def shutting_down() -> Stopped:
    """What those are told whose requests are not finished when the server is told to end."""
    return Stopped(SHUTTING_DOWN)


@dataclasses.dataclass(eq=False)
class Stream:
    """The deltas of a request's completions, in the order in which they are made.

    Iteration ends after the last delta of the last completion. It raises `Failed` if the model
    fails. Every stream has to be read to its end or closed.

    Example:
      >>> stream = engine.submit([job])
      >>> async for delta in stream:
      ...     print(delta.text, end="")
    """

    keys: Sequence[int]  # the scheduler's key of each completion
    cancel: Callable[[Sequence[int]], None]  # drops the requests with these keys
    # is called once the last delta is there, or the stream is closed before that
    ended: Callable[[], None] | None = None
    abandoned: bool = False  # whether the stream was closed before its end
    # of the completions that have ended; each is there before its last delta
    records: list[Finished] = dataclasses.field(default_factory=list)
    # completion -> how many tokens of its prompt the cache held; there before its first delta
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    loop: asyncio.AbstractEventLoop = dataclasses.field(default_factory=asyncio.get_running_loop)
    _ready: deque[Delta | Failed] = dataclasses.field(default_factory=deque)
    _news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open = self._unfinished = len(self.keys)

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
        """Iterates over lists of all that is ready, a delta of each completion.

        Tokens that a reader did not keep up with, or that one call drew, come to it as one delta:
        writing and reading an event costs more than drawing a small model's token.
        """
        async for delta in self:
            batch = {delta.choice: delta}
            # A failure stays in the queue until the deltas before it have been handed out.
            while self._ready and isinstance(self._ready[0], Delta):
                delta = self._take()
                before = batch.get(delta.choice)
                batch[delta.choice] = delta if before is None else before.joined(delta)
            yield [*batch.values()]

    def put(self, delta: Delta | Failed) -> None:
        """Adds a delta; has to be called on the stream's own loop."""
        if self.abandoned:
            return
        self._ready.append(delta)
        self._news.set()
        if isinstance(delta, Failed):
            self._finish(self._unfinished)
        elif delta.finish is not None:
            self._finish(1)

    def close(self) -> None:
        """Cancels the completions that have not finished; iteration ends."""
        if self._open:
            self._open = 0
            self.abandoned = True
            self._ready.clear()
            self._news.set()
            self.cancel(self.keys)
            self._finish(self._unfinished)

    def _finish(self, count: int) -> None:
        if self._unfinished <= 0:  # one completion failed, and with it all of them
            return
        self._unfinished -= count
        if not self._unfinished and self.ended is not None:
            self.ended()

    def _take(self) -> Delta:
        delta = self._ready.popleft()
        if isinstance(delta, Failed):
            self.close()
            raise delta
        self._open -= delta.finish is not None
        return delta


def deliver(outbox: Sequence[tuple[Stream, Delta | Failed]]) -> None:
    """Hands deltas to their streams from another thread.

    Each event loop is woken once for all of its deltas: a step of decode makes one for every slot,
    and a wake-up costs more than handing over a delta.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta | Failed]]] = {}
    for stream, delta in outbox:
        by_loop.setdefault(stream.loop, []).append((stream, delta))
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            loop.call_soon_threadsafe(_put, mine)


def _put(outbox: Sequence[tuple[Stream, Delta | Failed]]) -> None:
    for stream, delta in outbox:
        stream.put(delta)
