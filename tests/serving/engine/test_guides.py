"""Requests with a guide: who waits for a mask delays nobody and fails alone; bad words, too."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.engine.actions import Job
from spmd.serving.engine.backend import Words
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.guide import BadWords, GuideError, WithoutBadWords, counted_masks, words_of
from spmd.serving.engine.stream import Failed, Misguided
from tests.serving.engine.test_engine import Notes, alone, ask, job, read, running, text_of
from tests.waiting import PATIENCE, wait_until


class Spelled:
    """Allows one letter after the other of a text, and then the end."""

    def __init__(self, text: bytes, gate: threading.Event | None = None) -> None:
        self.left = text
        self.gate = gate
        self.threads: set[str] = set()

    def allowed(self) -> Words:
        return words_of([self.left[0] if self.left else 0], 256)

    def take(self, token: int) -> None:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        if not self.left or token != self.left[0]:
            raise ValueError("that is spelled wrong")
        self.left = self.left[1:]


def spelled(text: bytes, max_tokens: int = 20, **more: Any) -> Job:
    guide = Spelled(text, more.pop("gate", None))
    masks = ((0, guide.allowed()),)
    return job(max_tokens=max_tokens, stop_ids=frozenset([0]), masks=masks, guide=guide, **more)


def test_a_guide_says_what_is_drawn() -> None:
    one = spelled(b"what it says")
    with running() as engine:
        deltas = ask(
            engine, one, job(seed=1), spelled(b"cut off", 3), spelled(b"sto.p", stops=(".",))
        )
    texts = [text_of(deltas, i) for i in range(4)]
    assert texts == ["what it says", alone(b"hello", 20, 1), "cut", "sto"]
    finish = {delta.choice: delta.finish for delta in deltas if delta.finish}
    assert finish == {0: "stop", 1: "length", 2: "length", 3: "stop"}
    assert isinstance(one.guide, Spelled)
    assert all(name.startswith("masks") for name in one.guide.threads)


def test_time_without_a_step_counts_while_requests_run() -> None:
    notes, began = Notes(), time.monotonic()
    with running(observer=notes) as engine:
        core: Any = engine.core
        for _ in range(2):
            ask(engine, spelled(b"abc", 3))  # each token waits for a mask
            wait_until(lambda: engine.idle and core._calls.idle_since is None)
            time.sleep(0.3)
    assert [step.gap > 0 for step in notes.steps] == [False, True, True] * 2
    spent = sum(step.done - step.begun + step.gap for step in notes.steps)
    assert spent <= time.monotonic() - began - 0.6


def test_others_go_on_while_a_mask_is_made(monkeypatch: Any) -> None:
    """And nobody looks again and again whether it is."""
    gate, asked = threading.Event(), [0]

    async def go(engine: Engine) -> None:
        guided = engine.submit([spelled(b"slow", gate=gate)])
        first = await anext(aiter(guided))
        assert first.text == "s"
        assert text_of(await read(engine.submit([job(max_tokens=50)]))) == alone(b"hello", 50)
        before = asked[0]
        await asyncio.sleep(0.05)
        assert asked[0] <= before + 2
        gate.set()
        assert text_of(await read(guided)) == "low"

    with running() as engine:
        core: Any = engine.core
        scheduler_next = core._scheduler.next

        def count() -> Any:
            asked[0] += 1
            return scheduler_next()

        monkeypatch.setattr(core._scheduler, "next", count)
        asyncio.run(go(engine))


def test_who_leaves_while_a_mask_is_made() -> None:
    gate = threading.Event()

    async def go(engine: Engine) -> None:
        stream = engine.submit([spelled(b"gone", gate=gate)])
        await anext(aiter(stream))
        stream.close()
        assert text_of(await read(engine.submit([job()]))) == alone(b"hello", 20)
        gate.set()

    with running() as engine:
        asyncio.run(go(engine))
        assert text_of(ask(engine, spelled(b"next"))) == "next"


@pytest.mark.parametrize(
    ("error", "failure", "message", "reason"),
    [
        (GuideError("it is too hard"), Misguided, "^it is too hard$", "grammar"),
        (KeyError("oh"), Failed, "no mask could be made: 'oh'", "error"),
    ],
)
def test_a_guide_that_fails_fails_alone(
    error: Exception, failure: type[Failed], message: str, reason: str
) -> None:
    class Broken(Spelled):
        def allowed(self) -> Words:
            if self.left == b"d":
                raise error
            return super().allowed()

    guide = Broken(b"bad")
    bad = job(stop_ids=frozenset([0]), masks=((0, guide.allowed()),), guide=guide)

    async def go(engine: Engine) -> None:
        good = engine.submit([job(max_tokens=50), spelled(b"good")])
        stream = engine.submit([bad])
        with pytest.raises(Failed, match=message) as failed:
            await read(stream)
        assert type(failed.value) is failure
        assert [record.reason for record in stream.records] == [reason]
        deltas = await read(good)
        assert text_of(deltas, 0) == alone(b"hello", 50) and text_of(deltas, 1) == "good"

    with running() as engine:
        asyncio.run(go(engine))
        assert engine.error is None


def test_masks_by_count() -> None:
    """No stop id before `min_tokens`, and no stop string either."""
    whole = alone(b"hello", 40)
    first = whole[0]

    def least(count: int, **more: Any) -> Job:
        stop_ids = frozenset(range(32, 110))  # a bit more than half of all letters
        masks = counted_masks(256, (), stop_ids, count)
        return job(max_tokens=40, stop_ids=stop_ids, min_tokens=count, masks=masks, **more)

    with running() as engine:
        deltas = ask(engine, *(least(count, seed=count) for count in range(20)))
        for count in range(20):
            mine = [delta for delta in deltas if delta.choice == count]
            assert mine[-1].finish == "stop" and mine[-1].generated > count
        assert text_of(ask(engine, job(max_tokens=40, stops=(first,)))) == ""
        text = text_of(ask(engine, job(max_tokens=40, stops=(first,), min_tokens=5)))
    assert whole.startswith(text) and len(text) == (whole + first).index(first, 5)


VOCABULARY = 70
TOKENS = st.sampled_from([0, 3, 31, 32, 69])  # of all words of a mask
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6)


def ids(mask: Words) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def brute_force(sequences: Any, drawn: list[int]) -> set[int]:
    """The tokens with which the text would end with one of the sequences."""
    return {s[-1] for s in sequences if [*drawn, s[-1]][-len(s) :] == list(s)}


@given(SEQUENCES, st.lists(TOKENS, max_size=8))
def test_what_would_complete_a_sequence(sequences: Any, drawn: list[int]) -> None:
    bad = BadWords(sequences, VOCABULARY)
    assert set(bad.behind(drawn)) == brute_force(sequences, drawn)
    assert set(bad.behind(drawn[-bad.reach :] if bad.reach else [])) == set(bad.behind(drawn))


@given(SEQUENCES, st.lists(TOKENS, max_size=8), st.sets(TOKENS), st.integers(0, 3))
def test_beside_masks_by_count(
    sequences: Any, drawn: list[int], allowed: set[int], least: int
) -> None:
    bad = BadWords(sequences, VOCABULARY)
    guide = WithoutBadWords(bad, counted_masks(VOCABULARY, allowed, [0], least))
    for i in range(len(drawn) + 1):
        expected = (allowed or set(range(VOCABULARY))) - brute_force(sequences, drawn[:i])
        expected -= {0} if i < least else set()
        if expected:
            assert {*ids(guide.allowed())} == expected
        else:
            with pytest.raises(GuideError, match="bad_words leave no token"):
                guide.allowed()
        for token in drawn[i : i + 1]:
            guide.take(token)
