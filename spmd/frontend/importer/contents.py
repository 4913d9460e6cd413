"""A module's functions, its shardings on one mesh, and the names of its arguments and results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmd.errors import FrontendError, SpecError
from spmd.frontend.importer.attributes import (
    function_type,
    items_of,
    location_of,
    partitions_of,
    tensor_type,
)
from spmd.frontend.importer.shardings import (
    MARKS,
    NO_AXES,
    AxisRef,
    Stated,
    mesh_of,
    open_dims,
    shardings_of,
    stated,
)
from spmd.ir.types import ShardingAttr, TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.refinement import part_atoms
from spmd.mesh.sharding import Axes, axis_refs

_PATH_PART = re.compile(r"""\[\s*['"]?(.*?)['"]?\s*\]|([^\[\].]+)""")


class Contents:
    """The functions and meshes of a module, compiled for a mesh if that is known."""

    def __init__(self, module: Any, mesh: Mesh | None = None) -> None:
        self.functions: dict[str, Any] = {}
        meshes: dict[str, Mesh | None] = {}
        for item in module.body.operations:
            op = item.operation
            if op.name == "func.func":
                self.functions[op.attributes["sym_name"].value] = op
            elif op.name == "sdy.mesh":
                meshes[op.attributes["sym_name"].value] = mesh_of(op.attributes["mesh"])
        self.meshes = Meshes(meshes, partitions_of(module), mesh)

    def main(self) -> Any:
        """The function to compile; FrontendError if there is none, or several and no `main`."""
        main = self.functions.get("main")
        if main is None and len(self.functions) == 1:
            main = next(iter(self.functions.values()))
        if main is None or not main.regions[0].blocks:
            raise FrontendError(
                "the module has no function to compile",
                actual=f"functions: {', '.join(self.functions) or 'none'}",
                required="a public function `main`, or exactly one function",
            )
        return main


# ---------------------------------------------------------------------------------------------
# The boundary of a function.


def types_of(function: Any) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Types of the arguments and results."""
    inputs, results = function_type(function)
    return tuple(map(tensor_type, inputs)), tuple(map(tensor_type, results))


def ends_of(function: Any) -> tuple[list[End], list[End]]:
    """What is stated of each argument and each result."""
    args, results = types_of(function)
    return _ends(function, "arg_attrs", args), _ends(function, "res_attrs", results)


def _ends(function: Any, name: str, types: Sequence[TensorType]) -> list[End]:
    pairs = zip(_stated(function, name), types, strict=True)
    return [(stated, type_.rank) for stated, type_ in pairs]


def argument_paths(function: Any) -> list[str]:
    """Paths of the arguments, `params/w`, as far as their locations say so; else empty."""
    block = function.regions[0].blocks[0]
    return [path_of(location_of(arg.location)[0]) for arg in block.arguments]


def result_names(function: Any) -> tuple[str, ...]:
    """Names of the results as jax writes them, `['w']`, else `result0`, `result1`, ..."""
    return tuple(
        re.sub(r"^result", "", stated["jax.result_info"].value) or "result"
        if "jax.result_info" in stated
        else f"result{i}"
        for i, stated in enumerate(_stated(function, "res_attrs"))
    )


def path_of(name: str) -> str:
    """A pytree path as names joined by slashes: `params['w'][0].mu` -> `params/w/0/mu`."""
    return "/".join(a or b for a, b in _PATH_PART.findall(name))


def _stated(function: Any, name: str) -> list[dict[str, Any]]:
    """The attributes of each of a function's arguments or results."""
    inputs, results = function_type(function)
    if name not in function.attributes:
        return [{} for _ in (inputs if name == "arg_attrs" else results)]
    return [items_of(item) for item in function.attributes[name]]


# ---------------------------------------------------------------------------------------------
# Its shardings, on the mesh that it is compiled for.

End = tuple[Mapping[str, Any], int]  # of an argument or a result: its attributes, and its rank


class Meshes:
    """The meshes of a module by name, None for those of a single device.

    Its devices are positions among those (`partitions` many) that it is for. These are the devices
    of the mesh that the program is compiled for, in its order; left out, that is the first one it
    states.
    """

    def __init__(self, named: dict[str, Mesh | None], partitions: int, mesh: Mesh | None) -> None:
        self.named, self.partitions = named, partitions
        several = [found for found in named.values() if found and found.size > 1]
        self._mesh = Mesh(None, mesh.sizes, mesh.axis_names) if mesh else next(iter(several), None)
        self._is_of_one_device = partitions == 1 and not several
        self._known: dict[Any, ShardingAttr | None] = {}

    @property
    def mesh(self) -> Mesh:
        """The mesh that all shardings are written on; its devices are positions."""
        return self._mesh or NO_AXES

    def with_axes(self, names: Iterable[str]) -> Mesh:
        """The first mesh of the module that has all of some axes."""
        wanted = set(names)
        found = (mesh for mesh in self.named.values() if mesh and wanted <= set(mesh.axis_names))
        mesh = next(found, None if wanted else NO_AXES)
        if mesh is None and None in self.named.values():  # along the axes of a single device
            return Mesh(None, (1,) * len(wanted), sorted(wanted))
        if mesh is None:
            raise FrontendError(f"the module has no mesh with the axes {', '.join(sorted(wanted))}")
        return mesh

    def stated(self, attr: Any, rank: int) -> Stated | None:
        """A sharding on the mesh that it is stated on; None if it says nothing."""
        return stated(attr, self.named, rank)

    def atoms(self, other: Mesh, refs: Iterable[AxisRef]) -> Axes:
        """The atoms of `mesh` that axes and parts of axes of another mesh consist of."""
        if other.size == 1:
            return ()
        if self._mesh is None:
            self._mesh = other
        return tuple(a for ref in refs for a in part_atoms(self.mesh, other, *ref))

    def written(self, sharding: Stated) -> ShardingAttr:
        """A sharding on `mesh`; MeshError if its axes consist of no atoms of it."""
        if sharding.mesh == self.mesh or not any(sharding.dims):
            return ShardingAttr(sharding.dims, sharding.open)
        dims = [axis_refs(self.atoms(sharding.mesh, refs), self.mesh) for refs in sharding.dims]
        named = tuple(
            tuple((ref.name, ref.pre, 0 if ref.whole else ref.size) for ref in refs)
            for refs in dims
        )
        return ShardingAttr(named, sharding.open)

    def mark(self, attr: Any, rank: int, opened: Sequence[int] = ()) -> ShardingAttr | None:
        """What a sharding of a tensor marks on `mesh`, some dims being open besides; None: nothing.

        A value that is not added up yet is not marked: where a sum is finished is for the plan to
        decide.
        """
        key = (attr, rank, tuple(opened))
        if key not in self._known:
            found = self.stated(attr, rank)
            marked = None if found is None or found.unreduced else self.written(found)
            if marked and opened:
                also = (d in opened for d in range(rank))
                marked = marked._replace(open=tuple(map(max, marked.open, also)))
            self._known[key] = marked
        return self._known[key]

    def marks_of(self, op: Any, ranks: Sequence[int]) -> list[ShardingAttr | None]:
        """What an op's own attributes mark of each of its results."""
        name = next(name for name in MARKS if name in op.attributes)
        attrs = shardings_of(op.attributes[name])
        attrs = attrs * len(ranks) if len(attrs) == 1 else attrs
        opened = open_dims(op)
        return [self.mark(attr, rank, opened) for attr, rank in zip(attrs, ranks, strict=True)]

    def boundary_marks(self, ends: Sequence[End], what: str = "") -> list[ShardingAttr | None]:
        """What is marked of each argument, or of each result, of a function.

        `what` is `argument` or `result`, if they are those of the program: SpecError if one of
        these is stated as terms that are not added up.
        """
        found = []
        for i, (attrs, rank) in enumerate(ends):
            name = next((name for name in MARKS if name in attrs), None)
            attr = None if name is None else shardings_of(attrs[name])[0]
            stated = None if attr is None else self.stated(attr, rank)
            if what and stated is not None and stated.unreduced:
                raise _not_added_up(f"{what} {i}", stated)
            # jax says so of what is placed on a device: that it is whole says nothing of a mesh.
            is_placed = what and stated and stated.mesh == NO_AXES and self._is_of_one_device
            found.append(None if stated is None or is_placed else self.mark(attr, rank))
        return found


def _not_added_up(what: str, stated: Stated) -> SpecError:
    axes = ", ".join(name for name, _, _ in stated.unreduced)
    return SpecError(
        f"{what} is unreduced over {axes}: each device would have one term of it",
        required="arguments and results that are whole values",
        fix="leave `unreduced` out at the boundary, and reshard inside the program",
    )
