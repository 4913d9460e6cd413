"""Threads for calls: fair turns, nothing for those who have left, and an end."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.engine.records import Finished
from spmd.serving.engine.stream import Stopped
from spmd.serving.engine.workers import JointCall, Workers
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


class Joint:
    """Calls of lists of numbers, made together: each number is doubled, and 13 cannot be."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.calls: list[list[list[int]]] = []

    def run(self, contents: Sequence[list[int]]) -> list[list[int]]:
        self.calls.append(list(contents))
        self.open.wait()
        if any(13 in content for content in contents):
            raise ValueError("13")
        return [[2 * number for number in content] for content in contents]

    def part(self, *numbers: int) -> JointCall[list[int]]:
        return JointCall(self.run, list(numbers), len(numbers), most=4)


async def behind_a_first(
    workers: Workers, joint: Joint, parts: Sequence[JointCall[list[int]]]
) -> list[asyncio.Task[list[int]]]:
    """Tasks of calls that wait behind one that runs."""
    tasks = []
    for part in (joint.part(0), *parts):
        tasks.append(asyncio.create_task(workers.run(part)))
        await asyncio.sleep(0)
        wait_until(lambda: joint.calls)
    return tasks


@given(sizes=st.lists(st.integers(1, 4), max_size=12), data=st.data())
def test_what_waits_is_joined_and_each_gets_its_own(sizes: list[int], data: st.DataObject) -> None:
    """Some leave while they wait, some cannot be made: all others get what is theirs."""
    bad, gone = (
        set(data.draw(st.lists(st.integers(0, max(len(sizes) - 1, 0)), max_size=3)))
        for _ in range(2)
    )
    wanted = [[13 if i in bad else 100 * i] * size for i, size in enumerate(sizes)]

    async def go() -> None:
        tasks = await behind_a_first(workers, joint, [joint.part(*numbers) for numbers in wanted])
        for i, task in enumerate(tasks[1:]):
            if i in gone:
                task.cancel()
        await asyncio.sleep(0)
        joint.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, (numbers, result) in enumerate(zip(wanted, results[1:], strict=True)):
            if i in gone:
                assert isinstance(result, asyncio.CancelledError)
            elif i in bad:
                assert isinstance(result, ValueError)
            else:
                assert result == [2 * number for number in numbers]

    joint, records = Joint(), list[Finished]()
    with working(finished=records.append) as workers:
        asyncio.run(go())
        assert workers.running == workers.waiting == 0 and not workers._queue._users
    assert len(records) == 1 + len(sizes)
    reasons = [record.reason for record in records]
    assert reasons.count("abort") == len(gone & set(range(len(sizes))))
    assert reasons.count("error") == len((bad - gone) & set(range(len(sizes))))
    made = [content for call in joint.calls for content in call]
    assert all(sum(map(len, call)) <= 4 for call in joint.calls)
    assert all(numbers in made for i, numbers in enumerate(wanted) if i not in gone)
    if not bad:  # nobody is asked twice, and no call could have taken the next one along
        assert made == [[0], *(numbers for i, numbers in enumerate(wanted) if i not in gone)]
        for call, following in zip(joint.calls[1:], joint.calls[2:], strict=False):
            assert sum(map(len, call)) + len(following[0]) > 4


def test_parts_of_something_else_are_not_joined() -> None:
    async def go() -> None:
        tasks = await behind_a_first(workers, joint, [joint.part(1), other.part(2), joint.part(3)])
        plain = asyncio.create_task(workers.run(lambda: [7]))
        joint.open.set()
        other.open.set()
        assert await asyncio.gather(*tasks, plain) == [[0], [2], [4], [6], [7]]

    joint, other = Joint(), Joint()
    with working() as workers:
        asyncio.run(go())
    assert joint.calls == [[[0]], [[1]], [[3]]]


def test_those_who_leave_a_failing_call_are_not_made_again() -> None:
    async def go() -> None:
        joint.open.set()
        held = Held()
        first = await begin(workers, held.call("first"))
        wait_until(lambda: held.called)
        parts = [joint.part(1), joint.part(13), joint.part(2)]
        tasks = [asyncio.create_task(workers.run(part)) for part in parts]
        await asyncio.sleep(0)
        joint.open.clear()
        held.open.set()
        wait_until(lambda: joint.calls)
        tasks[2].cancel()
        await asyncio.sleep(0)
        joint.open.set()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert results[1] == [2]
        assert [type(result) for result in results[2:]] == [ValueError, asyncio.CancelledError]

    joint = Joint()
    with working() as workers:
        asyncio.run(go())
    assert joint.calls == [[[1], [13], [2]], [[1]], [[13]]]
