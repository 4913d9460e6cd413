"""Threads that run calls for clients: in fair turns, and not for those who have left.

    run ──> queue, fair between clients ──> a thread ──> the one who waits

Tokenizing and models of tensors run here. Both take long and cannot be interrupted, so what counts
is whose call begins next, and that calls nobody waits for do not begin. Calls that are `JointCall`s
begin together with those behind them that fit.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from spmd.serving.engine.fairness import FairQueue
from spmd.serving.engine.records import Finished
from spmd.serving.engine.stream import Stopped, shutting_down

_LOG = logging.getLogger("serving")

T = TypeVar("T")


def have_ended(threads: Sequence[threading.Thread]) -> bool:
    """Whether none of them runs; those that never began count as ended."""
    return not any(thread.is_alive() for thread in threads)


def join_all(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Waits for all of them together, `timeout` seconds at most."""
    end = time.monotonic() + timeout
    for thread in threads:
        if thread.ident is not None:  # it has begun
            thread.join(max(0.0, end - time.monotonic()))


@dataclasses.dataclass(frozen=True)
class JointCall(Generic[T]):
    """A call that may be made together with others of its kind."""

    # makes them: takes the `content` of each, and returns a result for each
    joint: Callable[[Sequence[Any]], Sequence[T]]
    content: Any  # what this one is about
    size: int
    most: int  # how large those that are made together may be

    def __call__(self) -> T:
        """Makes this call alone."""
        return self.joint([self.content])[0]


def _size(function: Callable[[], Any]) -> int:
    return function.size if isinstance(function, JointCall) else 1


def _joins(function: Callable[[], Any], first: Callable[[], Any], size: int) -> bool:
    """Whether a call may be made with others, of which there is so much already."""
    if not isinstance(function, JointCall) or not isinstance(first, JointCall):
        return False
    return function.joint == first.joint and size + function.size <= first.most


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """A call that waits or runs; `share` is its part of the time of those that run with it."""

    client: str
    user: str
    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    arrived: float
    began: float | None = None
    share: float = 1.0
    priority: int = 0  # the same of all calls


class Workers:
    """A few threads, and the calls that wait for one.

    How many may wait is not limited here: whoever calls `run` has a place among the server's
    requests, and awaits one call at a time.

    Args:
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
        self._stopped = shutting_down
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
          function: what to call. `JointCall`s that wait together may be one call.
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
                raise self._stopped()
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
        return have_ended(self._threads)

    def stop(self, timeout: float = 10.0, why: Callable[[], Stopped] = shutting_down) -> None:
        """Ends the threads after the calls that run; calls that wait fail.

        Args:
          timeout: seconds to wait for the threads.
          why: makes what those who wait get.
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
            _answer(call, None, why())
        join_all(self._threads, timeout)

    def _drop(self, call: _Call) -> None:
        with self._wake:
            if call.began is not None:  # its thread finds that nobody waits for the answer
                return
            if not self._stopping:
                self._queue.remove(call)
                self._queue.leave(call)
        self._report(call, "abort", time.monotonic())

    def _work(self) -> None:
        while calls := self._next():
            for call, result, error in _made(calls):
                if isinstance(error, Exception):
                    self._heed(error)
                try:
                    self._end(call, error)
                except Exception:  # a mistake in counting must not end the thread
                    _LOG.exception("a call was not counted")
                _answer(call, result, error)

    def _next(self) -> list[_Call]:
        """The calls to make now: the one whose turn it is, and those behind it that fit to it."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or len(self._queue))
            calls: list[_Call] = []
            size = 0
            while (call := self._queue.first()) is not None:
                if calls and not _joins(call.function, calls[0].function, size):
                    break
                size += _size(call.function)
                self._queue.remove(call)
                call.began = time.monotonic()
                self._running.add(call)
                calls.append(call)
            for call in calls:
                call.share = _size(call.function) / size
            return calls

    def _end(self, call: _Call, error: BaseException | None) -> None:
        now = time.monotonic()
        reason = "abort" if call.answer.cancelled() else "stop" if error is None else "error"
        with self._wake:
            self._running.discard(call)
            self._queue.charge(call, call.share * (now - (call.began or now)))
            self._queue.leave(call)
        self._report(call, reason, now)

    def _report(self, call: _Call, reason: str, now: float) -> None:
        if self._finished is not None:
            began = now if call.began is None else call.began
            queued, total = began - call.arrived, now - call.arrived
            self._finished(Finished(0, reason, 0, 0, queued, 0.0, 0.0, total, now))


def _made(calls: Sequence[_Call]) -> Iterator[tuple[_Call, Any, BaseException | None]]:
    """Makes calls, and gives for each its result and its error, of which one is None."""
    first = calls[0].function
    if len(calls) > 1 and isinstance(first, JointCall):
        try:
            results = first.joint([cast(JointCall[Any], call.function).content for call in calls])
        except Exception:  # one of them may be to blame: alone, it fails alone
            _LOG.debug("%d calls together failed", len(calls), exc_info=True)
        else:
            yield from ((call, result, None) for call, result in zip(calls, results, strict=True))
            return
    for call in calls:
        if len(calls) > 1 and call.answer.cancelled():
            yield call, None, None
            continue
        try:
            result = call.function()
        except BaseException as raised:
            yield call, None, raised
        else:
            yield call, result, None


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
