"""Specs that were written without a mesh, on the mesh at hand."""

import math
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

OPEN = "..."
"""An entry that leaves a dim to the compiler, where specs are JSON; elsewhere it is `...`."""

Entry = str | tuple[str, ...] | EllipsisType | None
"""Of a dim: an axis, several of them, none, or open."""

Spec = tuple[Entry, ...]
"""One entry for each dim, as `spmd.mark_sharding` takes it."""


class Fitted(NamedTuple):
    """A spec for the axes that a mesh has."""

    spec: Spec  # an axis that the mesh lacks is not in it, nor one that does not divide its dim
    notes: tuple[str, ...]  # a sentence on each dim that its axes do not divide


def fitted(
    path: str,
    spec: Sequence[Entry],
    sizes: Sequence[int],
    mesh_shape: Mapping[str, int],
    otherwise: EllipsisType | None = ...,
) -> Fitted:
    """A spec on a mesh; an axis that the mesh lacks counts as one of size 1.

    Args:
        path: of the tensor, for notes.
        spec: an entry for each dim, or fewer: dims beyond it are not split.
        sizes: into how many equal parts each dim may be split at most: its size, mostly.
        mesh_shape: axis -> size.
        otherwise: the entry of dims that their axes do not divide: open, or not split.

    Example:
        >>> fitted("w", ("data", "model"), (8, 6), {"model": 3}).spec
        (None, 'model')
        >>> fitted("w", ("data", "model"), (8, 6), {"model": 4}).notes
        ('w: model=4 does not divide 6 (dim 1), which is left to the compiler',)
    """
    entries = [present(entry, mesh_shape) for entry in spec]
    entries += [None] * (len(sizes) - len(entries))
    misfits = [
        size % math.prod(mesh_shape[name] for name in axes_of(entry)) != 0
        for entry, size in zip(entries, sizes, strict=True)
    ]
    outcome = "stays whole" if otherwise is None else "is left to the compiler"
    return Fitted(
        tuple(otherwise if bad else entry for entry, bad in zip(entries, misfits, strict=True)),
        tuple(
            f"{path}: {_sizes(entries[dim], mesh_shape)} does not divide {sizes[dim]} (dim {dim}), "
            f"which {outcome}"
            for dim, bad in enumerate(misfits)
            if bad
        ),
    )


def _sizes(entry: Entry, mesh_shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={mesh_shape[name]}" for name in axes_of(entry))


def present(entry: Entry, mesh_shape: Mapping[str, int]) -> Entry:
    """An entry without the axes that a mesh lacks."""
    if entry in (..., OPEN):
        return ...
    names = tuple(name for name in axes_of(entry) if name in mesh_shape)
    return names if len(names) > 1 else (names[0] if names else None)


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The axes that an entry names."""
    if isinstance(entry, str):
        return () if entry == OPEN else (entry,)
    return entry if isinstance(entry, tuple) else ()
