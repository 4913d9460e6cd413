"""Finds the part of a JSON schema that is to blame."""

from collections.abc import Callable, Iterator
from typing import Any

from spmd.serving.grammar.guide import TooHard

MAPS = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
ONES = ("items", "additionalProperties")
SHARED = ("$defs", "definitions")

MOST_TRIALS = 200
"""Each compiles a part; then the place is as near as is known."""


def find_problem(schema: Any, problem: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """The innermost part of a schema that cannot be used.

    Args:
      problem: why a schema cannot be used; None if it can. If finding out takes too long it raises
        `TooHard`, which ends the search in parts.

    Returns:
      (where it is, as in `/properties/age`, and why it cannot be used); None if all can be used.
    """
    found = problem(schema)
    if found is None:
        return None
    shared = {key: schema[key] for key in SHARED if isinstance(schema, dict) and key in schema}
    children, place = _children(schema), ""
    # A step to each child that has a problem; its siblings behind it are not looked at.
    for _ in range(MOST_TRIALS):
        step, child = next(children, (None, None))
        if step is None:
            break
        try:
            why = problem({**shared, **child} if isinstance(child, dict) else child)
        except TooHard:
            break
        if why is not None:
            place, found, children = place + step, why, _children(child)
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
