"""What a text between tags stands for: `1` is a number or a text, as its schema says."""

import json
from collections.abc import Collection
from typing import Any

SHARED = ("$defs", "definitions")

NAMES = {str: "string", bool: "boolean", list: "array", dict: "object", type(None): "null"}

WORDS = {"true": True, "false": False, "none": None}
"""Templates may write values that are no texts in the words of Python."""


def property_of(schema: Any, key: str) -> dict[str, Any]:
    """The schema of an argument, with the parts that it may refer to; {} if it has none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        return {}
    shared = {name: schema[name] for name in SHARED if name in schema}
    return {**shared, **(_referred(found, shared) or found)}


def _referred(schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any] | None:
    """What `$ref` refers to, if there is one and it is one of the shared parts."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found = (one.get(name) for one in shared.values() if isinstance(one, dict))
    return next((one for one in found if isinstance(one, dict)), None)


def values_of(schema: dict[str, Any]) -> list[Any]:
    """The values that a schema names, if it allows no others."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def kinds_of(schema: dict[str, Any], depth: int = 8) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {one for one in given if isinstance(one, str)}
    if values := values_of(schema):
        return {NAMES.get(type(value), "number") for value in values}
    shared = {name: schema[name] for name in SHARED if name in schema}
    referred = _referred(schema, shared)
    parts = [referred] if referred else schema.get("anyOf") or schema.get("oneOf") or ()
    found = [
        kinds_of({**shared, **one}, depth - 1) if isinstance(one, dict) and depth else set[str]()
        for one in (parts if isinstance(parts, list) else ())
    ]
    return set[str]().union(*found) if all(found) else set()


def typed(text: str, kinds: Collection[str]) -> Any:
    """The value that a text stands for.

    Args:
      kinds: the types of its schema; none are all.

    Example:
      >>> typed("1", {"integer"}), typed("1", {"string"}), typed("True", {"boolean"})
      (1, '1', True)
    """
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = WORDS.get(text.strip().lower(), text)
    kind = NAMES.get(type(value), "number")
    fits = not kinds or kind in kinds or (kind == "number" and "integer" in kinds)
    return value if fits else text
