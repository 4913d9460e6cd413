"""What a call's arguments are: types, keys, names, and where those that are placed already lie."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from spmd.api.marks import caller, path_name
from spmd.api.signature import parameter_count, parameter_names, positions
from spmd.errors import MeshError, SpecError
from spmd.frontend.marks import Entries
from spmd.ir.types import Order
from spmd.mesh.mesh import Mesh
from spmd.mesh.refinement import part_atoms
from spmd.mesh.sharding import axis_refs
from spmd.mesh.spec import as_mesh, dims_of, has_explicit_axes, spec_entries


class Aval(NamedTuple):
    """The type of an argument leaf: what a program is compiled for.

    Attributes:
      shape, dtype: of the array.
      weak_type: whether its dtype gives way to others, as that of a Python scalar does.
      sharding: how it is split, where jax has that in types: on a mesh with Explicit axes.
      order: in which order its dims lie in memory, if not major to minor.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    sharding: NamedSharding | None = None
    order: Order | None = None

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """A value of this type, for tracing."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=self.sharding
        )


def aval_of(leaf: Any) -> Aval:
    """The type of an argument leaf.

    Raises:
      TypeError: it is not an array.
    """
    aval = getattr(leaf, "aval", None)  # an array's own; jax.typeof takes longer to find it
    if aval is None:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    sharding = mesh_sharding(leaf)
    order = None if sharding is None else order_of(leaf)
    if sharding is not None and not has_explicit_axes(sharding.mesh):
        sharding = None
    is_weak = bool(getattr(aval, "weak_type", False))
    return Aval(tuple(aval.shape), dtype, is_weak, sharding, order)


def order_of(leaf: Any) -> Order | None:
    """In which order an array's dims (or a struct's) lie in memory; None if major to minor."""
    if np.ndim(leaf) < 2 or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
        return None
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    order: Order = tuple(getattr(layout, "major_to_minor", ()))
    return None if order == tuple(sorted(order)) else order


def as_array(leaf: Any) -> Any:
    """An argument leaf as jax takes it: a tensor of another framework is shared through DLPack."""
    if hasattr(leaf, "__dlpack__") and not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return jnp.from_dlpack(leaf)
    return leaf


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
    shape = leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
    if spec is None:
        spec = mesh_sharding(leaf)
        if spec is None or _says_nothing(spec, mesh):
            return open_entries(shape)
    return fitting_entries(spec, shape, leaf, f"argument {name}", mesh)


def open_entries(shape: Sequence[int]) -> Entries | None:
    """What is told of an argument or result without a spec: what has no elements is not split.

    XLA for CPUs crashes where such an array is split, in jax 0.11.
    """
    return ((),) * len(shape) if 0 in shape else None


def _says_nothing(placed: NamedSharding, mesh: Mesh) -> bool:
    """Whether an array is whole on each device of another mesh: nothing is said of this one."""
    other = as_mesh(placed.mesh)
    is_other = (other.axis_names, other.sizes) != (mesh.axis_names, mesh.sizes)
    return is_other and placed.is_fully_replicated


def fitting_entries(spec: Any, shape: Sequence[int], leaf: Any, what: str, mesh: Mesh) -> Entries:
    """The spelled-out spec of an argument or result of this shape.

    Inside, a key array is its data: its spec has one more dim, not split.

    Raises:
      MeshError: it is a sharding on a mesh whose axes are not made of this mesh's.
      SpecError: it does not fit.
    """
    source, own = caller(), mesh
    if isinstance(spec, NamedSharding):
        check_memory(spec, what)
        spec, own = spec.spec, mesh_of(spec, mesh)
    entries = spec_entries(spec, len(shape), own, what=what, source=source)
    try:
        if own is not mesh:
            entries = tuple(_axes_of(mesh, own, entry) for entry in entries)
    except MeshError as error:
        fields = {"actual": f"{what} lies on {error.actual}", "required": error.required}
        raise MeshError(error.what, source=source, fix=error.fix, **fields) from None
    dims_of(entries, shape, mesh, what=what, source=source)
    return entries if key_dtype(leaf) is None else (*entries, ())


def mesh_of(sharding: NamedSharding, mesh: Mesh) -> Mesh:
    """The mesh of a sharding: the one given if it is that; an AbstractMesh has its devices."""
    other = as_mesh(sharding.mesh)
    if isinstance(sharding.mesh, AbstractMesh) and other.size == mesh.size:
        other = Mesh(mesh.device_ids, other.sizes, other.axis_names)
    same = (other.axis_names, other.sizes, other.device_ids)
    return mesh if same == (mesh.axis_names, mesh.sizes, mesh.device_ids) else other


def _axes_of(mesh: Mesh, other: Mesh, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Axes of another mesh as axes of this one, or parts of axes."""
    if names is None:
        return None
    atoms = [a for name in names for a in part_atoms(mesh, other, name)]
    return tuple(str(ref) for ref in axis_refs(tuple(atoms), mesh))


def check_memory(sharding: NamedSharding, what: str) -> None:
    """Holds that a sharding is for the memory of the devices.

    Raises:
      SpecError: it is for another.
    """
    if sharding.memory_kind not in (None, "device", "unpinned_host"):
        raise SpecError(
            f"{what} is to lie in {sharding.memory_kind}",
            source=caller(),
            actual=str(sharding),
            required="arguments and results in the memory of the devices",
            fix="move it with jax.device_put before and after the call",
        )


def like_parameters(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], entries: Sequence[Entries | None]
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
            marked.setdefault((path, shapes[i]), i)
    filled = list(entries)
    reasons: list[str | None] = [None] * len(filled)
    for i, path in enumerate(paths):
        tails = ((path[k:], shapes[i]) for k in range(1, len(path)))
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


class Part(NamedTuple):
    """An argument that is not static.

    Attributes:
      place: the number of its parameter, or its name where the function does not have it in order.
      name: the parameter's name.
      struct: its pytree of structs.
      is_donated: whether the results may take its memory.
    """

    place: int | str
    name: str
    struct: Any
    is_donated: bool


def call_parts(
    fn: Any,
    structs: Any,
    argnums: Sequence[int],
    donate_argnums: Sequence[int],
    donate_argnames: Sequence[str],
    positional: int,
) -> tuple[Part, ...]:
    """The arguments of a call in the order of their leaves.

    Args:
      fn: the function.
      structs: its arguments without the static ones: positional ones, then a dict of the others.
      argnums: the number of each positional argument, static ones counted.
      donate_argnums, donate_argnames: which are donated.
      positional: how many positional arguments there are, static ones counted.
    """
    names, donated = parameter_names(fn, positional), positions(donate_argnums, positional)
    parts = [
        Part(number, names[number], struct, number in donated)
        for number, struct in zip(argnums, structs[0], strict=True)
    ]
    order = {name: place for place, name in enumerate(parameter_names(fn, parameter_count(fn)))}
    return (
        *parts,
        *(
            Part(order.get(name, name), name, structs[1][name], name in donate_argnames)
            for name in sorted(structs[1])  # as jax flattens a dict
        ),
    )


def donated_leaves(parts: Sequence[Part]) -> tuple[int, ...]:
    """Flat indices of the donated arguments."""
    flags = [part.is_donated for part in parts for _ in jax.tree.leaves(part.struct)]
    return tuple(i for i, is_donated in enumerate(flags) if is_donated)


def updates_of(parts: Sequence[Part], out_tree: Any) -> tuple[tuple[int, int], ...]:
    """(result leaf, argument leaf) of each donated argument and the result that updates it.

    That is the first part of the results, not taken yet, of the same structure, shapes and dtypes;
    for an argument that has none, of each of its leaves. As XLA reuses donated memory.

    Args:
      parts: the arguments.
      out_tree: structs of the results.
    """
    counts = [len(jax.tree.leaves(part.struct)) for part in parts]
    starts = np.cumsum([0, *counts]).tolist()
    places_of = zip(parts, starts, strict=False)
    donated = [(part.struct, position) for part, position in places_of if part.is_donated]
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
    """A tree and all parts of it, the outer ones first, each with the number of its first leaf."""
    level = [(tree, 0)]
    while level:
        yield from level
        inner = []
        for outer, start in level:
            for child in _children(outer):
                inner.append((child, start))
                start += len(jax.tree.leaves(child))
        level = inner


def _children(tree: Any) -> list[Any]:
    parts = jax.tree.leaves(tree, is_leaf=lambda part: part is not tree)
    return [part for part in parts if part is not tree]


def _tree_type(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
