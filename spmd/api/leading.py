"""Functions with parameters in front of the user's: for frameworks that take objects apart.

The names of a program's arguments, specs and static or donated arguments are all told by the user's
own signature; here they are moved behind the parameters in front.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.api.signature import by_number_and_name
from spmd.api.specs import specified
from spmd.errors import ArgumentError


def with_leading(call: Callable[..., Any], fn: Any, names: Sequence[str]) -> Callable[..., Any]:
    """`call`, described as `fn` with some parameters in front.

    Args:
      call: takes the parameters in front, then those of `fn`.
      fn: the user's function.
      names: of the parameters in front.
    """
    functools.update_wrapper(call, fn, updated=())
    parameters = list(inspect.signature(fn).parameters.values())
    taken = {parameter.name for parameter in parameters}
    front = [_front(name, taken) for name in names]
    own = [
        parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        else parameter
        for parameter in parameters
    ]
    call.__signature__ = inspect.Signature([*front, *own])  # type: ignore[attr-defined]
    return call


def behind_leading(fn: Any, options: dict[str, Any], count: int) -> dict[str, Any]:
    """Options of `jit` for `fn` as those for a function with more parameters in front.

    Args:
      fn: the user's function.
      options: as the user gave them.
      count: how many parameters are in front.
    """
    moved = dict(options)
    for kind in ("static", "donate"):
        given = moved.pop(f"{kind}_argnums", None), moved.pop(f"{kind}_argnames", None)
        numbers, names = by_number_and_name(fn, *given)
        moved[f"{kind}_argnums"] = tuple(n + count if n >= 0 else n for n in numbers)
        moved[f"{kind}_argnames"] = names
    for name in ("in_specs", "in_shardings"):
        if isinstance(specs := specified(moved.get(name)), tuple | list):
            moved[name] = (*[None] * count, *specs)
    return moved


def check_without(options: Mapping[str, Any], names: Sequence[str], what: str, fix: str) -> None:
    """Holds that options of `jit` that have no meaning for a framework's jit are not given.

    Args:
      options: as the user gave them.
      names: of those that have none.
      what: the framework's jit.
      fix: what to do instead.

    Raises:
      ArgumentError: one is given.
    """
    given = [name for name in names if options.get(name) is not None]
    if given:
        raise ArgumentError(f"{what} has no {given[0]}", fix=fix)


def _front(name: str, taken: set[str]) -> inspect.Parameter:
    while name in taken:
        name = f"_{name}"
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
