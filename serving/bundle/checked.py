"""JSON that somebody else wrote: every value is checked where it is taken out."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from spmd.serving.bundle.function import BundleError

LARGEST = 1 << 28
"""Bytes of the largest file of JSON that is read."""

MAX_INT = 1 << 48
"""Sizes, offsets and counts are below it."""


class Checked:
    """A value and where it is, for messages; asking for what it is not raises a `BundleError`.

    `value` is any value at all, as it is.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def __getitem__(self, key: str) -> Checked:
        members = self._of(dict, "an object")
        if key not in members:
            raise BundleError(f"{self.where} has no {key!r}")
        return self._member(key)

    def items(self) -> Iterator[tuple[str, Checked]]:
        """The members of an object."""
        members = self._of(dict, "an object")
        return ((key, self._member(key)) for key in members)

    def _member(self, key: str) -> Checked:
        shown = key[:80] if key.isprintable() else repr(key[:80])
        return Checked(self.value[key], f"{self.where}: {shown}")

    def __iter__(self) -> Iterator[Checked]:
        entries = self._of(list, "a list")
        return (Checked(entry, f"{self.where}[{i}]") for i, entry in enumerate(entries))

    def only(self, *keys: str) -> None:
        """Raise unless these are the members of an object and no others."""
        unknown = sorted(set(self._of(dict, "an object")) - set(keys))
        if unknown:
            raise BundleError(f"{self.where} has the unknown member {unknown[0][:80]!r}")

    def read(self, kind: Any) -> Any:
        """What a type says: a dataclass (its members and no others), a mapping, a tuple, a number.

        `Any` is taken as it is, `Annotated[X, Y]` read as `Y`. Whole numbers are counts.
        """
        origin, inner = get_origin(kind), get_args(kind)
        if kind is Any:
            return self.value
        if origin is Annotated:
            return self.read(kind.__metadata__[0])
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            self.only(*names)
            given: Any = {name: self[name].read(_types(kind)[name]) for name in names}
            return kind(**given)
        if origin is Mapping:
            named = (
                (Checked(key, self.where).read(inner[0]), member) for key, member in self.items()
            )
            return {key: member.read(inner[1]) for key, member in named}
        if origin is tuple:
            return tuple(entry.read(inner[0]) for entry in self)
        if origin is Literal:
            return self.one_of(*inner)
        if origin is UnionType:
            if self.value is None and NoneType in inner:
                return None
            kinds: dict[type, Any] = {list: tuple, dict: Mapping, str: str}
            wanted = kinds.get(type(self.value), int)
            fitting = [one for one in inner if (get_origin(one) or one) is wanted]
            return self.read((fitting or [one for one in inner if one is not NoneType])[0])
        return {str: self.text, int: self.count, float: self.number}[kind]()

    def text(self) -> str:
        """A string."""
        return str(self._of(str, "a string"))

    def one_of(self, *choices: str) -> str:
        """One of some strings."""
        if self.text() not in choices:
            raise BundleError(f"{self.where} is {self._shown()}, not one of {', '.join(choices)}")
        return self.text()

    def count(self) -> int:
        """A whole number, 0 or more."""
        value = self._of(int, "a whole number")
        if not 0 <= value < MAX_INT:
            raise BundleError(f"{self.where} is {self._shown()}, not a number from 0 to 2**48")
        return int(value)

    def number(self) -> float:
        """A finite number, or `inf`, `-inf` or `nan` as a string."""
        if self.value in ("inf", "-inf", "nan"):
            return float(self.value)
        value = self._of((int, float), "a number")
        if not math.isfinite(value) or abs(value) > 1e300:
            raise BundleError(f"{self.where} is {self._shown()}, which is out of range")
        return value if isinstance(value, int) else float(value)

    def _of(self, kind: Any, name: str) -> Any:
        if not isinstance(self.value, kind) or isinstance(self.value, bool):
            raise BundleError(f"{self.where} is {self._shown()}, not {name}")
        return self.value

    def _shown(self) -> str:
        return repr(self.value)[:60]


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def read_json(text: bytes, where: str) -> Checked:
    """A file of JSON.

    Raises:
      BundleError: it is too long, nested too deeply, or no JSON.
    """
    if len(text) > LARGEST:
        raise BundleError(f"{where} is longer than {LARGEST:,} bytes")
    try:
        return Checked(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is no JSON: {str(error) or type(error).__name__}") from None
