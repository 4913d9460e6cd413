"""flax.nnx: `jit` compiles for a mesh functions that update modules in place, as `nnx.jit` does.

Needs flax (`pip install flax`). `nnx.split_context` takes modules apart into structure and arrays,
and `nnx.merge_context` makes modules of both; `spmd.jit` compiles a function of these arrays.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from spmd.api import Front, Jitted, Selected, with_keywords
from spmd.api import jit as jit_arrays
from spmd.errors import InstallError

try:
    from flax import nnx
except ImportError as error:
    raise InstallError(f"spmd.nnx needs flax: {error}", fix="pip install -U flax") from error

Place = int | str  # an argument's number, or its name if it was passed by name

_TAG = "spmd"
_RESULTS = "mark results inside: spmd.mark_sharding(result, mesh, spec)"
_NODES = (nnx.Module, nnx.Variable, nnx.Object)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function of nnx modules, optimizers, metrics and arrays for a mesh.

    The function may update its arguments in place: when the call returns, the caller's objects are
    updated. If it returns one of them, the call returns the caller's object.

    Args:
      fn: the function. Without it, a decorator is returned.
      **options: as for `spmd.jit`. Of a module the spec is one for all its arrays, a tree of specs
        like its `nnx.state`, or None. Results have no specs: mark them inside.

    Returns:
      A `ModuleJit`, which is called like `fn`.

    Raises:
      ArgumentError: `out_specs` or `out_shardings` is given.

    Example:
      >>> step = spmd.nnx.jit(train_step, mesh=mesh)
      >>> loss = step(model, optimizer, batch)
    """
    return functools.partial(jit, **options) if fn is None else ModuleJit(fn, options)


class ModuleJit(Front):
    """What `jit` returns: call it, or `lower` / `compile` it for given arguments.

    Reports name an array of a module by its path in `nnx.state`: `model/linear/kernel/value`.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(fn, options, ("out_specs", "out_shardings"), _RESULTS)
        self.fn = fn
        given = options.get("static_argnums"), options.get("static_argnames")
        self._static = numbers, names = Selected.of(fn, *given)
        call, (self._graph,) = with_keywords(self._on_arrays, fn, ["graph"])
        static = {"static_argnums": numbers, "static_argnames": (*names, self._graph)}
        self.jitted: Jitted[..., Any] = jit_arrays(call, **options | static)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function, updates modules among the arguments, returns its result."""
        with nnx.update_context(_TAG):
            args, kwargs = self._split(args, kwargs)
            definition, state, rest = self.jitted(*args, **kwargs)
            with nnx.merge_context(_TAG, inner=False) as context:
                _, nodes = context.merge(definition, state)
        return rest.joined(nodes)

    def _run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with nnx.update_context(_TAG):
            args, kwargs = self._split(args, kwargs)
            return method(self.jitted, *args, **kwargs)

    def _split(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the (args, kwargs) with which a call of the function calls `self.jitted`.

        Arguments that hold modules are nnx states there. One more keyword has the modules' graph.
        """
        static = self._static.keys(len(args))
        given: dict[Place, Any] = dict(enumerate(args)) | kwargs
        # A number beside modules is an array: nnx would make it a part of the graph.
        modules = {
            place: jax.tree.map(_as_array, value, is_leaf=_is_node)
            for place, value in given.items()
            if place not in static and any(map(_is_node, jax.tree.leaves(value, is_leaf=_is_node)))
        }
        with nnx.split_context(_TAG) as context:
            definition, state = context.split(list(modules.values()))
        given |= {place: state.get(i, {}) for i, place in enumerate(modules)}
        graph = {self._graph: _Graph(definition, tuple(modules))}
        by_name = dict(**{name: given[name] for name in kwargs}, **graph)
        return tuple(given[i] for i in range(len(args))), by_name

    def _on_arrays(self, graph: "_Graph", *args: Any, **kwargs: Any) -> Any:
        given: dict[Place, Any] = dict(enumerate(args)) | kwargs
        state = nnx.State({i: given[place] for i, place in enumerate(graph.places)})
        with nnx.merge_context(_TAG, inner=True) as context:
            modules = context.merge(graph.definition, state)
        given |= dict(zip(graph.places, modules, strict=True))
        results = self.fn(*[given[i] for i in range(len(args))], **{k: given[k] for k in kwargs})
        leaves, tree = jax.tree.flatten(results, is_leaf=_is_node)
        nodes = [leaf for leaf in leaves if _is_node(leaf)]
        rest = [None if _is_node(leaf) else leaf for leaf in leaves]
        with nnx.split_context(_TAG) as context:
            definition, state = context.split((list(modules), nodes))
        return definition, state, _Rest(rest, tree)


@dataclass(frozen=True)
class _Graph:
    """The structure of the modules in a call's arguments, and which arguments those are."""

    definition: Any  # nnx's `GraphDef` of the list of these arguments
    places: tuple[Place, ...]

    def __hash__(self) -> int:
        """Returns a hash of both fields, or of `places` alone if `definition` has no hash."""
        try:
            return hash((self.definition, self.places))
        except TypeError:
            return hash(self.places)


@jax.tree_util.register_dataclass
@dataclass
class _Rest:
    """A function's result: the structure of its pytree, and its leaves, None for nnx's nodes."""

    leaves: Sequence[Any]
    tree: Any = field(metadata={"static": True})

    def joined(self, nodes: Sequence[Any]) -> Any:
        found = iter(nodes)
        leaves = [next(found) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


def _is_node(value: Any) -> bool:
    return isinstance(value, _NODES)


def _as_array(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, bool | int | float | complex) else value
