"""The engine over the fake backend: what its readers get, and what is left behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.engine.actions import Counts, Job
from spmd.serving.engine.backend import Backend, Sampling, Stepped
from spmd.serving.engine.choice import Delta
from spmd.serving.engine.core import Core
from spmd.serving.engine.engine import LAG, Engine
from spmd.serving.engine.records import Finished, StepRecord
from spmd.serving.engine.stream import Failed
from tests.serving.engine.fake_backend import FakeBackend
from tests.waiting import PATIENCE, wait_until

DECODE = ByteTokenizer().decode


class Notes:
    """An observer that keeps everything; whenever it has heard something it calls `heard`."""

    def __init__(self) -> None:
        self.heard: Callable[[], None] = lambda: None
        self.steps: list[StepRecord] = []
        self.firsts: list[float] = []
        self.more: list[float] = []
        self.records: list[Finished] = []

    def ran(self, step: StepRecord) -> None:
        self.steps.append(step)
        self.heard()

    def first_token(self, seconds: float) -> None:
        self.firsts.append(seconds)

    def next_tokens(self, seconds: float, times: int) -> None:
        self.more += [seconds] * times
        self.heard()

    def finished(self, record: Finished) -> None:
        self.records.append(record)
        self.heard()


@contextmanager
def running(backend: Backend | None = None, **options: Any) -> Iterator[Engine]:
    observer = {key: options.pop(key) for key in ("observer",) if key in options}
    engine = Engine(Core(backend or FakeBackend(), **options), DECODE, b"a", **observer)
    engine.start()
    try:
        yield engine
        wait_until(lambda: engine.idle)
        assert engine.state().running == engine.state().waiting == 0
        assert not engine._entries
    finally:
        engine.stop()


def job(prompt: bytes = b"hello", max_tokens: int = 20, seed: int = 0, **more: Any) -> Job:
    return Job(tuple(prompt), max_tokens, Sampling(seed=seed), **more)


async def read(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def alone(prompt: bytes, tokens: int, seed: int = 0) -> str:
    return DECODE(FakeBackend().alone(prompt, tokens, seed))


def ask(engine: Engine, *jobs: Job, **options: Any) -> list[Delta]:
    async def go() -> list[Delta]:
        return await asyncio.wait_for(read(engine.submit(jobs, **options)), PATIENCE)

    return asyncio.run(go())


def test_tokens_become_text() -> None:
    notes = Notes()
    with running(observer=notes) as engine:
        deltas = ask(engine, job())
    assert text_of(deltas) == alone(b"hello", 20)
    made = [delta.generated for delta in deltas]
    assert made == sorted({*made}) and made[-1] == 20
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    (record,) = notes.records
    assert (record.reason, record.prompt_tokens, record.generated) == ("length", 5, 20)
    assert record.queued + record.prefill + record.decode == pytest.approx(record.total)
    assert len(notes.firsts) == 1 and len(notes.more) == 19
    chunks = [(step.rows, [*step.chunks.values()]) for step in notes.steps]
    assert chunks == [(5, [(5, True)])] + [(1, [])] * 19
    assert [step.seen for step in notes.steps] == list(range(5, 25))


def test_the_token_budget_is_the_backends_unless_another_is_given() -> None:
    for budget, given in ((6, None), (7, 7), (4, 1)):  # 4 slots draw anyhow
        notes = Notes()
        with running(observer=notes, token_budget=given) as engine:
            ask(engine, *(job(bytes([i] * 30), 20) for i in range(4)))
        assert max(step.rows for step in notes.steps if len(step.keys) > len(step.chunks)) == budget


def test_choices_have_their_own_seeds_and_share_the_prompt() -> None:
    backend = FakeBackend()
    with running(backend) as engine:
        deltas = ask(engine, *(job(b"x" * 30, seed=7 + i) for i in range(6)))
    for i in range(6):
        assert text_of(deltas, i) == alone(b"x" * 30, 20, 7 + i)
    assert backend.run - 6 * 19 < 6 * 30 / 2


def test_the_device_waits_for_text_that_lags() -> None:
    """What it draws meanwhile, behind a stop string, is wasted."""
    backend, text = FakeBackend(), threading.Event()

    def decode(ids: Sequence[int]) -> str:
        if threading.current_thread().name == "text":
            assert text.wait(PATIENCE)
        return DECODE(ids)

    async def go() -> list[Delta]:
        stream = engine.submit([job(max_tokens=59, stops=(alone(b"hello", 1),))])
        await asyncio.to_thread(wait_until, lambda: engine._done.full() or backend.drawn == 59)
        text.set()
        return await read(stream)

    engine = Engine(Core(backend), decode, b"a")
    engine.start()
    (delta,) = asyncio.run(go())
    engine.stop()
    assert (delta.text, delta.finish) == ("", "stop")
    counts = engine.state().counts
    assert counts.drawn == 1
    assert LAG <= backend.drawn - 1 <= 2 * LAG + 3  # as many may have been taken together


def test_totals_never_fall() -> None:
    """Prometheus takes a counter that falls for one that began anew, and adds all of it again."""
    notes, scraped = Notes(), list[Counts]()
    whole = alone(b"hello", 40)
    with running(observer=notes) as engine:
        notes.heard = lambda: scraped.append(engine.state().counts)
        for end in range(3, 30, 2):
            (last,) = ask(engine, job(max_tokens=40, stops=(whole[end : end + 4],)))[-1:]
            assert last.finish == "stop"
    for name in vars(Counts()):
        totals = [getattr(counts, name) for counts in scraped]
        assert totals == sorted(totals), name
    assert scraped[-1].drawn == sum(record.generated for record in notes.records)
    assert scraped[-1].cancelled == 0
    # The first token of each request is no "more".
    assert len(notes.more) == scraped[-1].drawn - len(notes.records)


def test_log_probabilities_of_a_cut_text_end_with_it() -> None:
    whole = alone(b"hello", 20)
    with running() as engine:
        deltas = ask(engine, job(stops=(whole[4:7],), logprobs=0))
    text = text_of(deltas)
    tokens = [token for delta in deltas for token in delta.tokens]
    assert "".join(token.text for token in tokens) == text == whole[: whole.index(whole[4:7])]
    shown = 0
    for delta in deltas:  # never a token before its text
        shown += len(delta.text)
        assert all(token.offset + len(token.text) <= shown for token in delta.tokens)


class NanBackend(FakeBackend):
    """Says NaN of everything in slot 1."""

    def step(self, parts: Any, alternatives: bool = True) -> Callable[[], Stepped]:
        later = super().step(parts, alternatives)
        drawing = [part.slot for part in parts if part.draws]
        later().drawn.logprobs[[slot == 1 for slot in drawing]] = np.nan
        return later


def test_numbers_that_are_none_fail_only_their_request(caplog: Any) -> None:
    async def go(engine: Engine) -> Any:
        streams = [engine.submit([job(bytes([i] * 9), 30)]) for i in range(3)]
        return await asyncio.gather(*map(read, streams), return_exceptions=True)

    with running(NanBackend()) as engine:
        good, bad, good_too = asyncio.run(go(engine))
        assert engine.error is None
    assert isinstance(bad, Failed) and "NaN" in str(bad)
    assert [record.getMessage() for record in caplog.records] == [f"request 1: {bad}"]
    assert good[-1].finish == good_too[-1].finish == "length"


class HungBackend(FakeBackend):
    """Beginning a call hangs, not only its results."""

    def step(self, *args: Any) -> Callable[[], Stepped]:
        self.gate.wait()
        return super().step(*args)


def test_a_call_that_hangs_is_seen() -> None:
    async def go(engine: Engine) -> None:
        stream = engine.submit([job(max_tokens=1)])
        await asyncio.to_thread(wait_until, lambda: engine.stalled() > 0)
        backend.gate.open()
        await read(stream)
        assert engine.stalled() == 0

    backend = HungBackend()
    backend.gate.close()
    with running(backend) as engine:
        assert engine.stalled() == 0
        asyncio.run(go(engine))


def test_a_mistake_in_making_text_is_told_to_all() -> None:
    class Broken(Notes):
        def ran(self, step: StepRecord) -> None:
            raise KeyError("x")

    async def go(engine: Engine) -> None:
        with pytest.raises(Failed, match="the server failed to make text: KeyError"):
            await read(engine.submit([job()]))
        with pytest.raises(Failed, match="KeyError"):
            engine.submit([job()])

    with running(observer=Broken()) as engine:
        asyncio.run(go(engine))
