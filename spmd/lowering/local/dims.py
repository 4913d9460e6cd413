"""Helpers that slice, cut, pad and join the values of a local program along one dim.

A device's piece of a dim is its tile. Tiles of a dim that the devices do not divide end in padding,
whose content is undefined. What would read it (a sum over a padded dim, a contraction, a look-up
by position) masks it first. `spmd.mesh.sharding` says how tiles are cut.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spmd.ir.dialect.builder import Builder, resized
from spmd.ir.program import Value
from spmd.ir.types import numpy_dtype
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, is_even, piece_sizes


def take_dim(
    b: Builder, x: Value, dim: int, axes: Axes, starts: Sequence[int], length: int
) -> Value:
    """Slices `length` elements of a dim, from `starts[i]` (in range) on devices with tile `i`."""
    if len(set(starts)) == 1:
        return b.slice_dim(x, dim, starts[0], starts[0] + length)
    return dynamic_take_dim(b, x, dim, per_device(b, axes, starts), length)


def dynamic_take_dim(b: Builder, x: Value, dim: int, start: Value, length: int) -> Value:
    """Slices `length` elements of one dim from `start`, a scalar value; they must be in range."""
    shape = b.types[x].shape
    zero = b.constant(0, b.types[start].dtype)
    starts = [start if d == dim else zero for d in range(len(shape))]
    return b.dynamic_slice(x, starts, resized(shape, dim, length))


def clamped_index(b: Builder, index: Value, last: int) -> Value:
    """Clamps an index, a scalar value of any integer type, to the range from 0 to `last`."""
    dtype = b.types[index].dtype
    last = min(last, int(np.iinfo(numpy_dtype(dtype)).max))
    if last == 0:
        return b.constant(0, dtype)
    above = b.binary("maximum", index, b.constant(0, dtype))
    return b.binary("minimum", above, b.constant(last, dtype))


def gather_dim(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """All-gathers a dim over `axes`: the result has the devices' padded tiles in order."""
    whole = b.types[x].scaled(dim, mesh.extent(axes))
    return b.collective("all_gather", x, whole, axes, all_gather_dim=dim)


def per_device(b: Builder, axes: Axes, numbers: Sequence[int]) -> Value:
    """Returns an i32 scalar that is `numbers[i]` on devices with tile `i` over `axes`."""
    # Numbers that grow by equal steps are `first + step * index`; others are looked up in a table.
    steps = {y - x for x, y in pairwise(numbers)}
    if steps <= {0}:
        return b.constant(numbers[0], "i32")
    if len(steps) == 1:
        scaled = b.binary("multiply", b.axis_index(axes), b.constant(steps.pop(), "i32"))
        return b.binary("add", scaled, b.constant(numbers[0], "i32"))
    table = b.constant(np.asarray(numbers), "i32")
    return b.reshape(dynamic_take_dim(b, table, 0, b.axis_index(axes), 1), ())


def to_next(axes: Axes, mesh: Mesh, way: int) -> tuple[tuple[int, int], ...]:
    """Returns (from, to) pairs of a ring along `axes`: to the next device (way 1) or back (-1)."""
    rings = [group[::way] for group in mesh.groups(axes)]
    pairs = [(a, c) for group in rings for a, c in zip(group, (*group[1:], group[0]), strict=True)]
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


class Split(NamedTuple):
    """How a dim, of `size` elements in the global value, is split: in tiles over `axes`."""

    dim: int
    size: int
    axes: Axes
    mesh: Mesh

    @property
    def is_even(self) -> bool:
        """Whether no tile has padding."""
        return is_even(self.size, self.axes, self.mesh)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Sizes of pieces over 0, 1, 2, ... atoms: 10 over {2, 2} is (10, 5, 3); a tile is last."""
        return piece_sizes(self.size, self.axes, self.mesh)

    def join(self, b: Builder, x: Value) -> Value:
        """Undoes `cut`: drops the padding of the dim of `x` that consists of all tiles in order."""
        if self.is_even:
            return x
        dim, pieces, shape = self.dim, self.pieces, b.types[x].shape
        counts = [self.mesh.atom_sizes[a] for a in self.axes]
        x = b.reshape(x, (*shape[:dim], *counts, pieces[-1], *shape[dim + 1 :]))
        for level in reversed(range(len(counts))):
            at = dim + level
            inner = b.types[x].shape
            x = b.reshape(x, (*inner[:at], inner[at] * inner[at + 1], *inner[at + 2 :]))
            x = _resize(b, x, at, pieces[level])
        return x

    def start(self, b: Builder) -> Value:
        """Returns the global index of the first element of this device's tile, an i32 scalar."""

        def make() -> Value:
            if self.is_even:
                index = b.axis_index(self.axes)
                return b.binary("multiply", index, b.constant(self.pieces[-1], "i32"))
            start = b.constant(0, "i32")
            for a, piece in zip(self.axes, self.pieces[1:], strict=True):
                step = b.binary("multiply", b.axis_index((a,)), b.constant(piece, "i32"))
                start = b.binary("add", start, step)
            return start

        return b.once(("start", self.size, self.axes), make)

    def own_count(self, b: Builder) -> Value:
        """Returns how many elements of this device's tile are not padding, an i32 scalar."""

        # The pieces of `tile`, computed on the device. 5 over {2, 2} on the device at 1, 0:
        #   min(3, 5 - 1 * 3) = 2 of the first level's piece of 3; then min(2, 2 - 0 * 2) = 2
        def make() -> Value:
            own = b.constant(self.size, "i32")
            if self.is_even:
                return b.constant(self.pieces[-1], "i32")
            for a, size in zip(self.axes, self.pieces[1:], strict=True):
                piece = b.constant(size, "i32")
                before = b.binary("multiply", b.axis_index((a,)), piece)
                own = b.binary("minimum", piece, b.binary("subtract", own, before))
                own = b.binary("maximum", own, b.constant(0, "i32"))
            return own

        return b.once(("own", self.size, self.axes), make)


def cut(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """Pads an unsplit dim so that slices of one size are the tiles over `axes`, in order.

    before: 5 elements, to be split over {2, 2}
    after:  8 elements: 0 1 | 2 . | 3 4 | . .      (a dot is padding)
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
    """Slices this device's tile over `axes` out of a dim that each device has whole."""
    x = cut(b, x, dim, axes, mesh)
    return b.local_slice(x, b.types[x].scaled(dim, 1, mesh.extent(axes)), axes, dim)


def _resize(b: Builder, x: Value, dim: int, size: int) -> Value:
    have = b.types[x].shape[dim]
    if size <= have:
        return b.slice_dim(x, dim, 0, size)
    return b.pad_dim(x, dim, 0, size - have, b.splat(0, b.types[x].with_shape(())))
