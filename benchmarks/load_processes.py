"""Clients in processes of their own: reading streams must not cost the server's time, nor ours.

A process reads about 13,000 events a second, 80 us each. So 64 streams that get a token at the same
moment keep one process for 5 ms, and the last of them looks that much later; four see it in 1.3 ms.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import NamedTuple

from benchmarks.load_client import Answer, Ask, Load, open_client, run_load


class Asked(NamedTuple):
    """What came of a load."""

    answers: list[Answer]  # in the order of the requests
    seconds: float  # from the first request to the end of the last answer
    # share of that time for which the busiest of the processes computed; near 1 the clients are
    # what is measured
    busy: float

    @property
    def ended(self) -> float:
        """When the last answer was there, on the clock of `Answer.began`."""
        return max(answer.began + answer.total for answer in self.answers)


class UnderWay:
    """A load that runs."""

    def __init__(self, parts: Sequence[Future[tuple[list[Answer], float]]], count: int) -> None:
        self._parts, self._count = parts, count

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; returns whether it is over."""
        return not wait(self._parts, seconds).not_done

    def result(self) -> Asked:
        """Waits for all answers."""
        done = [part.result() for part in self._parts]
        answers: list[Answer] = [
            done[number % len(done)][0][number // len(done)] for number in range(self._count)
        ]
        began = min(answer.began for answer in answers)
        seconds = max(answer.began + answer.total for answer in answers) - began
        return Asked(answers, seconds, max(computed for _, computed in done) / seconds)


class Clients:
    """Processes that ask a server; to be used in a `with` statement.

    Args:
      processes: how many; each has its share of a load's requests and of those at once.
    """

    def __init__(self, url: str, model: str, processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would have our threads' locks
        self._url, self._model, self._processes = url, model, processes
        self._done: Synchronized[int] = context.Value("q")
        self._pool = ProcessPoolExecutor(processes, context, _set_up, (self._done,))

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def done(self) -> int:
        """Answers to the latest load that are there."""
        return self._done.value

    def start(self, load: Load, asks: Sequence[Ask]) -> UnderWay:
        """Begins to ask; one load at a time."""
        self._done.value = 0
        count = min(self._processes, load.concurrency, len(asks))
        parts = []
        for i in range(count):
            at_once = len(range(i, load.concurrency, count))
            part = (self._url, self._model, replace(load, concurrency=at_once), asks[i::count])
            parts.append(self._pool.submit(_ask_all, *part))
        return UnderWay(parts, len(asks))


_done: Synchronized[int]
"""In a client's process: counts the answers of all of them."""


def _set_up(done: Synchronized[int]) -> None:
    global _done
    _done = done
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ask_all(url: str, model: str, load: Load, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
    """The answers, and the seconds for which this process computed."""

    async def ask() -> tuple[list[Answer], float]:
        async with open_client(url) as client:
            before = time.process_time()
            answers = await run_load(client, load, model, asks, _count)
            return answers, time.process_time() - before

    return asyncio.run(ask())


def _count(answer: Answer) -> None:
    with _done.get_lock():
        _done.value += 1
