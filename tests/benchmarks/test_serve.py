"""benchmarks/serve.py against the fake, and against servers that cheat."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import serve
from benchmarks.load_client import Answer, Load, find_doubles, make_asks, run_load
from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live, serving
from tests.waiting import PATIENCE

LOAD = Load(requests=40, concurrency=12, words=(1, 3), tokens=(1, 20))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeBackend(latency=0.001), ServerOptions(api_keys=("secret",))) as running:
        yield running


def answers_of(url: str, load: Load) -> list[Answer]:
    async def go() -> list[Answer]:
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE) as client:
            return await run_load(client, load, MODEL, make_asks(load))

    return asyncio.run(go())


def test_a_load(live: Live, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "numbers.json"
    serve.main([
        f"--url={live.url}", "--api_key=secret", "--requests=40", "--words=1,4", "--tokens=2,20",
        "--disconnect=0.3", "--verify=3", f"--json={path}",
    ])  # fmt: skip
    live.wait_idle()
    numbers = json.loads(path.read_text())
    assert numbers["done"] + numbers["left"] == numbers["requests"] == 40
    assert numbers["left"] > 3
    assert (numbers["verified"], numbers["same_alone"], numbers["failed"]) == (3, 3, 0)
    for name in ("first_token_ms", "between_tokens_ms", "whole_ms"):
        assert 0 < numbers[name]["p50"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    said = capsys.readouterr().out
    assert "first token" in said and "tokens/s" in said and "3 of 3 the same when alone" in said


@pytest.mark.parametrize(("chat", "rate"), [(False, None), (True, 400.0)])
def test_every_answer_is_right(live: Live, chat: bool, rate: float | None) -> None:
    load = Load(**{**vars(LOAD), "chat": chat, "rate": rate, "ignore_eos": True})
    answers = answers_of(live.url, load)
    assert [answer.ask for answer in answers] == make_asks(load)
    for answer in answers:
        ask = answer.ask
        prompt = f"User: {ask.prompt}\n\nAssistant:" if chat else ask.prompt
        assert answer.outcome == "done", answer.problem
        assert answer.text == live.alone(prompt, ask.max_tokens, ask.number)
        assert answer.prompt_tokens == len(prompt)
        assert answer.first is not None and len(answer.between) < answer.tokens
    assert find_doubles(answers) == []


# Servers that cheat.

DONE = "[DONE]"
