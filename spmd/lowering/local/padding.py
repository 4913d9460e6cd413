"""Dims that their axes don't divide: cutting them into equal pieces, joining them, masking.

A piece's padding has undefined content. Whoever could see it masks it first: a sum over a padded
dim, a contraction, a look-up by position. See `spmd.mesh.sharding` for how pieces are cut.
"""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, is_even, piece_sizes


class Split(NamedTuple):
    """A dim of `size` elements in all, of which each device has a tile over `axes`."""

    dim: int
    size: int
    axes: Axes
    mesh: Mesh

    @property
    def is_even(self) -> bool:
        """Whether all tiles are of one size, so that none has padding."""
        return is_even(self.size, self.axes, self.mesh)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The size of a piece at each level of the split; the last one is that of a tile."""
        return piece_sizes(self.size, self.axes, self.mesh)


def cut(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """Pads a dim so that equal slices of it are the pieces over `axes`, in order.

    before: 5 elements, to be cut over {2, 2}
    after:  8 elements: 0 1 | 2 . | 3 4 | . .
    """
    # One level after the other: 5 -> pad 6 -> (2, 3) -> pad (2, 4) -> (2, 2, 2) -> 8. Padding once
    # at the end would give 0 1 | 2 3 | 4 . | . ., which are not the pieces of `spmd.mesh.sharding`.
    size = b.types[x].shape[dim]
    if is_even(size, axes, mesh):
        return x
    pieces = piece_sizes(size, axes, mesh)
    for level, a in enumerate(axes):
        count, piece = mesh.atom_sizes[a], pieces[level + 1]
        x = _resize(b, x, dim + level, count * piece)
        shape = b.types[x].shape
        x = b.reshape(x, (*shape[: dim + level], count, piece, *shape[dim + level + 1 :]))
    shape = b.types[x].shape
    whole = mesh.extent(axes) * pieces[-1]
    return b.reshape(x, (*shape[:dim], whole, *shape[dim + len(axes) + 1 :]))


def own_piece(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """This device's piece over `axes` of a dim that it holds whole."""
    x = cut(b, x, dim, axes, mesh)
    return b.local_slice(x, b.types[x].scaled(dim, 1, mesh.extent(axes)), axes, dim)


def join(b: Builder, x: Value, split: Split) -> Value:
    """The inverse of `cut`: `x` has all pieces in order along the dim, with their padding."""
    if split.is_even:
        return x
    dim, pieces = split.dim, split.pieces
    shape = b.types[x].shape
    counts = [split.mesh.atom_sizes[a] for a in split.axes]
    x = b.reshape(x, (*shape[:dim], *counts, pieces[-1], *shape[dim + 1 :]))
    for level in reversed(range(len(counts))):
        at = dim + level
        inner = b.types[x].shape
        x = b.reshape(x, (*inner[:at], inner[at] * inner[at + 1], *inner[at + 2 :]))
        x = _resize(b, x, at, pieces[level])
    return x


def _resize(b: Builder, x: Value, dim: int, size: int) -> Value:
    """Pads a dim with zeros at its end, or cuts it there."""
    have = b.types[x].shape[dim]
    if size <= have:
        return b.slice_dim(x, dim, 0, size)
    zero = b.splat(0, b.types[x].with_shape(()))
    return b.pad_dim(x, dim, 0, size - have, zero)


def start_of(b: Builder, split: Split) -> Value:
    """Where this device's piece of a dim starts, an i32 scalar."""
    _, size, axes, _ = split
    pieces = split.pieces

    def make() -> Value:
        if split.is_even:
            return b.binary("multiply", b.axis_index(axes), b.constant(pieces[-1], "i32"))
        start = b.constant(0, "i32")
        for level, a in enumerate(axes):
            step = b.binary("multiply", b.axis_index((a,)), b.constant(pieces[level + 1], "i32"))
            start = b.binary("add", start, step)
        return start

    return b.once(("start", size, axes), make)


def own_count(b: Builder, split: Split) -> Value:
    """How many elements of this device's piece are not padding, an i32 scalar."""
    _, size, axes, _ = split
    pieces = split.pieces

    # The pieces of `tile`, computed on the device. 5 over {2, 2} on the device at 1, 0:
    #   min(3, 5 - 1 * 3) = 2 of the first level's piece of 3; then min(2, 2 - 0 * 2) = 2
    def make() -> Value:
        own = b.constant(size, "i32")
        if split.is_even:
            return b.constant(pieces[-1], "i32")
        for level, a in enumerate(axes):
            piece = b.constant(pieces[level + 1], "i32")
            before = b.binary("multiply", b.axis_index((a,)), piece)
            own = b.binary("minimum", piece, b.binary("subtract", own, before))
            own = b.binary("maximum", own, b.constant(0, "i32"))
        return own

    return b.once(("own", size, axes), make)
