"""Ops that can change places with a collective along one dim, and how they and the dim change.

A convert, a transpose or a reshape of a gathered value is the gathered value of a convert, a
transpose or a reshape; a slice of an elementwise op is the op of slices. All that changes is the
size of one dim, which `operand_dim` follows from the result to the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.ir.description import CONVERT, RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType


def is_move(kind: OpKind) -> bool:
    """Whether an op moves the elements of its one operand around, or changes their type."""
    return kind.name in (CONVERT, TRANSPOSE, RESHAPE)


def is_elementwise(kind: OpKind) -> bool:
    """Whether an element of the one result depends on the same elements of the operands alone."""
    return kind.about.is_elementwise and len(kind.results) == 1


def operand_dim(kind: OpKind, dim: int) -> int | None:
    """The operands' dim that is cut (or joined) where the result's dim is; None if none is."""
    if kind.name == TRANSPOSE:
        found: int = kind.attrs["permutation"][dim]
        return found
    if kind.name == RESHAPE:
        return _same_place(kind.results[0].shape, dim, kind.operands[0].shape)
    return dim if is_elementwise(kind) else None


def _same_place(shape: Sequence[int], dim: int, other: Sequence[int]) -> int | None:
    """The dim of `other`, a reshape of `shape`, in front of which the same elements lie.

    Joining pieces along either dim then gives the same elements. From (2, 12) to (2, 3, 4) dim 1
    goes to dim 1: of 24 elements, 2 groups lie in front of both, and each group is split in order.
    """
    before = math.prod(shape[:dim])
    places = [d for d in range(len(other)) if math.prod(other[:d]) == before]
    if not before or not places:
        return None
    return next((d for d in places if other[d] > 1), places[-1])


def again(b: Builder, op: Op, operands: Sequence[Value], result: TensorType) -> Value:
    """Appends an op with the same name and attributes, but other operands and result type."""
    return b.op(op.name, operands, (result,), op.kind.attrs)[0]


def pieces_of(op: Op) -> int:
    """How many devices' pieces a gather joins, or a reduce-scatter takes apart."""
    dim = op.kind.attrs[op.kind.about.along]
    sizes = op.kind.operands[0].shape[dim], op.kind.results[0].shape[dim]
    return max(sizes) // min(sizes)
