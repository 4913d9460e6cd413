"""JSON that somebody else wrote, as values of the types that it should have."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from spmd.serving.bundle.function import BundleError

LARGEST = 1 << 28
"""Bytes of the largest file of JSON that is read."""

MAX_INT = 1 << 48
"""Sizes, offsets and counts are below it."""


def checked(value: Any, kind: Any, where: str) -> Any:
    """What a type says: a dataclass (its members and no others), a mapping, a tuple, a number.

    `Any` is taken as it is, `Annotated[X, Y]` read as `Y`. Whole numbers are counts, 0 or more; a
    `float` is a finite number, or `inf`, `-inf` or `nan` as a string.

    Args:
      where: the value is, for messages.

    Raises:
      BundleError: it is something else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return checked(value, kind.__metadata__[0], where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        members, types = _of(value, dict, "an object", where), _types(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        if unknown := sorted(set(members) - set(names)):
            raise BundleError(f"{where} has the unknown member {unknown[0][:80]!r}")
        if missing := [name for name in names if name not in members]:
            raise BundleError(f"{where} has no {missing[0]!r}")
        given: Any = {n: checked(members[n], types[n], f"{where}: {n}") for n in names}
        return kind(**given)
    if origin is Mapping:
        made = {}
        for key, member in _of(value, dict, "an object", where).items():
            shown = key[:80] if key.isprintable() else repr(key[:80])
            made[checked(key, inner[0], where)] = checked(member, inner[1], f"{where}: {shown}")
        return made
    if origin is tuple:
        entries = enumerate(_of(value, list, "a list", where))
        return tuple(checked(entry, inner[0], f"{where}[{i}]") for i, entry in entries)
    if origin is UnionType:
        if value is None and NoneType in inner:
            return None
        kinds: dict[type, Any] = {list: tuple, dict: Mapping, str: str}
        wanted = kinds.get(type(value), int)
        fitting = [one for one in inner if (get_origin(one) or one) is wanted]
        return checked(value, (fitting or [one for one in inner if one is not NoneType])[0], where)
    if origin is Literal or kind is str:
        text = _of(value, str, "a string", where)
        if origin is Literal and text not in inner:
            raise BundleError(f"{where} is {_shown(text)}, not one of {', '.join(inner)}")
        return text
    if kind is int:
        if not 0 <= _of(value, int, "a whole number", where) < MAX_INT:
            raise BundleError(f"{where} is {_shown(value)}, not a number from 0 to 2**48")
        return value
    if value in ("inf", "-inf", "nan"):
        return float(value)
    number = _of(value, (int, float), "a number", where)
    if not math.isfinite(number) or abs(number) > 1e300:
        raise BundleError(f"{where} is {_shown(value)}, which is out of range")
    return number


def _of(value: Any, kind: Any, name: str, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BundleError(f"{where} is {_shown(value)}, not {name}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60]


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def read_json(text: bytes, where: str) -> Any:
    """The value of a file of JSON.

    Raises:
      BundleError: it is too long, nested too deeply, or no JSON.
    """
    if len(text) > LARGEST:
        raise BundleError(f"{where} is longer than {LARGEST:,} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is no JSON: {str(error) or type(error).__name__}") from None
