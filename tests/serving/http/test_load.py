"""Many clients at once over real sockets: every answer is what its prompt alone would have got."""

import asyncio
import dataclasses
import gc
import json
import random
from typing import Any

import httpx
import pytest

from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import Live, get, serving
from tests.waiting import PATIENCE


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], leave_after: int
) -> tuple[str, bool]:
    """The text of a stream, and whether we stayed to its end."""
    text, count = "", 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text, True
            if line:
                text += json.loads(line[6:])["choices"][0]["text"]
                count += 1
            if count == leave_after:
                return text, False
    raise AssertionError("a stream without an end")


async def one(client: httpx.AsyncClient, live: Live, rng: random.Random) -> str:
    """Ask for something, maybe leave early, and check what came; says what became of it."""
    shared = rng.choice(["", "the quick brown fox ", "once upon a time, "])
    prompt = shared + "".join(rng.choices("abc", k=rng.randint(1, 20)))
    tokens, seed = rng.randint(1, LIMITS.max_length - len(prompt)), rng.randrange(2)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "seed": seed}
    body["user"] = rng.choice("xyz")
    whole = live.alone(prompt, tokens, seed)
    kind = rng.choice(["whole", "stream", "leave the stream", "leave"])
    if kind == "whole":
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == whole
        assert answer["usage"]["completion_tokens"] == tokens
    elif kind == "leave":
        try:
            await client.post("/v1/completions", json=body, timeout=rng.uniform(0.01, 0.1))
        except httpx.TimeoutException:
            return "left"
    else:
        leave_after = rng.randint(1, 5) if kind == "leave the stream" else -1
        text, stayed = await read_stream(client, body, leave_after)
        assert text == whole if stayed else whole.startswith(text)
        return "done" if stayed else "left"
    return "done"


def crowd(live: Live, count: int, at_once: int, seed: int) -> list[str]:
    async def go() -> list[str]:
        gate = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE, limits=limits) as client:

            async def enter(number: int) -> str:
                async with gate:
                    return await one(client, live, random.Random(f"{seed} {number}"))

            return await asyncio.gather(*map(enter, range(count)))

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
