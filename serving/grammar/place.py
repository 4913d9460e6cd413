"""Finds the part of a JSON schema that is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAPS = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
ONES = ("items", "additionalProperties")
SHARED = ("$defs", "definitions")

MOST_TRIALS = 200
"""Each compiles a part; then the place is as near as is known."""


def find_problem(schema: Any, problem: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """The innermost part of a schema that cannot be used.

    Args:
      schema: a JSON value.
      problem: why a schema cannot be used; None if it can.

    Returns:
      (where it is, as in `/properties/age`, and why it cannot be used); None if all can be used.
    """
    found = problem(schema)
    if found is None:
        return None
    shared = {key: schema[key] for key in SHARED if isinstance(schema, dict) and key in schema}
    place, trials, is_deeper = "", 0, True
    while is_deeper:
        is_deeper = False
        for step, child in _children(schema):
            trials += 1
            if trials > MOST_TRIALS:
                break
            why = problem({**shared, **child} if isinstance(child, dict) else child)
            if why is not None:
                place, schema, found, is_deeper = place + step, child, why, True
                break
    return place, found


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for key in MAPS:
        children = schema.get(key)
        if isinstance(children, dict):
            for name, child in children.items():
                yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", child
    for key in LISTS:
        children = schema.get(key)
        if isinstance(children, list):
            for i, child in enumerate(children):
                yield f"/{key}/{i}", child
    for key in ONES:
        if key in schema:
            yield f"/{key}", schema[key]
