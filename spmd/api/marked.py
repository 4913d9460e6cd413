"""A function with the marks that `jit` was told of, for programs that it becomes a part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from spmd.api.arguments import call_parts, fitting_entries, key_dtype
from spmd.api.marks import mark_sharding
from spmd.api.specs import arg_specs, out_entries, result_specs
from spmd.api.tracing import Recipe
from spmd.frontend.trace import note_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import OPEN, as_mesh, mesh_around


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
        names = [f"{i}" for i in range(len(leaves))]
        specs = result_specs(recipe.out_specs, results)
        entries = out_entries(specs, list(map(jax.typeof, leaves)), names, mesh)
        return jax.tree.unflatten(tree, map(_mark, leaves, entries, [mesh] * len(leaves)))

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
    marked_leaves = [
        leaf
        if spec is None
        else _mark(leaf, fitting_entries(spec, leaf.shape, leaf, "an argument", mesh), mesh)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    positional, named = jax.tree.unflatten(tree, marked_leaves)
    found = dict(zip(argnums, positional, strict=True))
    return tuple(found.get(i, arg) for i, arg in enumerate(args)), {**kwargs, **named}


def _mark(leaf: Any, entries: Any, mesh: Mesh) -> Any:
    if entries is None:
        return leaf
    entries = entries if key_dtype(leaf) is None else entries[:-1]  # its data has one dim more
    return mark_sharding(leaf, mesh, [OPEN if entry is None else entry for entry in entries])
