"""Fetches what an op reads of its neighbours' pieces, so that it can run on one device."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.dialect.halo import Need, Window, reads_of
from spmd.ir.program import Value
from spmd.lowering.local.dims import take_dim
from spmd.lowering.local.fetch import fetch
from spmd.lowering.local.table import LocalOp
from spmd.mesh.sharding import Axes


def read_around(op: LocalOp, x: Value) -> Value:
    """The first operand, of which `x` has all that the tiles of the result read of each dim."""
    for d, (axes, window) in op.reads(0).items():
        need = reads_of(window, op.dim(0, d).size, axes, op.mesh).need
        x = fetched(op, 0, x, d, axes, need, None)
    return x


def fetched(
    op: LocalOp, number: int, x: Value, dim: int, axes: Axes, need: Need, fill: Value | None
) -> Value:
    """The elements that each device needs of an operand's dim, with `fill` where there are none.

    Args:
      op: the op that reads them.
      number: of the operand.
      x: its local value.
      dim: the dim.
      axes: what the tiles that read are split over.
      need: for each tile, the elements wanted.
      fill: a scalar; zero if left out.
    """
    with op.b.noted(note_of(op, number, dim)):
        return fetch(op.b, x, op.dim(number, dim), need, axes, fill)


def note_of(op: LocalOp, number: int, dim: int) -> str:
    """Why an op communicates, as a sentence."""
    return f"{op.op.label} reads its neighbours' pieces of dim {dim} of operand {number}"


class _Base(NamedTuple):
    """A fetched dim, with the padding and dilation that the op itself still has to add."""

    value: Value
    low: int
    high: int
    dilation: int


def base_of(
    op: LocalOp,
    number: int,
    x: Value,
    dim: int,
    axes: Axes,
    window: Window,
    fill: Value | None,
) -> _Base:
    """The base positions that tiles over `axes` read, for an op that pads and dilates them itself.

    Where devices start at different phases (see `reads_of`), they are dilated here instead.
    """
    b = op.b
    reads = reads_of(window, op.dim(number, dim).size, axes, op.mesh)
    x = fetched(op, number, x, dim, axes, reads.need, fill)
    dilation = window.dilation
    if reads.low is not None:
        filled = reads.low + (reads.need.length - 1) * dilation + 1
        return _Base(x, reads.low, reads.base - filled, dilation)
    scalar = fill if fill is not None else b.splat(0, b.types[x].with_shape(()))
    x = b.pad_dim(x, dim, 0, 0, scalar, dilation - 1)
    return _Base(take_dim(b, x, dim, axes, reads.skips, reads.base), 0, 0, 1)
