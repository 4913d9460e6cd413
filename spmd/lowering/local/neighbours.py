"""Fetches what an op reads of its neighbours' pieces, so that it can run on one device."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.dialect.halo import Need, Reads, Window, reads_of
from spmd.ir.program import Value
from spmd.lowering.local.dims import take_dim
from spmd.lowering.local.fetch import Split, fetch
from spmd.lowering.local.table import LocalOp
from spmd.mesh.sharding import Axes


class Dims:
    """Which dims of an op's first operand and result are split, and how."""

    def __init__(self, op: LocalOp) -> None:
        self.op = op
        self.operand = op.rule.operands[0]
        self.result = op.rule.results[0]

    def split(self, dim: int, kind: str, of_result: bool = True) -> Axes:
        """The atoms that split a dim, if it has one factor and that is of this kind; else ()."""
        factors = (self.result if of_result else self.operand)[dim]
        if len(factors) != 1 or self.op.rule.factors[factors[0]].kind != kind:
            return ()
        return self.op.choice.assignment[factors[0]]


def read(
    op: LocalOp, number: int, x: Value, dim: int, window: Window, axes: Axes, fill: Value | None
) -> tuple[Value, Reads]:
    """Fetches what tiles over `axes` read of an operand's dim, split like them or whole."""
    size = op.op.kind.operands[number].shape[dim]
    reads = reads_of(window, size, axes, op.mesh)
    return fetched(op, number, x, dim, axes, reads.need, fill), reads


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
    b = op.b
    size, source = op.op.kind.operands[number].shape[dim], op.choice.operands[number].dims[dim]
    with b.noted(note_of(op, number, dim)):
        return fetch(b, x, Split(dim, size, source, op.mesh), need, axes, fill)


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
    op: LocalOp, number: int, x: Value, dim: int, window: Window, axes: Axes, fill: Value | None
) -> _Base:
    """The base positions that tiles read, for an op that pads and dilates them itself.

    Where devices start at different phases (see `reads_of`), they are dilated here instead.
    """
    b = op.b
    x, reads = read(op, number, x, dim, window, axes, fill)
    dilation = window.dilation
    if reads.low is not None:
        filled = reads.low + (reads.need.length - 1) * dilation + 1
        return _Base(x, reads.low, reads.base - filled, dilation)
    scalar = fill if fill is not None else b.splat(0, b.types[x].with_shape(()))
    x = b.pad_dim(x, dim, 0, 0, scalar, dilation - 1)
    return _Base(take_dim(b, x, dim, axes, reads.skips, reads.base), 0, 0, 1)
