"""Whatever a model draws, what it ends is what its schema allows."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from serving.http.limits import Options
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import Live, serving
from tests.serving.http.scripted import LARGE
from tests.serving.schemas import random_schema
from tests.waiting import PATIENCE

jsonschema = pytest.importorskip("jsonschema")

CLIENTS = 16


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1000), marks=pytest.mark.heavy)])
def test_texts_fit_their_schemas(seeds: range) -> None:
    backend = FakeBackend(LARGE, budget=512, letters=False)
    with serving(backend, Options(max_waiting=64)) as live:
        ended = asyncio.run(_ask_all(live, seeds))
        live.wait_idle()
    assert ended > 0.95 * len(seeds)


async def _ask_all(live: Live, seeds: range) -> int:
    """How many texts came to their own end; each was checked."""
    turn = asyncio.Semaphore(CLIENTS)
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE) as client:

        async def one(seed: int) -> bool:
            async with turn:
                return await _ask(client, seed)

        return sum(await asyncio.gather(*map(one, seeds)))


async def _ask(client: httpx.AsyncClient, seed: int) -> bool:
    schema = random_schema(random.Random(seed))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    is_chat = seed % 2
    path = "completions"
    prompt: dict[str, Any] = {"prompt": f"{seed}"}
    body: dict[str, Any] = {"seed": seed, "max_tokens": 4000, "response_format": form}
    if is_chat:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": f"{seed}"}]}
    response = await client.post(f"/v1/{path}", json={**body, **prompt})
    assert response.status_code == 200, (schema, response.text)
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] != "stop":
        return False
    value = json.loads(choice["message"]["content"] if is_chat else choice["text"])
    jsonschema.Draft202012Validator(schema).validate(value)
    return True
