"""Shardings as modules state them, by Shardy's attributes or in GSPMD's text, as plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from spmd.errors import FrontendError
from spmd.mesh.mesh import Mesh

AxisRef = tuple[str, int, int]
"""An axis, or the part of it of size `size` behind parts of the sizes `pre`: (name, pre, size).
Size 0 stands for the whole axis."""

MARKS = ("sdy.sharding", "mhlo.sharding")
"""Attributes that say how an op's results, an argument or a result are split."""

NO_AXES = Mesh(None, (), ())  # the mesh without axes: what is on it is not split


class Stated(NamedTuple):
    """A sharding as a module states it, on a mesh of its own."""

    mesh: Mesh  # the mesh; its device ids are positions among the devices that the module is for
    # for each dim, the axes and parts of axes that split it, major to minor
    dims: tuple[tuple[AxisRef, ...], ...]
    open: tuple[bool, ...]  # for each dim, whether it may be split further
    unreduced: tuple[AxisRef, ...] = ()  # axes over which the value is not added up yet


def mesh_of(attr: Any) -> Mesh | None:
    """The mesh of an `sdy.mesh`; None for that of a single device, which splits nothing."""
    mesh = sdy.MeshAttr(attr)
    axes = [sdy.MeshAxisAttr(x) for x in mesh.axes]
    ids = list(mesh.device_ids) or None
    found = Mesh(ids, [axis.size for axis in axes], [axis.name for axis in axes])
    return None if found.size == 1 and (axes or ids) else found


def shardings_of(attr: Any) -> list[Any]:
    """The shardings of several values: one for each, as Shardy's attribute or as GSPMD's text."""
    if isinstance(attr, ir.StringAttr):
        text: str = attr.value.strip()
        is_tuple = text.startswith("{{") or text == "{}"
        return _EACH.findall(text[1:-1]) if is_tuple else [text]
    if sdy.TensorShardingAttr.isinstance(attr):
        return [attr]
    return list(sdy.TensorShardingPerValueAttr(attr).shardings)


def is_marked(op: Any) -> bool:
    """Whether an op's own attributes say how its results are split."""
    attributes = op.attributes
    return len(attributes) > 0 and (MARKS[0] in attributes or MARKS[1] in attributes)


def open_dims(op: Any) -> tuple[int, ...]:
    """The dims that a custom call `Sharding` of GSPMD leaves open."""
    config = op.attributes.get("backend_config", None)
    text = config.value if isinstance(config, ir.StringAttr) else ""
    found = re.search(r"unspecified_dims=\[([\d,]*)\]", text)
    return tuple(_numbers(found[1])) if found else ()


def stated(attr: Any, meshes: Mapping[str, Mesh | None], rank: int) -> Stated | None:
    """A stated sharding as data, None of a single device; FrontendError if its mesh is unknown."""
    if isinstance(attr, str):
        return _tiled(attr, rank)
    sharding = sdy.TensorShardingAttr(attr)
    mesh = _mesh(sharding.mesh_or_ref, meshes)
    if mesh is None:
        return None
    dims, found = _dims(sharding), axes_of(sharding)
    # Axes that are said to be replicated split no open dim. Where these are all that is left, as on
    # jax's explicit axes, nothing is open.
    replicated = axis_refs(sharding.replicated_axes, sdy)
    named = {name for refs in (*found, replicated) for name, _, size in refs if not size}
    is_closed = bool(replicated) and all(n in named for n, size in mesh.shape.items() if size > 1)
    opened = tuple(not (dim.is_closed or is_closed) for dim in dims)
    return Stated(mesh, found, opened, axis_refs(sharding.unreduced_axes, sdy))


def axes_of(attr: Any) -> tuple[tuple[AxisRef, ...], ...]:
    """The axes that split each dim, by an `sdy.sharding`."""
    return tuple(axis_refs(dim.axes, sdy) for dim in _dims(sdy.TensorShardingAttr(attr)))


def _dims(sharding: Any) -> list[Any]:
    return [sdy.DimensionShardingAttr(dim) for dim in sharding.dimension_shardings]


def axis_refs(refs: Any, dialect: Any) -> tuple[AxisRef, ...]:
    """References to axes or to parts of them, by the classes of Shardy or of StableHLO."""
    found = []
    for ref in map(dialect.AxisRefAttr, refs):
        info = ref.sub_axis_info
        sub = None if info is None else dialect.SubAxisInfoAttr(info)
        found.append((ref.name, sub.pre_size if sub else 1, sub.size if sub else 0))
    return tuple(found)


def manual_axes(attr: Any) -> list[str]:
    """The names of the axes in `#sdy<manual_axes{"x", "y"}>`."""
    names = sdy.ManualAxesAttr(attr)
    return [names[i] for i in range(len(names))]


def _mesh(named: Any, meshes: Mapping[str, Mesh | None]) -> Mesh | None:
    """The mesh of a sharding, which names it or writes it out in place."""
    if not isinstance(named, ir.FlatSymbolRefAttr):
        return mesh_of(named)
    if named.value not in meshes:
        raise FrontendError(f"a sharding names the mesh @{named.value}, which the module lacks")
    return meshes[named.value]


# ---------------------------------------------------------------------------------------------
# GSPMD's text. `{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}` splits dim 0 in two, and
# dim 1 not; what is left, 4, is replicated. Which device has which tile is a list of them, or the
# devices in order, reshaped to 4x2, transposed, and reshaped to 2x1x4. That is a mesh with an axis
# for each dim.

_TILES = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|(?P<ids>[\d,]+))"
    r"(?: (?P<replicated>last_tile_dim_replicate)| last_tile_dims=\{(?P<kinds>[\w, ]*)\})?\}"
)
_NOT_TILED = re.compile(r"\{(replicated|manual|maximal device=\d+|unknown)?\}")
_EACH = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_NOTES = re.compile(r"\s*(?:metadata=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|shard_(?:as|like) \d+)")


def _tiled(text: str, rank: int) -> Stated | None:
    closed = (False,) * rank
    text = _NOTES.sub("", text)
    bare = _NOT_TILED.fullmatch(text)
    if bare is not None:
        return Stated(NO_AXES, ((),) * rank, closed) if bare[1] == "replicated" else None
    found = _TILES.fullmatch(text)
    if found is None:
        raise FrontendError(f"cannot read the sharding {text[:100]}")
    tiles, kinds = _numbers(found["tiles"]), _kinds(found)
    if math.prod(tiles) == 1 or "manual" in kinds:
        return None
    if len(tiles) - len(kinds) != rank:
        raise FrontendError(f"the sharding {text[:100]} is not of a tensor of rank {rank}")
    mesh = _tiles_mesh(found)
    names = mesh.axis_names
    dims = tuple(((names[d], 1, 0),) if tiles[d] > 1 else () for d in range(rank))
    unreduced = tuple((name, 1, 0) for name in names[rank:] if name.startswith("unreduced"))
    return Stated(mesh, dims, closed, unreduced)


def manual_refs(text: str) -> tuple[Mesh, tuple[AxisRef, ...]] | None:
    """The axes that GSPMD's text says are manual, on their mesh; None if all are."""
    found = _TILES.fullmatch(_NOTES.sub("", text))
    if found is None:
        return None
    mesh = _tiles_mesh(found)
    return mesh, tuple((name, 1, 0) for name in mesh.axis_names if name.startswith("manual"))


def _tiles_mesh(found: re.Match[str]) -> Mesh:
    tiles, kinds = _numbers(found["tiles"]), _kinds(found)
    names = [f"dim {d}" for d in range(len(tiles) - len(kinds))]
    names += [f"{kind} {i}" for i, kind in enumerate(kinds)]
    return Mesh(_devices(found), tiles, names)


def _devices(found: re.Match[str]) -> Any:
    if found["ids"]:
        return _numbers(found["ids"])
    shape = _numbers(found["shape"])
    order = _numbers(found["order"]) if found["order"] else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)


def _kinds(found: re.Match[str]) -> list[str]:
    """What the tile dims behind those of the tensor are: `replicated`, `manual`, ..."""
    return (
        found["kinds"].split(", ") if found["kinds"] else ["replicated"] * bool(found["replicated"])
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
