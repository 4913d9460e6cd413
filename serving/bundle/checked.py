"""JSON that somebody else wrote: every value is checked where it is taken out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

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

    def __contains__(self, key: str) -> bool:
        return key in self._of(dict, "an object")

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
