"""Ops of a local program along one dim: slices, padding, joining."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from spmd.ir.builder import Builder
from spmd.ir.program import Value
from spmd.lowering.device_ops import axis_index, collective
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size of one dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def slice_dim(b: Builder, x: Value, dim: int, start: int, limit: int) -> Value:
    """A static slice of one dim, nothing if it takes all."""
    type_ = b.types[x]
    if (start, limit) == (0, type_.shape[dim]):
        return x
    attrs = {
        "start_indices": resized((0,) * type_.rank, dim, start),
        "limit_indices": resized(type_.shape, dim, limit),
        "strides": (1,) * type_.rank,
    }
    result = type_.with_shape(resized(type_.shape, dim, limit - start))
    return b.op("stablehlo.slice", (x,), (result,), attrs)[0]


def take_dim(
    b: Builder, x: Value, dim: int, axes: Axes, starts: Sequence[int], length: int
) -> Value:
    """A slice of one dim that starts elsewhere on each tile's device, always in range."""
    if len(set(starts)) == 1:
        return slice_dim(b, x, dim, starts[0], starts[0] + length)
    return dynamic_take_dim(b, x, dim, per_device(b, axes, starts), length)


def dynamic_take_dim(b: Builder, x: Value, dim: int, start: Value, length: int) -> Value:
    """A slice of one dim from a start that must be in range."""
    shape = b.types[x].shape
    zero = b.constant(0, b.types[start].dtype)
    starts = [start if d == dim else zero for d in range(len(shape))]
    return b.dynamic_slice(x, starts, resized(shape, dim, length))


def pad_dim(
    b: Builder, x: Value, dim: int, low: int, high: int, fill: Value, interior: int = 0
) -> Value:
    """Pads one dim with a scalar, nothing if there is nothing to pad."""
    if (low, high, interior) == (0, 0, 0):
        return x
    type_ = b.types[x]
    none = (0,) * type_.rank
    attrs = {
        "edge_padding_low": resized(none, dim, low),
        "edge_padding_high": resized(none, dim, high),
        "interior_padding": resized(none, dim, interior),
    }
    size = type_.shape[dim]
    size += low + high + max(0, size - 1) * interior
    result = type_.with_shape(resized(type_.shape, dim, size))
    return b.op("stablehlo.pad", (x, fill), (result,), attrs)[0]


def concatenate(b: Builder, values: Sequence[Value], dim: int) -> Value:
    """Joins values along a dim."""
    if len(values) == 1:
        return values[0]
    type_ = b.types[values[0]]
    size = sum(b.types[v].shape[dim] for v in values)
    result = type_.with_shape(resized(type_.shape, dim, size))
    return b.op("stablehlo.concatenate", values, (result,), {"dimension": dim})[0]


def gather_dim(b: Builder, x: Value, dim: int, axes: Axes, mesh: Mesh) -> Value:
    """What all devices along some atoms have of a dim, one behind the other."""
    type_ = b.types[x]
    whole = type_.with_shape(resized(type_.shape, dim, type_.shape[dim] * mesh.extent(axes)))
    return collective(b, "all_gather", x, whole, axes, all_gather_dim=dim)


def per_device(b: Builder, axes: Axes, numbers: Sequence[int]) -> Value:
    """The number of this device's tile, an i32 scalar."""
    steps = {y - x for x, y in pairwise(numbers)}
    if steps <= {0}:
        return b.constant(numbers[0], "i32")
    if len(steps) == 1:
        scaled = b.binary("multiply", axis_index(b, axes), b.constant(steps.pop(), "i32"))
        return b.binary("add", scaled, b.constant(numbers[0], "i32"))
    table = b.constant(np.asarray(numbers), "i32")
    return b.reshape(dynamic_take_dim(b, table, 0, axis_index(b, axes), 1), ())
