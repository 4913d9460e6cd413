"""A manifest's specs on the mesh at hand."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from models.placement import OPEN, Entry, first_match, on_mesh
from serving.bundle.function import BundleError
from serving.bundle.manifest import Leaf
from spmd.mesh.mesh import Mesh

Spec = tuple[Any, ...] | None
"""One entry for each dim, as `spmd.mark_sharding` takes it; None is left open as a whole."""


def spec_for(
    leaf: Leaf, specs: Mapping[str, tuple[Entry, ...]], mesh: Mesh, notes: list[str]
) -> Spec:
    """The spec of the first pattern that matches a leaf: see `models.placement.on_mesh`.

    Raises:
      BundleError: a spec that is longer than the leaf's rank.
    """
    pattern = first_match(leaf.path, specs)
    if pattern is not None and len(specs[pattern]) > len(leaf.shape):
        raise BundleError(
            f"the spec of {pattern!r} has {len(specs[pattern])} entries, and {leaf.path} has the "
            f"shape {list(leaf.shape)}"
        )
    return on_mesh(leaf.path, leaf.shape, specs, mesh, notes)


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
