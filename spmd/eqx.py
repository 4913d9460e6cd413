"""Equinox: `filter_jit` compiles functions of any pytrees for a mesh, as `eqx.filter_jit` does.

Needs equinox (`pip install equinox`). Arrays are arguments of the program, all else is constant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np

from spmd.api import Jitted, check_without, with_keywords
from spmd.api import jit as jit_arrays

_BY_PLACE = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_FILTERED = "what is no array is static; donate='all' or 'all-except-first' donates"


def filter_jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate: Literal["none", "all", "all-except-first"] = "none",
    **options: Any,
) -> Any:
    """Compiles a function of any pytrees for a mesh: their arrays are traced, the rest is constant.

    Args:
      fn: a function, or a module that can be called. Without it, a decorator is returned.
      donate: the arguments whose memory the results may reuse, as for `eqx.filter_jit`.
      **options: as for `spmd.jit`, without those that say which arguments are static or donated.

    Returns:
      A `FilterJit`, which is called like `fn`.

    Raises:
      ArgumentError: static or donated arguments are given by number or by name.

    Example:
      >>> step = spmd.eqx.filter_jit(train_step, mesh=mesh)
      >>> model, state, loss = step(model, state, batch)
    """
    if fn is None:
        return functools.partial(filter_jit, donate=donate, **options)
    return FilterJit(fn, donate, options)


class FilterJit:
    """A function that `filter_jit` compiles: call it, or `compile` it for given arguments."""

    def __init__(self, fn: Callable[..., Any], donate: str, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        check_without(options, _BY_PLACE, "spmd.eqx.filter_jit", _FILTERED)
        self.arrays, self.constants = eqx.partition(fn, _is_traced)
        call, self._names = with_keywords(_on_arrays, fn, ["constants", "function"])
        names = list(inspect.signature(fn).parameters)
        donated = {"none": [], "all-except-first": names[1:]}.get(donate, names)
        own: dict[str, Any] = {"donate_argnames": donated, "static_argnames": self._names[:1]}
        for name in ("out_specs", "out_shardings"):
            if options.get(name) is not None:
                own[name] = (options[name], None)
        self.jitted: Jitted[..., Any] = jit_arrays(call, **options | own)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function on the mesh and returns its result, as `fn` would."""
        args, kwargs = self._split(args, kwargs)
        results, others = self.jitted(*args, **kwargs)
        return eqx.combine(results, others.tree)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the `Compiled` program for these arguments, for its reports; nothing runs."""
        args, kwargs = self._split(args, kwargs)
        return self.jitted.compile(*args, **kwargs)

    def _split(self, args: Any, kwargs: Any) -> Any:
        """Returns the (args, kwargs) with which a call of the function calls `self.jitted`.

        Leaves that are no arrays are None there. Two more keywords hold these and the function's,
        as a `_Constants`, and the function's arrays.
        """
        (args, kwargs), others = eqx.partition((args, kwargs), _is_traced)
        more = _Constants((self.constants, others)), self.arrays
        return args, dict(**kwargs, **dict(zip(self._names, more, strict=True)))


def _on_arrays(constants: _Constants, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `function` with what is no array put back from `constants`, in it and its arguments.

    Returns the arrays of its result, and the result's other leaves as `_Constants`.
    """
    around, inside = constants.tree
    args, kwargs = eqx.combine((args, kwargs), inside)
    results = eqx.combine(function, around)(*args, **kwargs)
    arrays, others = eqx.partition(results, eqx.is_array)
    return arrays, _Constants(others)


@jax.tree_util.register_static
class _Constants:
    """A pytree of values that are not arrays, hashable so that it can be a static argument."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self._key = tuple((type(leaf), leaf) for leaf in leaves), structure
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constants) and self._key == other._key


def _is_traced(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)
