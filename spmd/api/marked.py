"""A function with the marks that `jit` was told of, for programs that it becomes a part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd.api.arguments import call_parts, check_memory, mesh_of
from spmd.api.marks import mark_sharding
from spmd.api.specs import arg_specs, result_specs
from spmd.api.tracing import Recipe
from spmd.frontend.trace import note_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, mesh_around


def marked(recipe: Recipe) -> Callable[..., Any]:
    """The function, and sharding constraints on what its specs say of arguments and results.

    Under `jax.jit` it is the marked program; inside another `spmd.jit` it is planned with what is
    around it. Static arguments come as they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = recipe.given_mesh
        if given is not None:
            note_mesh(as_mesh(given))
        else:
            given = mesh_around()
        if given is None or (recipe.in_specs is None and recipe.out_specs is None):
            return recipe.fn(*args, **kwargs)
        mesh = as_mesh(given)
        args, kwargs = _marked_arguments(recipe, args, kwargs, mesh)
        results = recipe.fn(*args, **kwargs)
        if recipe.out_specs is None:
            return results
        leaves, tree = jax.tree.flatten(results)
        specs = result_specs(recipe.out_specs, results)
        marks = [_mark(*each, mesh) for each in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(tree, marks)

    return call


def _marked_arguments(
    recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if recipe.in_specs is None:
        return args, kwargs
    static = recipe.static_of(len(args), kwargs)
    argnums = [i for i in range(len(args)) if i not in static]
    dynamic = tuple(args[i] for i in argnums), {k: v for k, v in kwargs.items() if k not in static}
    parts = call_parts(recipe.fn, dynamic, argnums, (), (), len(args))
    specs = arg_specs(recipe.in_specs, parts, recipe.fn, len(args))
    leaves, tree = jax.tree.flatten(dynamic)
    marked_leaves = [_mark(*each, mesh) for each in zip(leaves, specs, strict=True)]
    positional, named = jax.tree.unflatten(tree, marked_leaves)
    found = dict(zip(argnums, positional, strict=True))
    return tuple(found.get(i, arg) for i, arg in enumerate(args)), {**kwargs, **named}


def _mark(leaf: Any, spec: Any, mesh: Mesh) -> Any:
    """Marks a leaf with a spec on a mesh, or with a sharding on its own."""
    if spec is None:
        return leaf
    if isinstance(spec, NamedSharding):
        check_memory(spec, "an argument or result")
        return mark_sharding(leaf, mesh_of(spec, mesh), spec.spec)
    return mark_sharding(leaf, mesh, spec)
