"""Threads that run calls for clients: in fair turns, and not for those who have left.

    run ──> queue, fair between clients ──> a thread ──> the one who waits

Tokenizing and models of tensors run here. Both take long and cannot be interrupted, so what counts
is whose call begins next, and that calls nobody waits for do not begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from serving.engine.fairness import FairQueue
from serving.engine.records import Finished
from serving.engine.stream import SHUTTING_DOWN, Stopped

_LOG = logging.getLogger("serving")

T = TypeVar("T")


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """A call that waits or runs."""

    client: str
    user: str
    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    arrived: float
    began: float | None = None


class Workers:
    """A few threads, and the calls that wait for one.

    How many may wait is not limited here: whoever calls `run` has a place among the server's
    requests, and awaits one call at a time.

    Args:
      name: of the threads.
      threads: how many calls run at a time.
      finished: is told of every call that has ended, on any thread.
      heed: is told what a call raised, before the one who waits is.

    Example:
      >>> workers = Workers("text", threads=2)
      >>> workers.start()
      >>> ids = await workers.run(lambda: tokenize(text), client="10.0.0.1")
    """

    def __init__(
        self,
        name: str,
        threads: int = 1,
        finished: Callable[[Finished], None] | None = None,
        heed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._finished = finished
        self._heed = heed
        self._stopped = SHUTTING_DOWN
        self._queue: FairQueue[_Call] = FairQueue()
        self._running: set[_Call] = set()
        self._stopping = False
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[[], T], client: str = "", user: str = "") -> T:
        """Runs a function on a thread; if the awaiting task is cancelled, it may not run at all.

        Args:
          function: what to call.
          client: who asks. Clients get equal shares of the threads' time.
          user: whom the client asks for. Users of a client share what it gets.

        Returns:
          What the function returned.

        Raises:
          Stopped: the threads were told to end.
          Exception: whatever the function raised.
        """
        loop = asyncio.get_running_loop()
        call = _Call(client, user, function, loop.create_future(), time.monotonic())
        with self._wake:
            if self._stopping:
                raise Stopped(self._stopped)
            self._queue.push(call)
            self._wake.notify()
        try:
            return cast(T, await call.answer)
        except asyncio.CancelledError:
            self._drop(call)
            raise

    @property
    def waiting(self) -> int:
        """Number of calls that have not begun."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of calls that have begun, those included that nobody waits for any more."""
        return len(self._running)

    def stalled(self) -> float:
        """Seconds for which the oldest call has been running; 0 if there is none."""
        with self._wake:
            began = [call.began for call in self._running if call.began is not None]
        return time.monotonic() - min(began) if began else 0.0

    @property
    def ended(self) -> bool:
        """Whether no thread runs."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout: float = 10.0, why: str = SHUTTING_DOWN) -> None:
        """Ends the threads after the calls that run; calls that wait fail.

        Args:
          timeout: seconds to wait for the threads.
          why: what those who wait are told.
        """
        with self._wake:
            self._stopping, self._stopped = True, why
            waiting = []
            while (call := self._queue.first()) is not None:
                self._queue.remove(call)
                self._queue.leave(call)
                waiting.append(call)
            open_calls = [*waiting, *self._running]
            self._wake.notify_all()
        for call in open_calls:
            _answer(call, None, Stopped(why))
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    # -----------------------------------------------------------------------------------------

    def _drop(self, call: _Call) -> None:
        with self._wake:
            if call.began is not None:  # its thread finds that nobody waits for the answer
                return
            if not self._stopping:
                self._queue.remove(call)
                self._queue.leave(call)
        self._report(call, "abort", time.monotonic())

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as raised:
                error = raised
                if isinstance(raised, Exception):
                    self._heed(raised)
            try:
                self._end(call, error)
            except Exception:  # a mistake in counting must not end the thread
                _LOG.exception("a call was not counted")
            _answer(call, result, error)

    def _next(self) -> _Call | None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or len(self._queue))
            call = self._queue.first()
            if call is not None:
                self._queue.remove(call)
                call.began = time.monotonic()
                self._running.add(call)
            return call

    def _end(self, call: _Call, error: BaseException | None) -> None:
        now = time.monotonic()
        reason = "abort" if call.answer.cancelled() else "stop" if error is None else "error"
        with self._wake:
            self._running.discard(call)
            self._queue.charge(call, now - (call.began or now))
            self._queue.leave(call)
        self._report(call, reason, now)

    def _report(self, call: _Call, reason: str, now: float) -> None:
        if self._finished is not None:
            began = now if call.began is None else call.began
            queued, total = began - call.arrived, now - call.arrived
            self._finished(Finished(0, reason, 0, 0, queued, 0.0, 0.0, total, now))


def _answer(call: _Call, result: Any, error: BaseException | None) -> None:
    """Hands over an outcome, from any thread."""

    def settle() -> None:
        if call.answer.done():  # cancelled: nobody waits for it
            return
        if error is None:
            call.answer.set_result(result)
        else:
            call.answer.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
        call.answer.get_loop().call_soon_threadsafe(settle)
