"""What is said of a function's parameters by number and by name: static ones, donated ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None

_BY_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD


def by_number_and_name(
    fn: Any, numbers: Numbers, names: Names
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Parameters by number and by name, as `jax.jit` understands them.

    Where only one of both is given, the other is read off the function's signature, so that a
    parameter is meant however the caller passes it.

    Example:
      >>> by_number_and_name(lambda x, mode: x, None, "mode")
      ((1,), ('mode',))
    """
    has_numbers, has_names = numbers is not None, names is not None
    by_number = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
    by_name = (names,) if isinstance(names, str) else tuple(names or ())
    parameters = _parameters(fn)
    if has_numbers and not has_names:
        known = [parameters[n] for n in by_number if -len(parameters) <= n < len(parameters)]
        by_name = tuple(p.name for p in known if p.kind == _BY_BOTH)
    elif has_names and not has_numbers:
        places = {p.name: i for i, p in enumerate(parameters) if p.kind == _BY_BOTH}
        by_number = tuple(places[name] for name in by_name if name in places)
    return by_number, by_name


def positions(numbers: Sequence[int], count: int) -> frozenset[int]:
    """Argument numbers, those from the end counted from the start."""
    return frozenset(n + count if n < 0 else n for n in numbers)


def parameter_names(fn: Any, count: int) -> tuple[str, ...]:
    """The names of the first parameters; `arg2` where a function does not tell."""
    found = [p.name for p in _parameters(fn)][:count]
    return (*found, *(f"arg{number}" for number in range(len(found), count)))


def parameter_count(fn: Any) -> int:
    """How many parameters a function has that may be given by position."""
    kinds = (_BY_BOTH, inspect.Parameter.POSITIONAL_ONLY)
    return sum(p.kind in kinds for p in _parameters(fn))


def _parameters(fn: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []
