"""Specs that were written without a mesh, on the mesh at hand."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import spmd

OPEN = "..."
"""An entry that leaves a dim to the compiler."""

Entry = str | tuple[str, ...] | None
"""Of a dim: an axis, several of them, none, or `OPEN`."""


def first_match(path: str, specs: Mapping[str, Sequence[Entry]]) -> str | None:
    """The first pattern that matches a path."""
    return next((pattern for pattern in specs if fnmatch.fnmatchcase(path, pattern)), None)


def on_mesh(
    path: str,
    shape: Sequence[int],
    specs: Mapping[str, Sequence[Entry]],
    mesh: spmd.Mesh,
    notes: list[str],
) -> tuple[Any, ...] | None:
    """The spec of the first pattern that matches a path, for the parts of this mesh's axes.

    Programs are made for `mesh.refined()`, on which arrays may be split over a part of an axis. An
    axis that the mesh lacks counts as one of size 1. A dim that its axes do not divide is left
    open, and `notes` gets a sentence on that.

    Args:
      path, shape: of an array.
      specs: pattern -> entries, not more than the array's rank; missing ones are None.
      mesh: as it is, not refined.
      notes: gets sentences.

    Returns:
      One entry for each dim, as `spmd.mark_sharding` takes it; None if no pattern matches.
    """
    pattern = first_match(path, specs)
    if pattern is None:
        return None
    spec = (*specs[pattern], *(None,) * (len(shape) - len(specs[pattern])))
    return tuple(
        _entry(entry, dim, path, shape[dim], mesh, notes) for dim, entry in enumerate(spec)
    )


def _entry(entry: Entry, dim: int, path: str, size: int, mesh: spmd.Mesh, notes: list[str]) -> Any:
    if entry == OPEN:
        return ...
    names = (entry,) if isinstance(entry, str) else entry or ()
    present = tuple(name for name in names if name in mesh.axis_names)
    if size % math.prod(mesh.shape[name] for name in present):
        axes = " x ".join(f"{name}={mesh.shape[name]}" for name in present)
        notes.append(
            f"{path}: {axes} does not divide dim {dim} of size {size}, which is left to the "
            "compiler"
        )
        return ...
    pieces = mesh.pieces()
    return tuple(piece for name in present for piece in pieces[name]) or None
