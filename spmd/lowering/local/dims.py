"""Ops of a local program along one dim: slices, padding, joining."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from spmd.ir.dialect.builder import Builder, resized
from spmd.ir.program import Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes


def take_dim(
    b: Builder, x: Value, dim: int, axes: Axes, starts: Sequence[int], length: int
) -> Value:
    """A slice of one dim whose start differs from tile to tile; every start must be in range."""
    if len(set(starts)) == 1:
        return b.slice_dim(x, dim, starts[0], starts[0] + length)
    return dynamic_take_dim(b, x, dim, per_device(b, axes, starts), length)


def dynamic_take_dim(b: Builder, x: Value, dim: int, start: Value, length: int) -> Value:
    """A slice of one dim from a start that must be in range."""
    shape = b.types[x].shape
    zero = b.constant(0, b.types[start].dtype)
    starts = [start if d == dim else zero for d in range(len(shape))]
    return b.dynamic_slice(x, starts, resized(shape, dim, length))


def gather_dim(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """All-gathers a dim: the pieces of all devices along some atoms, in order."""
    whole = b.types[x].scaled(dim, mesh.extent(axes))
    return b.collective("all_gather", x, whole, axes, all_gather_dim=dim)


def per_device(b: Builder, axes: Axes, numbers: Sequence[int]) -> Value:
    """This device's entry of a list with one number for each tile, an i32 scalar."""
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
    """Who sends to whom, by target: each device to the next one along some atoms, or the last."""
    rings = [group[::way] for group in mesh.groups(axes)]
    pairs = [(a, c) for group in rings for a, c in zip(group, (*group[1:], group[0]), strict=True)]
    return tuple(sorted(pairs, key=lambda pair: pair[1]))
