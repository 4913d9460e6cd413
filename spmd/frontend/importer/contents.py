"""A module's functions and meshes, and the marks and names of its arguments and results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from spmd.errors import FrontendError
from spmd.frontend.importer.attributes import (
    function_type,
    items_of,
    location_of,
    partitions_of,
    tensor_type,
)
from spmd.frontend.importer.meshes import End, Meshes
from spmd.frontend.importer.shardings import mesh_of
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh

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
