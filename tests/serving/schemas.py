"""Random JSON schemas, of all that is enforced, whose texts all come to an end soon."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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
