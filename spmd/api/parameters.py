"""A function's parameters: their names and numbers, and what a call gives for each."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd.api.marks import path_name
from spmd.errors import ArgumentError

Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None

_BY_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD


def by_number_and_name(
    fn: Any, numbers: Numbers, names: Names
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns parameters by number and by name, as `jax.jit` understands them: ((1,), ("mode",)).

    Where only one of both is given, the other is read off the function's signature, so that a
    parameter is meant however the caller passes it.
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


def parameter_names(fn: Any, count: int) -> tuple[str, ...]:
    """Returns the names of the first `count` parameters; `arg2` where a function does not tell."""
    found = [p.name for p in _parameters(fn)][:count]
    return (*found, *(f"arg{number}" for number in range(len(found), count)))


def parameter_count(fn: Any) -> int:
    """Returns how many parameters of a function may be given by position."""
    kinds = (_BY_BOTH, inspect.Parameter.POSITIONAL_ONLY)
    return sum(p.kind in kinds for p in _parameters(fn))


def _parameters(fn: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def function_name(fn: Any) -> str:
    """Returns a function's name; for any other callable object, that of its class."""
    fn = _written(fn)
    return str(getattr(fn, "__name__", type(fn).__name__))


def function_place(fn: Any) -> tuple[str, str] | None:
    """Returns a function's file and qualified name; None where it is not written in Python."""
    fn = _written(fn)
    call = fn if hasattr(fn, "__code__") else _written(type(fn).__call__)
    code = getattr(call, "__code__", None)
    return (code.co_filename, code.co_qualname) if code else None


def _written(fn: Any) -> Any:
    """Returns the function inside of `functools.partial`s and wrappers."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


class Argument(NamedTuple):
    """Describes an argument of a call that is not static."""

    key: int | str  # its number among the positional ones of the call, or its name if given by that
    # the number of its parameter, or its name where the function does not have it in order
    place: int | str
    name: str
    value: Any  # its pytree
    is_donated: bool  # whether the results may take its memory


def leaf_names(parts: Sequence[Argument]) -> tuple[str, ...]:
    """Returns each leaf's name, its parameter's and its path within the argument: `params/w_in`."""
    return tuple(
        "/".join(filter(None, (part.name, path_name(path))))
        for part in parts
        for path, _ in jax.tree_util.tree_flatten_with_path(part.value)[0]
    )


def donated_leaves(parts: Sequence[Argument]) -> tuple[int, ...]:
    """Returns the flat indices of the donated arguments' leaves."""
    flags = [part.is_donated for part in parts for _ in jax.tree.leaves(part.value)]
    return tuple(i for i, is_donated in enumerate(flags) if is_donated)


def updates_of(parts: Sequence[Argument], out_tree: Any) -> tuple[tuple[int, int], ...]:
    """Pairs results with the donated arguments that they replace: (result leaf, argument leaf).

    An argument's partner is the first part of the results, not taken yet, of the same structure,
    shapes and dtypes; if there is none, each of its leaves finds its own, as XLA reuses memory. Of
    `step(params, batch)` that returns (loss, params), with `params = {"w": ..}` donated: ((1, 0),).
    """
    counts = [len(jax.tree.leaves(part.value)) for part in parts]
    starts = np.cumsum([0, *counts]).tolist()
    places_of = zip(parts, starts, strict=False)
    donated = [(part.value, position) for part, position in places_of if part.is_donated]
    if not donated:
        return ()
    places: dict[Any, list[int]] = {}
    for tree, start in _subtrees(out_tree):
        places.setdefault(_tree_type(tree), []).append(start)
    links: dict[int, int] = {}

    def is_linked(tree: Any, position: int) -> bool:
        count = len(jax.tree.leaves(tree))
        for start in places.get(_tree_type(tree), ()):
            if links.keys().isdisjoint(range(start, start + count)):
                links.update((start + k, position + k) for k in range(count))
                return True
        return False

    alone = [tree for tree in donated if not is_linked(*tree)]
    for tree, position in alone:
        for k, leaf in enumerate(jax.tree.leaves(tree)):
            is_linked(leaf, position + k)
    return tuple(links.items())


def _subtrees(tree: Any) -> Iterator[tuple[Any, int]]:
    """Yields a tree and all its subtrees, outer ones first, each with its first leaf's number."""
    level = [(tree, 0)]
    while level:
        yield from level
        inner = []
        for outer, start in level:
            # Its children: parts that are not the tree itself, as a leaf is.
            parts = jax.tree.leaves(outer, is_leaf=partial(operator.is_not, outer))
            for child in (part for part in parts if part is not outer):
                inner.append((child, start))
                start += len(jax.tree.leaves(child))
        level = inner


def _tree_type(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


# ---------------------------------------------------------------------------------------------
# Functions with parameters in front of the user's, for frameworks that take objects apart. Names of
# arguments, specs, and which arguments are static or donated are told by the user's own signature;
# here they are moved behind the parameters in front.


def with_leading(call: Callable[..., Any], fn: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Gives `call` the name of `fn`, and its signature behind parameters of the given names."""
    functools.update_wrapper(call, fn, updated=())
    own = list(inspect.signature(fn).parameters.values())
    taken = {parameter.name for parameter in own}
    front = []
    for name in names:
        while name in taken:
            name = f"_{name}"
        front.append(inspect.Parameter(name, _BY_BOTH))
    only_by_place = inspect.Parameter.POSITIONAL_ONLY
    own = [p.replace(kind=_BY_BOTH) if p.kind is only_by_place else p for p in own]
    call.__signature__ = inspect.Signature([*front, *own])  # type: ignore[attr-defined]
    return call


def behind_leading(fn: Any, options: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns `jit` options for `fn` as those of a function with `count` parameters in front."""
    moved = dict(options)
    for kind in ("static", "donate"):
        given = moved.pop(f"{kind}_argnums", None), moved.pop(f"{kind}_argnames", None)
        numbers, names = by_number_and_name(fn, *given)
        moved[f"{kind}_argnums"] = tuple(n + count if n >= 0 else n for n in numbers)
        moved[f"{kind}_argnames"] = names
    for name in ("in_specs", "in_shardings"):
        if isinstance(specs := moved.get(name), tuple | list):
            moved[name] = (*[None] * count, *specs)
    return moved


def check_without(options: Mapping[str, Any], names: Sequence[str], what: str, fix: str) -> None:
    """Raises ArgumentError if options are given that a framework's jit, called `what`, lacks."""
    given = [name for name in names if options.get(name) is not None]
    if given:
        raise ArgumentError(f"{what} has no {given[0]}", fix=fix)
