"""From a function and the arguments of a call to a `Request`, the input of the compiler."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api.arguments import (
    Argument,
    Parameters,
    arg_specs,
    donated_leaves,
    function_name,
    function_place,
    leaf_entries,
    leaf_names,
    like_parameters,
    mesh_sharding,
    parameter_count,
    parameter_names,
    parameters_of,
    placement,
    result_specs,
    updates_of,
)
from spmd.api.dispatch import settings
from spmd.api.marks import caller, path_name
from spmd.compiler import Request
from spmd.errors import ArgumentError, MeshError, described
from spmd.frontend.trace import seen_meshes, trace
from spmd.ir.types import Order
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import (
    as_mesh,
    has_devices,
    has_explicit_axes,
    jax_mesh,
    mesh_around,
    platform_of,
)
from spmd.mesh.topology import Topology
from spmd.options import Options


@dataclass(frozen=True)
class Recipe:
    """A function, and what `jit` was told about it: mesh, specs, static and donated arguments."""

    fn: Any
    mesh: Any
    in_specs: Any
    out_specs: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    keep_unused: bool  # this and `inline` matter where the function is traced into another
    inline: bool
    options: Options

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Returns a call's arguments that are not static: positional ones, then sorted keywords."""
        static, donated = (
            {n + len(args) if n < 0 else n for n in numbers}
            for numbers in (self.static_argnums, self.donate_argnums)
        )
        names = parameter_names(self.parameters, len(args))
        by_place = [
            Argument(i, i, names[i], arg, i in donated)
            for i, arg in enumerate(args)
            if i not in static
        ]
        if not kwargs:
            return tuple(by_place)
        every = parameter_names(self.parameters, parameter_count(self.parameters))
        places = {name: place for place, name in enumerate(every)}
        by_name = [
            Argument(name, places.get(name, name), name, arg, name in self.donate_argnames)
            for name, arg in sorted(kwargs.items(), key=itemgetter(0))
            if name not in self.static_argnames
        ]
        return (*by_place, *by_name)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters in the function's signature, in order; none if it has no signature."""
        return parameters_of(self.fn)

    @property
    def given_mesh(self) -> Any:
        """The mesh that `jit` was given, else that of its first `NamedSharding`, else None."""
        if self.mesh is not None:
            return self.mesh
        specs = jax.tree.leaves((self.in_specs, self.out_specs))
        return next((spec.mesh for spec in specs if isinstance(spec, NamedSharding)), None)


LeafType = tuple[tuple[int, ...], Any, bool, NamedSharding | None]
"""Shape, dtype, whether the dtype is weak (gives way to others), and the sharding if its mesh has
Explicit axes, else None."""


def type_of(leaf: Any, sharding: NamedSharding | None = None) -> LeafType:
    """Returns the type of an array, struct or number; TypeError for all else."""
    aval = getattr(leaf, "aval", None)  # an array's own; jax.typeof takes longer to find it
    if aval is None:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    if sharding is not None and not has_explicit_axes(sharding.mesh):
        sharding = None
    is_weak = bool(getattr(aval, "weak_type", False))
    return tuple(aval.shape), dtype, is_weak, sharding


def order_of(leaf: Any) -> Order | None:
    """Returns an array's order of dims in memory, as (1, 0); None: major to minor, or unknown."""
    if np.ndim(leaf) < 2 or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
        return None
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    order: Order = tuple(getattr(layout, "major_to_minor", ()))
    return None if order == tuple(sorted(order)) else order


class Call(NamedTuple):
    """One call's arguments: the static ones, and the leaves of all others with their types."""

    static: tuple[tuple[int | str, Any], ...]  # (number or name, value) of each static argument
    # leaves, types, orders: the others, flat, the type of each, and in which order its dims lie in
    # memory, if not major to minor
    leaves: tuple[Any, ...]
    types: tuple[LeafType, ...]
    orders: tuple[Order | None, ...]
    tree: Any  # the structure of ((positional, ...), {name: ...}), static ones left out
    settings: Any  # of jax, that decide how the function is traced

    @property
    def key(self) -> Any:
        """All that decides which compiled program runs the call, besides arguments' shardings."""
        return (self.static, self.tree, self.types, self.orders, self.settings)


class Interface(NamedTuple):
    """A traced call: the compiler's input, and the pytrees of its arguments and its result."""

    request: Request
    # args, out: pytrees of `ShapeDtypeStruct`s of ((positional, ...), {name: ...}), static
    # arguments left out, and of the result
    args: Any
    out: Any
    # jax's types of the mesh's axes, where they are not all Auto
    axis_types: tuple[Any, ...] | None
    name: str = ""
    # for each flat result its spec as the user or jax's types have it, or None; they may name axes
    # of size 1, which split nothing. None are known if empty
    out_specs: tuple[PartitionSpec | None, ...] = ()


def take_apart(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Splits a call's arguments into static ones and array leaves; ArgumentError for others."""
    given = recipe.arguments(args, kwargs)
    dynamic = {argument.key: argument.value for argument in given}
    every: dict[int | str, Any] = dict(enumerate(args)) | {
        key: kwargs[key] for key in sorted(kwargs)
    }
    static = tuple((key, value) for key, value in every.items() if key not in dynamic)
    positional = tuple(value for key, value in dynamic.items() if isinstance(key, int))
    named = {key: value for key, value in dynamic.items() if isinstance(key, str)}
    leaves, tree = jax.tree.flatten((positional, named))
    types = []
    orders: list[Order | None] = []
    for i, leaf in enumerate(leaves):
        is_own = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if hasattr(leaf, "__dlpack__") and not is_own:  # of another framework
            leaves[i] = jnp.from_dlpack(leaf)
        sharding = mesh_sharding(leaves[i])
        orders.append(None if sharding is None else order_of(leaves[i]))
        try:
            types.append(type_of(leaves[i], sharding))
        except TypeError as error:
            raise ArgumentError(
                f"argument {leaf_names(given)[i]} of type {type(leaf).__name__} is not an array",
                source=caller(),
                actual=described(leaf),
                fix="name it in static_argnums or static_argnames, or pass an array",
            ) from error
    if any(orders):
        # Only what is not donated keeps its order in memory: that of the rest is ours to choose.
        for i in donated_leaves(given):
            orders[i] = None
    return Call(static, tuple(leaves), tuple(types), tuple(orders), tree, settings())


def trace_call(recipe: Recipe, call: Call, topology: Topology | None) -> Interface:
    """Traces a function at the arguments of a call; nothing is compiled yet.

    It is to be planned for `topology`, else that of the options, else that of the mesh's devices.
    MeshError: there is no mesh, or two that differ; SpecError: a spec that does not fit.
    """
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak, sharding=sharding)
        for shape, dtype, is_weak, sharding in call.types
    ]
    structs = jax.tree.unflatten(call.tree, leaves)
    placed = [sharding.mesh for sharding in map(mesh_sharding, call.leaves) if sharding]
    around = mesh_around()
    mesh_given = recipe.given_mesh or next(iter(placed), None)
    known = None if mesh_given is None else as_mesh(mesh_given)
    platform = (topology.platform if topology else None) or platform_of(known)
    static, positional = dict(call.static), iter(structs[0])
    static_names = [name for name in static if isinstance(name, str)]
    static_numbers = [i for i in static if isinstance(i, int)]
    count = len(structs[0]) + len(static_numbers)
    args = [static[i] if i in static else next(positional) for i in range(count)]
    kwargs = structs[1] | {name: static[name] for name in static_names}
    with seen_meshes(known) as seen:
        traced = trace(
            _warning_of_changes(recipe.fn, structs),
            args,
            kwargs,
            platform=platform,
            static_argnums=static_numbers,
            static_argnames=static_names,
            on_callbacks=recipe.options.callbacks,
            mesh=known,
        )
    mesh_given = mesh_given or next(iter([*seen, *traced.manual, *traced.meshes]), around)
    if mesh_given is None:
        raise MeshError(
            f"spmd.jit of {function_name(recipe.fn)} has no mesh",
            source=caller(),
            actual="no mesh= was given, no argument is placed on a mesh, nothing is marked",
            fix="pass mesh=spmd.make_mesh(data=4, model=2), or call it under jax.set_mesh(mesh)",
        )
    mesh = as_mesh(mesh_given)
    # Collectives of `jax.shard_map` name devices by position: there is one order of devices.
    for own in (as_mesh(m) for m in traced.manual if isinstance(m, jax.sharding.Mesh)):
        if own.size == mesh.size and own.device_ids != mesh.device_ids:
            raise MeshError(
                "a jax.shard_map has the devices in another order than the program's mesh",
                actual=f"({own}) with device ids {list(own.device_ids)}",
                required=f"({mesh}) with device ids {list(mesh.device_ids)}",
                fix="pass the mesh of shard_map to spmd.jit(mesh=...)",
            )
    given = recipe.arguments(args, kwargs)
    names = leaf_names(given)
    specs = arg_specs(recipe.in_specs, given, recipe.parameters, count)
    own_entries = [
        leaf_entries(
            placement(leaf, mesh) if spec is None else spec, leaf, f"argument {name}", mesh
        )
        for leaf, spec, name in zip(call.leaves, specs, names, strict=True)
    ]
    entries, reasons = like_parameters(names, [s.shape for s in leaves], own_entries)
    results = jax.tree_util.tree_leaves_with_path(traced.out)
    result_names = tuple(path_name(path) or "result" for path, _ in results)
    out_specs = result_specs(recipe.out_specs, traced.out)
    out_entries = tuple(
        leaf_entries(spec, struct, f"result {name}", mesh)
        for (_, struct), spec, name in zip(results, out_specs, result_names, strict=True)
    )
    # A result's spec as jax would have it: the one given, else that of its type.
    found = (s.sharding if o is None else o for o, (_, s) in zip(out_specs, results, strict=True))
    stated = [getattr(spec, "spec", spec) for spec in found]
    request = Request(
        traced.module,
        mesh,
        topology or recipe.options.topology or topology_of(mesh),
        names,
        result_names,
        entries,
        out_entries,
        reasons,
        updates_of(given, traced.out),
        donated_leaves(given),
        call.orders,
        platform,
        function_place(recipe.fn),
        traced.callbacks,
    )
    return Interface(
        request,
        structs,
        traced.out,
        axis_types_of(mesh, [mesh_given, *placed, around]),
        function_name(recipe.fn),
        tuple(spec if isinstance(spec, PartitionSpec) else None for spec in stated),
    )


def _warning_of_changes(fn: Any, arguments: Any) -> Any:
    """Returns a wrapper of `fn` that warns if `fn` changes an argument, such as a module, in place.

    Arguments are copies when `fn` is traced: a change that is not returned is lost. Without objects
    among `arguments`, a pytree, it is `fn` itself: then jax finds a trace that it has made before,
    as by `jax.eval_shape`, and what a result holds beside arrays (an optimizer that `fn` makes) is
    the same object as there.
    """
    if jax.tree_util.all_leaves(jax.tree.leaves(arguments, is_leaf=_is_object)):
        return fn

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        objects = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_object)
        before = [jax.tree.leaves(value) for _, value in objects]
        results = fn(*args, **kwargs)
        returned = set(map(id, jax.tree.leaves(results)))
        for (path, value), had in zip(objects, before, strict=True):
            has = jax.tree.leaves(value)
            if len(has) < len(had) or {*map(id, has)} - {*map(id, had)} - returned:
                kind, (where, first, *rest) = type(value).__name__, path
                if where.idx == 0:  # among the positional ones
                    head = parameter_names(parameters_of(fn), first.idx + 1)[first.idx]
                else:
                    head = str(first.key)
                told = "/".join(filter(None, (head, path_name(rest))))
                warnings.warn(
                    f"{function_name(fn)} changes argument {told}, a {kind}, which is "
                    "lost when it returns: return it, or, for modules of flax.nnx, use "
                    "spmd.nnx.jit, which updates them in place",
                    stacklevel=2,
                )
        return results

    call.__name__ = function_name(fn)
    return call


def _is_object(value: Any) -> bool:
    """Whether a value is no tuple, list, dict or None: a leaf of a pytree, or say a module."""
    return type(value) not in (tuple, list, dict, type(None))


def axis_types_of(mesh: Mesh, givens: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns jax's axis types of the first mesh like `mesh` with Explicit axes, else None."""
    for given in filter(has_explicit_axes, givens):
        if tuple(given.shape.items()) == tuple(mesh.shape.items()):
            return tuple(given.axis_types)
    return None


def topology_of(mesh: Mesh) -> Topology:
    """Returns the topology of a mesh's devices, or one of CPUs if some are not visible here."""
    if has_devices(mesh):
        return Topology.for_devices(list(jax_mesh(mesh).devices.flat))
    return Topology(f"cpu:{mesh.size}")
