"""Equinox: `filter_jit` compiles functions of any pytrees for a mesh, as `eqx.filter_jit` does.

Needs equinox (`pip install equinox`). Arrays are arguments of the program, all else is constant.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spmd.api import Front, Jitted, argument_error, with_keywords
from spmd.api import jit as jit_arrays
from spmd.errors import InstallError

try:
    import equinox as eqx
except ImportError as error:
    raise InstallError(f"spmd.eqx needs equinox: {error}", fix="pip install -U equinox") from error

_BY_PLACE = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_FIRST_DONATED = {"none": None, "all": 0, "all-except-first": 1, "warn": 0, "warn-except-first": 1}
_FILTERED = "what is no array is static; donate='all' or 'all-except-first' donates"


def filter_jit(
    fn: Callable[..., Any] | None = None, *, donate: str = "none", **options: Any
) -> Any:
    """Compiles a function of any pytrees for a mesh: their arrays are traced, the rest is constant.

    Args:
      fn: the function, or a module that can be called. Without it, a decorator is returned.
      donate: which arrays the results may take the memory of, as for `eqx.filter_jit`: `none`,
        `all`, those of `fn` too, or `all-except-first`, which spares the first argument; with
        `warn` in place of `all`, jax warns of those that no result can use.
      **options: as for `spmd.jit`, but nothing is static or donated by number or name.

    Returns:
      A `FilterJit`, which is called like `fn`.

    Raises:
      ArgumentError: static or donated arguments by number or name, or an unknown `donate`.

    Example:
      >>> step = spmd.eqx.filter_jit(train_step, mesh=mesh)
      >>> model, state, loss = step(model, state, batch)
    """
    if fn is None:
        return functools.partial(filter_jit, donate=donate, **options)
    return FilterJit(fn, donate, options)


class FilterJit(Front):
    """What `filter_jit` returns: call it, or `lower` / `compile` it for given arguments."""

    def __init__(self, fn: Callable[..., Any], donate: str, options: dict[str, Any]) -> None:
        super().__init__(fn, options, _BY_PLACE, _FILTERED)
        self.arrays, self.constants = eqx.partition(fn, _is_traced)
        call, self._names = with_keywords(_on_arrays, fn, ["constants", "function"])
        outs = [name for name in ("out_specs", "out_shardings") if options.get(name) is not None]
        own = {"static_argnames": self._names[:1], **{n: (options[n], None) for n in outs}}
        if donate not in _FIRST_DONATED:
            raise argument_error(
                f"donate={donate!r} is no option of spmd.eqx.filter_jit",
                required=f"one of {', '.join(map(repr, _FIRST_DONATED))}",
            )
        first, self._is_quiet = _FIRST_DONATED[donate], donate.startswith("all")
        kept = list(inspect.signature(fn).parameters)[:first]  # also where it is given by name

        @functools.cache
        def jitted(count: int, names: tuple[str, ...]) -> Jitted[..., Any]:
            """Returns the `Jitted` for calls of `count` positional arguments, keywords `names`."""
            donated = [*(name for name in names if name not in kept), self._names[1]]
            if first is None:
                return jit_arrays(call, **options | own)
            numbers = {"donate_argnums": range(first, count)}
            return jit_arrays(call, **options | own | numbers, donate_argnames=donated)

        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function on the mesh and returns its result, as `fn` would."""
        results, others = self._run(Jitted.__call__, args, kwargs)
        return eqx.combine(results, others.tree)

    def _run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `method` of the `Jitted` with arrays; constants and `fn`'s arrays go by keyword."""
        (args, kwargs), others = eqx.partition((args, kwargs), _is_traced)
        more = _Constants((self.constants, others)), self.arrays
        named = dict(**kwargs, **dict(zip(self._names, more, strict=True)))
        with warnings.catch_warnings():
            if self._is_quiet:
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return method(self._jitted(len(args), tuple(sorted(kwargs))), *args, **named)


def _on_arrays(constants: "_Constants", function: Any, *args: Any, **kwargs: Any) -> Any:
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
