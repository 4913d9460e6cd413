"""Many clients at once over real sockets: every answer is what its prompt alone would have got."""

import asyncio
import dataclasses
import gc
import random

import pytest

from benchmarks.load_client import Ask, Load, Outcome, open_client, run_load
from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import MODEL, Live, get, serving


def asks(count: int, seed: int) -> list[Ask]:
    """Prompts of which many begin alike; half of those who ask leave early."""
    rng, made = random.Random(seed), []
    for number in range(count):
        shared = rng.choice(["", "the quick brown fox ", "once upon a time, "])
        prompt = shared + "".join(rng.choices("abc", k=rng.randint(1, 20)))
        tokens = rng.randint(1, LIMITS.max_length - len(prompt))
        leave_after = rng.choice([None, rng.randint(1, 5)])
        made.append(Ask(number, prompt, tokens, leave_after, 0.0))
    return made


def crowd(live: Live, count: int, at_once: int, seed: int) -> list[Outcome]:
    load, asked = Load(count, at_once, ignore_eos=True), asks(count, seed)

    async def go() -> list[Outcome]:
        async with open_client(live.url) as client:
            answers = await run_load(client, load, MODEL, asked)
        for answer in answers:
            assert answer.outcome in ("done", "left"), answer.problem
            whole = live.alone(answer.ask.prompt, answer.ask.max_tokens, answer.ask.number)
            assert whole.startswith(answer.text)
            assert answer.outcome == "left" or answer.text == whole
        return [answer.outcome for answer in answers]

    results = asyncio.run(go())
    live.wait_idle()
    return results


@pytest.mark.parametrize(
    ("count", "at_once", "rounds", "pages"),
    [
        pytest.param(40, 30, 1, 64, marks=pytest.mark.thorough),
        pytest.param(40, 30, 1, 18, marks=pytest.mark.thorough),
        pytest.param(1000, 300, 2, 64, marks=pytest.mark.heavy),
    ],
)
def test_a_crowd(count: int, at_once: int, rounds: int, pages: int) -> None:
    """Memory stays flat, also where requests take each other's pages."""
    backend = FakeBackend(dataclasses.replace(LIMITS, pages=pages), latency=0.0005)
    with serving(backend, ServerOptions(max_waiting=1000)) as live:
        results = crowd(live, count, at_once, 0)
        assert len(results) == count
        assert min(results.count("done"), results.count("left")) > count / 10
        gc.collect()
        before = len(gc.get_objects())
        for seed in range(1, 1 + rounds):
            crowd(live, count, at_once, seed)
        gc.collect()
        # The latest steps and requests are kept for pages.
        assert len(gc.get_objects()) - before < 40 * count
        state = live.service.language().engine.state()
        assert state.counts.cancelled > 5
        assert (state.counts.preempted > 0) == (pages < 64)
        assert state.held == 0 and 0 < state.cached <= state.pages == pages
        numbers = get(f"{live.url}/metrics").text
        drawn = f'vllm:generation_tokens_total{{model_name="fake-llama"}} {state.counts.drawn}.0'
        assert drawn in numbers
