"""Meshes and specs as the scripts' flags spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UsageError(ValueError):
    """Flags that make no sense; the message is one line."""


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=4,model=2"` -> `{"data": 4, "model": 2}`.

    Raises:
        UsageError: not of that form, or a repeated axis.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not name or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh: {item!r} is not of the form axis=size, as in data=4,model=2")
        if name in axes:
            raise UsageError(f"--mesh: axis {name!r} is given twice")
        axes[name] = int(size)
    return axes


def parse_specs(flag: str, texts: Sequence[str], count: int) -> list[Any]:
    """`["0=data,-"]` -> `[("data", None), None, ...]`, one for each argument or result.

    Raises:
        UsageError: not of that form, or a number that does not exist.
    """
    specs: list[Any] = [None] * count
    for text in texts:
        number, equals, spec = text.partition("=")
        if not equals or not number.strip().isdecimal():
            raise UsageError(f"--{flag}: {text!r} is not of the form NUMBER=SPEC, as in 0=data,-")
        if int(number) >= count:
            raise UsageError(f"--{flag}: there is no {number.strip()} among {count}, from 0")
        specs[int(number)] = parse_spec(spec)
    return specs


def parse_named_specs(flag: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """`["0=data,None", "params/w=None,model"]` -> `{name: ("data", None), "params/w": ...}`.

    Raises:
        UsageError: not of that form, or a number that does not exist.
    """
    specs: dict[str, Any] = {}
    for text in texts:
        name, equals, spec = text.rpartition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--{flag}: {text!r} is not of the form NUMBER=SPEC or NAME=SPEC, as in 0=data,None"
            )
        name = name.strip()
        if name.isdecimal():
            if int(name) >= len(names):
                raise UsageError(f"--{flag}: there is no {name} among {len(names)}, from 0")
            name = names[int(name)]
        specs[name] = parse_spec(spec)
    return specs


def parse_spec(text: str) -> tuple[Any, ...]:
    """`"data+model,None,..."` -> `(("data", "model"), None, ...)`; `-` is `None`, too."""
    return tuple(_entry(entry.strip()) for entry in text.split(",") if entry.strip())


def _entry(text: str) -> Any:
    if text in ("-", "None"):
        return None
    return ... if text == "..." else tuple(text.split("+"))
