"""Threads for calls: fair turns, nothing for those who have left, and an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serving.engine.records import Finished
from serving.engine.stream import Stopped
from serving.engine.workers import Workers
from tests.waiting import wait_until


class Held:
    """Calls that note their names and wait until they may go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.called: list[str] = []

    def call(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.called.append(name)
            self.open.wait()
            return name

        return run


@contextmanager
def working(threads: int = 1, **more: Any) -> Iterator[Workers]:
    workers = Workers("test", threads, **more)
    workers.start()
    yield workers
    workers.stop()
    assert not any(thread.is_alive() for thread in workers._threads)


async def begin(workers: Workers, call: Callable[[], str], *whose: str) -> asyncio.Task[str]:
    task = asyncio.create_task(workers.run(call, *whose))
    await asyncio.sleep(0)
    return task


def test_clients_take_turns_and_their_users_within() -> None:
    async def go() -> None:
        tasks = [await begin(workers, held.call("first"), "many", "u0")]
        wait_until(lambda: held.called)
        for i in range(1, 6):
            tasks.append(await begin(workers, held.call(f"many {i}"), "many", f"u{i}"))
        tasks.append(await begin(workers, held.call("one"), "one"))
        assert (workers.running, workers.waiting) == (1, 6)
        assert workers.stalled() > 0
        held.open.set()
        assert await asyncio.gather(*tasks)

    held = Held()
    with working() as workers:
        asyncio.run(go())
        assert held.called[:2] == ["first", "one"]
        assert len(held.called) == 7
        assert not workers._queue._users and workers.stalled() == 0


def test_calls_of_those_who_left_do_not_begin() -> None:
    async def go() -> None:
        running = await begin(workers, held.call("running"))
        wait_until(lambda: held.called)
        waiting = [await begin(workers, held.call("waiting")) for _ in range(5)]
        for task in (running, *waiting):
            task.cancel()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert workers.waiting == 0
        held.open.set()
        assert await workers.run(lambda: "next") == "next"

    held, records = Held(), list[Finished]()
    with working(finished=records.append) as workers:
        asyncio.run(go())
    assert held.called == ["running"]
    assert [record.reason for record in records] == ["abort"] * 6 + ["stop"]


def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def go() -> None:
        with pytest.raises(KeyError):
            await workers.run(fail)

    records = list[Finished]()
    with working(finished=records.append) as workers:
        asyncio.run(go())
    assert [record.reason for record in records] == ["error"]


def test_stopping_fails_all() -> None:
    async def go() -> None:
        tasks = [await begin(workers, held.call(str(i))) for i in range(3)]
        wait_until(lambda: held.called)
        workers.stop(timeout=0)
        held.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Stopped] * 3
        with pytest.raises(Stopped):
            await workers.run(lambda: 0)

    held = Held()
    with working() as workers:
        asyncio.run(go())
