"""Ops of a local program that know of other devices: this one's index, and collectives."""

from __future__ import annotations

from typing import Any

from spmd.ir.builder import Builder
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.mesh.sharding import Axes


def axis_index(b: Builder, axes: Axes) -> Value:
    """`spmd.axis_index`: this device's coordinate along some atoms, major to minor."""
    key = ("axis_index", axes)
    scalar = TensorType((), "i32")
    return b.once(key, lambda: b.op("spmd.axis_index", (), (scalar,), {"axes": axes})[0])


def collective(
    b: Builder, kind: str, x: Value, type_: TensorType, axes: Axes, **attrs: Any
) -> Value:
    """A collective over some atoms; replica groups are written out when the program is emitted."""
    return b.op(f"stablehlo.{kind}", (x,), (type_,), {"axes": axes, **attrs})[0]
