"""A module's functions and meshes, and the marks and names of its arguments and results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import FrontendError
from spmd.frontend.importer.attributes import (
    function_type,
    items_of,
    location_of,
    mesh_axes,
    mesh_of_sharding,
    partitions_of,
    sharding_attr,
    tensor_type,
)
from spmd.ir.types import ShardingAttr, TensorType
from spmd.mesh.mesh import Mesh

MeshAxes = tuple[tuple[str, int], ...]
"""A mesh as ((axis, size), ...)."""

_PATH_PART = re.compile(r"""\[\s*['"]?(.*?)['"]?\s*\]|([^\[\].]+)""")


class Contents:
    """The functions and meshes of a module.

    Attributes:
      functions: name -> function.
      meshes: name of a mesh, or its text where it is written out in place -> its axes.
      partitions: the number of devices that the module is for.
    """

    def __init__(self, module: Any) -> None:
        self.functions: dict[str, Any] = {}
        self.meshes: dict[str, MeshAxes] = {}
        self.partitions = partitions_of(module)
        for item in module.body.operations:
            op = item.operation
            if op.name == "func.func":
                self.functions[op.attributes["sym_name"].value] = op
            elif op.name == "sdy.mesh":
                self.meshes[op.attributes["sym_name"].value] = mesh_axes(op.attributes["mesh"])

    def main(self) -> Any:
        """The function to compile.

        Raises:
          FrontendError: there is none, or several and none is `main`.
        """
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

    # Meshes.

    def note_mesh(self, sharding: Any) -> None:
        """Remembers the mesh of a sharding that writes it out instead of naming it."""
        mesh = mesh_of_sharding(sharding)
        if str(mesh).startswith("#sdy.mesh"):
            self.meshes[str(mesh)] = mesh_axes(mesh)

    def mesh_of(self, shardings: Sequence[Any]) -> Mesh | None:
        """The mesh that the first of some shardings names; without any, the only one."""
        for attr in shardings:
            self.note_mesh(attr)
        if shardings:
            name = str(mesh_of_sharding(shardings[0]))
            return _mesh(self.meshes.get(name) or self.meshes[name.lstrip("@").strip('"')])
        return _mesh(next(iter(self.meshes.values()))) if len(self.meshes) == 1 else None

    def all_meshes(self) -> dict[str, Mesh]:
        """Every mesh noted so far, by name."""
        return {name: _mesh(axes) for name, axes in self.meshes.items()}


def _mesh(axes: MeshAxes) -> Mesh:
    return Mesh(None, [size for _, size in axes], [name for name, _ in axes])


# ---------------------------------------------------------------------------------------------
# The boundary of a function.


def types_of(function: Any) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Types of the arguments and results."""
    inputs, results = function_type(function)
    return tuple(map(tensor_type, inputs)), tuple(map(tensor_type, results))


def boundary_marks(
    function: Any,
) -> tuple[tuple[ShardingAttr | None, ...], tuple[ShardingAttr | None, ...]]:
    """`sdy.sharding` of each argument and result, or None."""
    args, results = (_stated(function, name) for name in ("arg_attrs", "res_attrs"))
    return tuple(map(_mark, args)), tuple(map(_mark, results))


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


def _mark(stated: Mapping[str, Any]) -> ShardingAttr | None:
    return sharding_attr(stated["sdy.sharding"]) if "sdy.sharding" in stated else None
