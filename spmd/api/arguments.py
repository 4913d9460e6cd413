"""What a call's arguments are: types, keys, names, and where those that are placed already lie."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spmd.api.marks import caller, path_name
from spmd.errors import MeshError
from spmd.frontend.marks import Entries
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, dims_of, spec_entries

Aval = tuple[tuple[int, ...], Any, bool]
"""(shape, dtype, weak type) of an argument leaf."""


def aval_of(leaf: Any) -> Aval:
    """The type of an argument leaf.

    Raises:
      TypeError: it is not an array.
    """
    aval = getattr(leaf, "aval", None)  # an array's own; jax.typeof takes longer to find it
    if aval is None:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return (tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


# ---------------------------------------------------------------------------------------------
# Key arrays: inside, they are their data, which has one dim more.


def key_dtype(leaf: Any) -> Any:
    """The dtype of a key array (or of a struct of one), None for everything else."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    return None


# ---------------------------------------------------------------------------------------------
# Where arguments lie.


def mesh_sharding(leaf: Any) -> NamedSharding | None:
    """How an array, or a struct, was placed on a mesh; None if nobody has done so."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return sharding


def arg_entries(leaf: Any, spec: Any, name: str, mesh: Mesh) -> Entries | None:
    """An argument's spelled-out spec: given, or read off the array's own placement.

    Raises:
      MeshError: it is placed on another mesh.
      SpecError: a spec that does not fit it.
    """
    what = f"argument {name}"
    shape = leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
    if spec is None:
        placed = mesh_sharding(leaf)
        if placed is None:
            return None
        other = as_mesh(placed.mesh)
        if (other.axis_names, other.sizes) != (mesh.axis_names, mesh.sizes):
            if placed.is_fully_replicated:  # on another mesh, which says nothing of this one
                return None
            raise MeshError(
                "two different meshes in one program",
                source=caller(),
                actual=f"{what} is placed on the mesh ({other}) with spec {placed.spec}",
                required=f"the mesh that the program is compiled for ({mesh})",
                fix="mark all arguments on one mesh, and compile for it",
            )
        spec = placed.spec
    return fitting_entries(spec, shape, leaf, what, mesh)


def fitting_entries(spec: Any, shape: Sequence[int], leaf: Any, what: str, mesh: Mesh) -> Entries:
    """The spelled-out spec of an argument or result of this shape.

    Inside, a key array is its data: its spec has one more dim, not split.

    Raises:
      SpecError: it does not fit.
    """
    source = caller()
    entries = spec_entries(spec, len(shape), mesh, what=what, source=source)
    dims_of(entries, shape, mesh, what=what, source=source)
    return entries if key_dtype(leaf) is None else (*entries, ())


def like_parameters(
    names: Sequence[str], avals: Sequence[Any], entries: Sequence[Entries | None]
) -> tuple[tuple[Entries | None, ...], tuple[str | None, ...]]:
    """Open arguments that belong to a marked one get its spec; why goes beside it.

    Optimizer state repeats the parameters' tree further down: `opt_state/0/mu/w_in` has the shape
    of `params/w_in` and ends with its path. Propagation would find the same split for most of it,
    but would split the state of a parameter that is marked as not split.
    """
    paths = [tuple(name.split("/"))[1:] for name in names]
    marked: dict[tuple[tuple[str, ...], Any], int] = {}
    for i, path in enumerate(paths):
        if entries[i] is not None and path:
            marked.setdefault((path, avals[i][0]), i)
    filled = list(entries)
    reasons: list[str | None] = [None] * len(filled)
    for i, path in enumerate(paths):
        tails = ((path[k:], avals[i][0]) for k in range(1, len(path)))
        like = next((marked[tail] for tail in tails if tail in marked), None)
        if entries[i] is None and like is not None:
            filled[i] = entries[like]
            reasons[i] = f"like argument {names[like]}"
    return tuple(filled), tuple(reasons)


# ---------------------------------------------------------------------------------------------
# What arguments are to the function.


def function_name(fn: Any) -> str:
    """What a function is called; of an object that can be called, its class."""
    fn = _written(fn)
    return str(getattr(fn, "__name__", type(fn).__name__))


def function_place(fn: Any) -> tuple[str, str] | None:
    """File and qualified name of a function; None where it is not Python's own."""
    fn = _written(fn)
    call = fn if hasattr(fn, "__code__") else _written(type(fn).__call__)
    code = getattr(call, "__code__", None)
    return (code.co_filename, code.co_qualname) if code else None


def _written(fn: Any) -> Any:
    """The function that was written: without what is bound to it or wrapped around it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


def parameter_names(fn: Any, count: int) -> tuple[str, ...]:
    """The names of the positional arguments of a call; `arg2` where a function does not tell."""
    try:
        found = list(inspect.signature(fn).parameters)[:count]
    except (TypeError, ValueError):
        found = []
    return (*found, *(f"arg{number}" for number in range(len(found), count)))


def argument_names(fn: Any, structs: Any, argnums: Sequence[int]) -> tuple[str, ...]:
    """`params/w_in`: the parameter's name, then the path within the argument.

    Args:
      fn: the function.
      structs: its arguments without the static ones: positional ones, then a dict of the others.
      argnums: the number of each positional argument, static ones counted.
    """
    names = parameter_names(fn, max(argnums, default=-1) + 1)
    found = []
    for path, _ in jax.tree_util.tree_flatten_with_path(structs)[0]:
        kind, first, *rest = path
        if kind.idx == 0:
            head = names[argnums[first.idx]]
        else:
            head = str(first.key)
        found.append("/".join(filter(None, (head, path_name(rest)))))
    return tuple(found)


def updates_of(
    positional: Sequence[Any], argnums: Sequence[int], out_tree: Any, donated: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """(result leaf, argument leaf) of each donated argument and the result that updates it.

    That is the first result, not taken yet, of the same structure, shapes and dtypes.

    Args:
      positional: structs of the positional arguments without the static ones.
      argnums: their numbers, static ones counted.
      out_tree: structs of the results.
      donated: the numbers of donated arguments.
    """
    children = list(out_tree) if isinstance(out_tree, tuple | list) else [out_tree]
    starts = np.cumsum([0] + [len(jax.tree.leaves(c)) for c in children])
    free = {c: _tree_type(child) for c, child in enumerate(children)}
    links: list[tuple[int, int]] = []
    position = 0
    for number, struct in zip(argnums, positional, strict=True):
        count = len(jax.tree.leaves(struct))
        type_ = _tree_type(struct) if number in donated else None
        found = next((c for c, other in free.items() if other == type_), None)
        if found is not None:
            del free[found]
            links += [(int(starts[found]) + k, position + k) for k in range(count)]
        position += count
    return tuple(links)


def _tree_type(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
