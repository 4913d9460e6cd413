"""A manifest's specs on the mesh at hand."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from serving.function import BundleError
from serving.manifest import OPEN, Entry, Leaf
from spmd.mesh.mesh import Mesh

Spec = tuple[Any, ...] | None
"""One entry for each dim, as `spmd.mark_sharding` takes it; None is left open as a whole."""


def spec_for(
    leaf: Leaf, specs: Mapping[str, tuple[Entry, ...]], mesh: Mesh, notes: list[str]
) -> Spec:
    """The spec of the first pattern that matches a leaf, for the parts of this mesh's axes.

    Programs are made for `mesh.refined()`, on which arrays may be split over a part of an axis. An
    axis that the mesh lacks counts as one of size 1. A dim that its axes do not divide is left
    open, and `notes` gets a sentence on that.

    Raises:
      BundleError: a spec that is longer than the leaf's rank.
    """
    pattern = next((p for p in specs if fnmatch.fnmatchcase(leaf.path, p)), None)
    if pattern is None:
        return None
    spec = specs[pattern]
    if len(spec) > len(leaf.shape):
        raise BundleError(
            f"the spec of {pattern!r} has {len(spec)} entries, and {leaf.path} has the shape "
            f"{list(leaf.shape)}"
        )
    spec = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    return tuple(_entry(entry, dim, leaf, mesh, notes) for dim, entry in enumerate(spec))


def _entry(entry: Entry, dim: int, leaf: Leaf, mesh: Mesh, notes: list[str]) -> Any:
    if entry == OPEN:
        return ...
    names = (entry,) if isinstance(entry, str) else entry or ()
    present = tuple(name for name in names if name in mesh.axis_names)
    extent = math.prod(mesh.shape[name] for name in present)
    if leaf.shape[dim] % extent:
        axes = " x ".join(f"{name}={mesh.shape[name]}" for name in present)
        notes.append(
            f"{leaf.path}: {axes} does not divide dim {dim} of size {leaf.shape[dim]}, which is "
            "left to the compiler"
        )
        return ...
    pieces = mesh.pieces()
    return tuple(piece for name in present for piece in pieces[name]) or None


def check_specs(specs: Mapping[str, Sequence[Entry]], leaves: Sequence[Leaf]) -> None:
    """Raise a `BundleError` for patterns that match nothing and specs that are no specs."""
    for pattern, spec in specs.items():
        matched = [leaf for leaf in leaves if fnmatch.fnmatchcase(leaf.path, pattern)]
        if not matched:
            shown = ", ".join(leaf.path for leaf in leaves[:5])
            raise BundleError(f"the spec {pattern!r} matches no leaf; there are {shown}, ...")
        long = next((leaf for leaf in matched if len(spec) > len(leaf.shape)), None)
        if long is not None:
            raise BundleError(
                f"the spec of {pattern!r} has {len(spec)} entries, and {long.path} has the shape "
                f"{list(long.shape)}"
            )
        names = [n for e in spec if e is not None for n in ((e,) if isinstance(e, str) else e)]
        axes = [name for name in names if name != OPEN]
        if len(set(axes)) != len(axes):
            raise BundleError(f"the spec of {pattern!r} names an axis twice: {list(spec)}")
