"""A function and the arguments of a call -> a request to the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from spmd.api.arguments import (
    Aval,
    arg_entries,
    argument_names,
    aval_of,
    function_name,
    function_place,
    key_dtype,
    like_parameters,
    mesh_sharding,
    parameter_names,
    updates_of,
)
from spmd.api.marks import path_name
from spmd.api.mistakes import check_concrete, no_mesh, not_an_array
from spmd.api.specs import arg_specs, out_entries
from spmd.errors import MeshError
from spmd.frontend.trace import seen_meshes, trace
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, has_devices, jax_mesh, platform_of
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.pipeline import Request


@dataclass(frozen=True)
class Recipe:
    """A function, and what `jit` was told about it.

    Attributes:
      fn: a function of pytrees of arrays.
      mesh: the mesh as it was given, or None.
      in_specs, out_specs: specs of arguments and results, as they were given.
      static_argnums, static_argnames, donate_argnums: as for `jax.jit`.
      options: compile options.
    """

    fn: Any
    mesh: Any
    in_specs: Any
    out_specs: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    options: Options


class Call(NamedTuple):
    """A call's arguments, taken apart.

    Attributes:
      static: (number or name, value) of each static argument.
      leaves: the others, flat.
      avals: the type of each leaf.
      tree: the structure of ((positional, ...), {name: ...}), static ones left out.
      positional: how many positional arguments there are, static ones counted.
    """

    static: tuple[tuple[int | str, Any], ...]
    leaves: tuple[Any, ...]
    avals: tuple[Aval, ...]
    tree: Any
    positional: int

    @property
    def key(self) -> Any:
        """What decides, besides shardings, whether a compiled program serves the call."""
        return (self.static, self.tree, self.avals)

    @property
    def argnums(self) -> tuple[int, ...]:
        """The numbers of the positional arguments that are not static."""
        static = dict(self.static)
        return tuple(i for i in range(self.positional) if i not in static)


class Traced(NamedTuple):
    """A function as a request, and what its arguments and results are to the caller.

    Attributes:
      request: what is to be compiled.
      in_tree: the structure of ((positional, ...), {name: ...}), static arguments left out.
      out_tree: the structure of the result.
      out_structs: its leaves.
      given_mesh: the mesh as the user gave it or placed arguments on it, if so.
      key_dtypes: for each flat argument its dtype if it is a key array.
      name: the function's, or none.
    """

    request: Request
    in_tree: Any
    out_tree: Any
    out_structs: tuple[Any, ...]
    given_mesh: Any
    key_dtypes: tuple[Any, ...]
    name: str = ""


def take_apart(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The arguments of a call, static and other ones.

    Raises:
      ArgumentError: one that is not static is not an array.
    """
    count = len(args)
    numbers = _positions(recipe.static_argnums, count)
    names = recipe.static_argnames
    static: list[tuple[int | str, Any]] = [(i, args[i]) for i in range(count) if i in numbers]
    static += [(name, kwargs[name]) for name in sorted(kwargs) if name in names]
    positional = tuple(arg for i, arg in enumerate(args) if i not in numbers)
    named = {name: arg for name, arg in kwargs.items() if name not in names}
    leaves, tree = jax.tree.flatten((positional, named))
    try:
        avals = tuple(map(aval_of, leaves))
    except TypeError as error:
        dynamic = [i for i in range(count) if i not in numbers]
        arg_names = argument_names(recipe.fn, (positional, named), dynamic)
        raise not_an_array(arg_names, leaves) from error
    return Call(tuple(static), tuple(leaves), avals, tree, count)


def trace_call(recipe: Recipe, call: Call, topology: Topology | None) -> Traced:
    """Traces a function at the arguments of a call; nothing is compiled yet.

    Args:
      recipe: the function.
      call: its arguments.
      topology: the machine to plan for; that of the options, else of the mesh, when left out.

    Raises:
      ArgumentError: a transformation of jax is around the call.
      MeshError: there is no mesh, or there are two.
      SpecError: a spec that does not fit its argument or result.
    """
    check_concrete(function_name(recipe.fn), call.leaves)
    structs = jax.tree.unflatten(
        call.tree, [jax.ShapeDtypeStruct(a[0], a[1], weak_type=a[2]) for a in call.avals]
    )
    placed = filter(None, map(mesh_sharding, call.leaves))
    given = recipe.mesh or next((sharding.mesh for sharding in placed), None)
    mesh = None if given is None else as_mesh(given)
    platform = (topology.platform if topology else None) or platform_of(mesh)
    module, out_tree, mesh = _trace(recipe, call, structs, mesh, platform)
    names = argument_names(recipe.fn, structs, call.argnums)
    heads = parameter_names(recipe.fn, call.positional)
    specs = arg_specs(recipe.in_specs, structs[0], call.argnums, heads)
    specs += [None] * (len(call.leaves) - len(specs))  # keyword arguments lie as they are placed
    given_entries = [
        arg_entries(leaf, spec, name, mesh)
        for leaf, spec, name in zip(call.leaves, specs, names, strict=True)
    ]
    entries, reasons = like_parameters(names, call.avals, given_entries)
    out_paths, out_def = jax.tree_util.tree_flatten_with_path(out_tree)
    result_names = tuple(path_name(path) or "result" for path, _ in out_paths)
    donate = _positions(recipe.donate_argnums, call.positional)
    numbers = jax.tree.leaves(jax.tree.broadcast(call.argnums, structs[0]))
    request = Request(
        module,
        mesh,
        topology or recipe.options.topology or topology_of(mesh),
        names,
        result_names,
        entries,
        out_entries(recipe.out_specs, out_tree, result_names, mesh),
        reasons,
        updates_of(structs[0], call.argnums, out_tree, donate),
        tuple(i for i, number in enumerate(numbers) if number in donate),
        platform,
        function_place(recipe.fn),
    )
    return Traced(
        request,
        call.tree,
        out_def,
        tuple(leaf for _, leaf in out_paths),
        given,
        tuple(map(key_dtype, call.leaves)),
        function_name(recipe.fn),
    )


def topology_of(mesh: Mesh) -> Topology:
    """The machine that a mesh is of; CPUs where its devices are not here."""
    if has_devices(mesh):
        return Topology.for_devices(list(jax_mesh(mesh).devices.flat))
    return Topology(f"cpu:{mesh.size}")


def _trace(
    recipe: Recipe, call: Call, structs: Any, mesh: Mesh | None, platform: str
) -> tuple[Any, Any, Mesh]:
    """The function as a module, structs of its results, and the mesh: given, or that of marks."""
    static, dynamic = dict(call.static), iter(structs[0])
    with seen_meshes() as seen:
        module, out_tree, manual_meshes = trace(
            recipe.fn,
            [static[i] if i in static else next(dynamic) for i in range(call.positional)],
            structs[1] | {name: value for name, value in call.static if isinstance(name, str)},
            platform=platform,
            static_argnums=recipe.static_argnums,
            static_argnames=recipe.static_argnames,
            mesh=mesh,
        )
    found = [mesh] if mesh is not None else seen
    found = found or [as_mesh(other) for other in manual_meshes]
    if not found:
        raise no_mesh(function_name(recipe.fn), recipe.in_specs)
    _check_device_order(manual_meshes, found[0])
    return module, out_tree, found[0]


def _check_device_order(manual_meshes: Sequence[Any], mesh: Mesh) -> None:
    """Collectives of `jax.shard_map` name devices by position: there is one order of devices."""
    for other in manual_meshes:
        if not isinstance(other, jax.sharding.Mesh):
            continue
        own = as_mesh(other)
        if own.size == mesh.size and own.device_ids != mesh.device_ids:
            raise MeshError(
                "a jax.shard_map has the devices in another order than the program's mesh",
                actual=f"({own}) with device ids {list(own.device_ids)}",
                required=f"({mesh}) with device ids {list(mesh.device_ids)}",
                fix="pass the mesh of shard_map to spmd.jit(mesh=...)",
            )


def _positions(argnums: Sequence[int], count: int) -> frozenset[int]:
    """Argument numbers, those from the end counted from the start."""
    return frozenset(n + count if n < 0 else n for n in argnums)
