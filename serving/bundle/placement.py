"""A manifest's specs on the mesh at hand."""

from collections.abc import Mapping, Sequence

from spmd.errors import SpecError
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import first_match, match_patterns
from spmd.models.placement import Entry, Fitted, axes_of, fitted
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import LeafEntry

Specs = Mapping[str, Sequence[Entry]]


def spec_for(leaf: LeafEntry, specs: Specs, mesh: Mesh) -> Fitted | None:
    """The spec of the first pattern that matches a leaf, for `mesh.refined()`; None if none does.

    Programs are made for that mesh, on which arrays may be split over a part of an axis.

    Raises:
      BundleError: a spec that is longer than the leaf's rank.
    """
    pattern = first_match(leaf.path, specs)
    if pattern is None:
        return None
    _check_rank(pattern, leaf, specs)
    spec, notes = fitted(leaf.path, specs[pattern], leaf.shape, mesh.shape)
    pieces = mesh.pieces()
    parts = (tuple(p for name in axes_of(entry) for p in pieces[name]) for entry in spec)
    refined = (... if e is ... else found or None for e, found in zip(spec, parts, strict=True))
    return Fitted(tuple(refined), notes)


def check_specs(specs: Specs, leaves: Sequence[LeafEntry]) -> None:
    """Raise a `BundleError` for patterns that match nothing and specs that are no specs."""
    try:
        match_patterns(specs, [leaf.path for leaf in leaves], what="leaf")
    except SpecError as error:
        raise BundleError(f"the spec {one_line(error)}") from error
    for pattern, spec in specs.items():
        for leaf in leaves:
            if first_match(leaf.path, (pattern,)):
                _check_rank(pattern, leaf, specs)
        axes = [name for entry in spec for name in axes_of(entry)]
        if len(set(axes)) != len(axes):
            raise BundleError(f"the spec of {pattern!r} names an axis twice: {list(spec)}")


def _check_rank(pattern: str, leaf: LeafEntry, specs: Specs) -> None:
    if len(specs[pattern]) > len(leaf.shape):
        raise BundleError(
            f"the spec of {pattern!r} has {len(specs[pattern])} entries, and {leaf.path} has the "
            f"shape {list(leaf.shape)}"
        )
