"""From a function and the arguments of a call to a `Request`, the input of the compiler."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.ref import AbstractRef
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api.arguments import (
    Argument,
    Parameters,
    Selected,
    arg_specs,
    donated_leaves,
    function_name,
    function_place,
    is_in_host,
    leaf_entries,
    leaf_names,
    like_parameters,
    mesh_sharding,
    parameter_names,
    parameters_of,
    placement,
    result_specs,
    updates_of,
)
from spmd.api.dispatch import settings
from spmd.api.marks import argument_error, caller, mesh_error, path_name
from spmd.compiler import Request
from spmd.errors import described
from spmd.frontend.sizes import symbols_in
from spmd.frontend.trace import seen_meshes, trace
from spmd.ir.types import Order
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import (
    as_mesh,
    check_reduced,
    has_explicit_axes,
    mesh_around,
    numbered_as,
    platform_of,
)
from spmd.mesh.topology import Topology, as_topology
from spmd.options import Options

SHOWN = 4  # so many arguments of a call are told to other processes


@dataclass(frozen=True)
class Recipe:
    """A function, and what `jit` was told about it: mesh, specs, static and donated arguments."""

    fn: Any
    mesh: Any
    in_specs: Any
    out_specs: Any
    static: Selected
    donated: Selected
    keep_unused: bool  # this and `inline` matter where the function is traced into another
    inline: bool
    options: Options

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Returns a call's arguments that are not static: positional ones, then sorted keywords."""
        static, donated = self.static.keys(len(args)), self.donated.keys(len(args))
        names = parameter_names(self.parameters, len(args))
        return tuple(
            Argument(key, key if isinstance(key, str) else names[key], value, key in donated)
            for key, value in keyed(args, kwargs).items()
            if key not in static
        )

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


def type_of(leaf: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    """Returns the type of an array, struct or number; TypeError for all else.

    Its `sharding` is the given one if that is on a mesh with Explicit axes, as in jax, else None.
    """
    aval = getattr(leaf, "aval", None)  # an array's own; jax.typeof takes longer to find it
    if aval is None:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape,
        jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True),
        weak_type=bool(getattr(aval, "weak_type", False)),
        sharding=sharding if sharding is not None and has_explicit_axes(sharding.mesh) else None,
        is_ref=isinstance(aval, AbstractRef) or bool(getattr(aval, "is_ref", False)),
    )


def order_of(leaf: Any) -> Order | None:
    """Returns an array's dims as in memory, major first: (1, 0); None: in order, or unknown."""
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
    types: tuple[jax.ShapeDtypeStruct, ...]
    orders: tuple[Order | None, ...]
    tree: Any  # the structure of ((positional, ...), {name: ...}), static ones left out
    settings: Any  # of jax, that decide how the function is traced

    @property
    def key(self) -> Any:
        """All that decides which compiled program runs the call, besides arguments' shardings."""
        return (self.static, self.tree, self.types, self.orders, self.settings)

    def put_together(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the call's (args, kwargs), static ones too, with `leaves` for its own leaves."""
        positional, named = jax.tree.unflatten(self.tree, leaves)
        static, rest = dict(self.static), iter(positional)
        count = len(positional) + sum(isinstance(key, int) for key in static)
        by_name = {key: value for key, value in static.items() if isinstance(key, str)}
        return [static[i] if i in static else next(rest) for i in range(count)], named | by_name


def keyed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Returns a call's arguments in one dict: by number, then by name, sorted."""
    return {**dict(enumerate(args)), **dict(sorted(kwargs.items(), key=itemgetter(0)))}


def take_apart(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Splits a call into static arguments and array leaves; ArgumentError for any other leaf."""
    given = recipe.arguments(args, kwargs)
    dynamic = {argument.key: argument.value for argument in given}
    static = tuple(item for item in keyed(args, kwargs).items() if item[0] not in dynamic)
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
            raise argument_error(
                f"argument {leaf_names(given)[i]} of type {type(leaf).__name__} is not an array",
                actual=described(leaf),
                fix="name it in static_argnums or static_argnames, or pass an array",
            ) from error
    if any(orders):
        # Only what is not donated keeps its order in memory: that of the rest is ours to choose.
        for i in donated_leaves(given):
            orders[i] = None
    return Call(static, tuple(leaves), tuple(types), tuple(orders), tree, settings())


def kind_text(name: str, names: Sequence[str], leaves: Sequence[Any]) -> str:
    """Says what kind of call it is, to people: `step for params/w[16,4], x[8,16] and 3 more`."""
    pairs = zip(names[:SHOWN], leaves, strict=False)
    shown = [f"{name}[{','.join(map(str, np.shape(leaf)))}]" for name, leaf in pairs]
    more = f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else ""
    return f"{name} for {', '.join(shown) or 'nothing'}{more}"


def kind_of_call(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Says, as `kind_text` does, what a call with these arguments is: `step for x[8,16]`."""
    given = recipe.arguments(args, kwargs)
    leaves = jax.tree.leaves([argument.value for argument in given])
    return kind_text(function_name(recipe.fn), leaf_names(given), leaves)


def trace_call(recipe: Recipe, call: Call, topology: Topology | None) -> Request:
    """Returns the compiler's input for a call of a function, which is traced, not yet compiled.

    It is to be planned for `topology`, else that of the options, else that of the mesh's devices.
    MeshError: no mesh, or a `jax.shard_map` on other or reordered devices; SpecError: a spec that
    does not fit; ArgumentError: a symbolic dim.
    """
    leaves = call.types
    symbolic = [(i, d) for i, s in enumerate(leaves) for d in s.shape if is_symbolic_dim(d)]
    for i, dim in symbolic:
        symbols = {str(symbol): 8 for symbol in symbols_in([str(dim)])}
        raise argument_error(
            f"argument {i} of {function_name(recipe.fn)} has the symbolic dim {dim}",
            required="sizes that are known",
            fix="export it for any size, exported = jax.export.export(fn)(struct), and compile it "
            f"for one: spmd.compile_stablehlo(exported, mesh, symbols={symbols})",
        )
    structs = jax.tree.unflatten(call.tree, leaves)
    args, kwargs = call.put_together(leaves)
    placed = [sharding.mesh for sharding in map(mesh_sharding, call.leaves) if sharding]
    around = mesh_around()
    mesh_given = recipe.given_mesh or next(iter(placed), None)
    known = None if mesh_given is None else as_mesh(mesh_given)
    platform = (topology.platform if topology else None) or platform_of(known)
    with seen_meshes(known) as seen:
        traced = trace(
            _warning_of_changes(recipe, structs),
            args,
            kwargs,
            platform=platform,
            static_argnums=[key for key, _ in call.static if isinstance(key, int)],
            static_argnames=[key for key, _ in call.static if isinstance(key, str)],
            on_callbacks=recipe.options.callbacks,
        )
    mesh_given = mesh_given or next(iter([*seen, *traced.manual, *traced.meshes]), around)
    if mesh_given is None:
        raise mesh_error(
            f"spmd.jit of {function_name(recipe.fn)} has no mesh",
            actual="no mesh= was given, no argument is placed on a mesh, nothing is marked",
            fix=f"pass mesh=spmd.make_mesh(data={jax.device_count()}), or call it under "
            f"jax.set_mesh(jax.make_mesh(({jax.device_count()},), ('data',)))",
        )
    mesh = as_mesh(mesh_given)
    if mesh.topology and known is None:  # so it was traced for the devices that are here
        return trace_call(replace(recipe, mesh=mesh), call, topology)
    # Collectives of `jax.shard_map` name devices by position: there is one order of devices.
    for own in (numbered_as(m, mesh) for m in traced.manual):
        if own.size == mesh.size and own.device_ids != mesh.device_ids:
            raise mesh_error(
                "a jax.shard_map has the devices in another order than the program's mesh",
                actual=f"({own}) with device ids {list(own.device_ids)}",
                required=f"({mesh}) with device ids {list(mesh.device_ids)}",
                fix="pass the mesh of shard_map to spmd.jit(mesh=...)",
            )
    given = recipe.arguments(args, kwargs)
    closed = traced.refs
    taken, orders = (*call.leaves, *closed), (*call.orders, *(None for _ in closed))
    names = (*leaf_names(given), *(f"closed_over_ref{i}" for i, _ in enumerate(closed)))
    specs = arg_specs(recipe.in_specs, given, recipe.parameters, len(args)) + [None] * len(closed)
    specs = [
        placement(leaf, mesh) if spec is None else spec
        for leaf, spec in zip(taken, specs, strict=True)
    ]
    hosts = [i for i, spec in enumerate(specs) if is_in_host(spec)]
    every = {PartitionSpec.UNCONSTRAINED}  # dim is open
    specs = [None if is_in_host(s) and {*s.spec.partitions} == every else s for s in specs]
    own_entries = [
        leaf_entries(spec, leaf, f"argument {name}", mesh)
        for leaf, spec, name in zip(taken, specs, names, strict=True)
    ]
    entries, reasons = like_parameters(names, list(map(np.shape, taken)), own_entries)
    results = jax.tree_util.tree_leaves_with_path(traced.out)
    result_names = tuple(path_name(path) or "result" for path, _ in results)
    whats = [f"result {path_name(path)}" if path else "the result" for path, _ in results]
    out_specs = result_specs(recipe.out_specs, traced.out)
    out_entries = tuple(
        leaf_entries(spec, struct, what, mesh)
        for (_, struct), spec, what in zip(results, out_specs, whats, strict=True)
    )
    # A result's spec as jax would have it: the one given, else that of its type.
    found = (s.sharding if o is None else o for o, (_, s) in zip(out_specs, results, strict=True))
    stated = [getattr(spec, "spec", spec) for spec in found]
    for spec, what in zip(stated, whats, strict=True):
        check_reduced(getattr(spec, "unreduced", ()), what, caller())
    # What a ref holds next takes the memory of what it held, and lies as that did.
    refs = [i for i, leaf in enumerate(taken) if type_of(leaf).is_ref]
    links = {r: a for r, a in updates_of(given, traced.out) if a not in refs}
    links |= {len(results) + k: i for k, i in enumerate(refs)}
    return Request(
        module=traced.module,
        mesh=mesh,
        topology=topology or recipe.options.topology or topology_of(mesh),
        arg_names=names,
        result_names=(*result_names, *(names[i] for i in refs)),
        arg_entries=entries,
        result_entries=(*out_entries, *(entries[i] for i in refs)),
        arg_reasons=reasons,
        links=tuple(links.items()),
        donated=tuple(sorted({*donated_leaves(given), *refs})),
        arg_hosts=tuple(hosts),
        result_hosts=tuple(
            i
            for i, spec in enumerate(out_specs)
            if is_in_host(spec) or (spec is None and links.get(i) in hosts)
        ),
        arg_orders=orders,
        platform=platform,
        function=function_place(recipe.fn),
        callbacks=traced.callbacks,
        name=function_name(recipe.fn),
        args=structs,
        out=traced.out,
        axis_types=axis_types_of(mesh, [mesh_given, *placed, around]),
        out_specs=tuple(s if isinstance(s, PartitionSpec) else None for s in (*stated, *refs)),
        closed_refs=closed,
    )


def _warning_of_changes(recipe: Recipe, arguments: Any) -> Any:
    """Returns the function so that it warns of an argument, such as a module, changed in place.

    Arguments are copies when it is traced: a change that is not returned is lost. Without objects
    among `arguments`, a pytree, it is the function itself: then jax finds a trace that it has made
    before, as by `jax.eval_shape`, and what a result holds beside arrays (an optimizer that it
    makes) is the same object as there.
    """
    fn = recipe.fn
    if jax.tree_util.all_leaves(jax.tree.leaves(arguments, is_leaf=_is_object)):
        return fn

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {argument.name: argument.value for argument in recipe.arguments(args, kwargs)}
        objects = jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_object)
        before = [jax.tree.leaves(value) for _, value in objects]
        results = fn(*args, **kwargs)
        returned = set(map(id, jax.tree.leaves(results)))
        for (path, value), had in zip(objects, before, strict=True):
            has = jax.tree.leaves(value)
            if len(has) < len(had) or {*map(id, has)} - {*map(id, had)} - returned:
                warnings.warn(
                    f"{function_name(fn)} changes argument {path_name(path)}, a "
                    f"{type(value).__name__}, which is lost when it returns: return it, or, for "
                    "modules of flax.nnx, use spmd.nnx.jit, which updates them in place",
                    stacklevel=2,
                )
        return results

    call.__name__ = function_name(fn)
    return call


def _is_object(value: Any) -> bool:
    """Whether a value is no tuple, list, dict or None: a leaf of a pytree, or say a module."""
    return type(value) not in (tuple, list, dict, type(None))


def axis_types_of(mesh: Mesh, givens: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns jax's axis types of the first of `givens` like `mesh` with Explicit axes, or None."""
    shape = tuple(mesh.shape.items())
    alike = (m for m in filter(has_explicit_axes, givens) if tuple(m.shape.items()) == shape)
    return next((tuple(given.axis_types) for given in alike), None)


def topology_of(mesh: Mesh) -> Topology:
    """Returns a mesh's topology, else that of its devices, or of CPUs if they are not here."""
    if mesh.is_here and mesh.topology is None:
        return Topology.for_devices(list(mesh.devices.flat))
    return as_topology(mesh.topology or f"cpu:{mesh.size}")
