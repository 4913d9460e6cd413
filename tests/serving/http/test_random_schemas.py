"""Whatever a model draws, what it ends is what its schema allows."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serving.http.limits import Options
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import Live, serving
from tests.serving.http.scripted import LARGE
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


Schema = dict[str, Any]

NAMES = ("name", "age", "tags", "é", 'a "b"', "x/y", "$ref", "items", "")
PATTERNS = ("^[a-c]{2,4}$", r"^\d{1,3}-[A-F]{2}$", "^(yes|no)$", "[0-9]$", r"^a\.b?c{0,3}$")
VALUES: tuple[Any, ...] = (1, -2.5, True, None, "a\nb", "日本", [1, "x"], {"k": [None]}, [], {}, "")


def random_schema(rng: random.Random) -> Schema:
    """A schema; those with `$defs` have a recursive one."""
    if rng.random() < 0.15:
        node = {
            "type": "object",
            "properties": {"value": _schema(rng, 0), "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
        return {
            "$defs": {"node": node},
            "type": "array",
            "maxItems": 2,
            "items": {"$ref": "#/$defs/node"},
        }
    return _schema(rng, 3)


def _schema(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [
        _string, _integer, _number, _values, _plain,
    ]  # fmt: skip
    if depth:
        makers += [_object, _object, _object, _array, _array, _any]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(1, 500)
    if rng.random() < 0.2:
        return {"type": "integer", "minimum": low, "maximum": low + 100, "multipleOf": 7}
    keys = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "maximum")])
    return {"type": "integer", keys[0]: low, keys[1]: high}


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 50)}


def _values(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    made: Schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    kind = rng.random()
    if kind < 0.7:
        made["additionalProperties"] = False
    else:
        made["additionalProperties"] = _schema(rng, 0)
    return made


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    made: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 3)}
    made["items"] = _schema(rng, depth - 1)
    if rng.random() < 0.3:
        made["prefixItems"] = [_schema(rng, depth - 1)]
    return made


def _any(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
