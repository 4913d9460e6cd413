"""Ops that can change places with a collective along one dim, and how they and the dim change.

A convert, a transpose or a reshape of a gathered value is the gathered value of a convert, a
transpose or a reshape; a slice of an elementwise op is the op of slices. All that changes is the
size of one dim, which `operand_dim` follows from the result to the operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType


def is_move(kind: OpKind) -> bool:
    """Whether an op moves the elements of its one operand around, or changes their type."""
    return kind.about.is_convert or kind.about.is_transpose or kind.about.is_reshape


def is_elementwise(kind: OpKind) -> bool:
    """Whether an element of the one result depends on the same elements of the operands alone."""
    return kind.about.is_elementwise and len(kind.results) == 1


def operand_dim(kind: OpKind, dim: int) -> int | None:
    """The operands' dim that is cut (or joined) where the result's dim is; None if none is."""
    if kind.about.is_transpose:
        found: int = kind.attrs["permutation"][dim]
        return found
    if kind.about.is_reshape:
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


class Chain(NamedTuple):
    """The moves that lead to a gather's operand, followed back, and the gathered dim in each.

    Attributes:
      gather: the op.
      values: its operand, the value that this is a move of, and so on back.
      dims: for each of `values`, the dim along which it would be gathered instead.
      moves: the ops between them, the last one first.
    """

    gather: Op
    values: list[Value]
    dims: list[int]
    moves: list[Op]

    @staticmethod
    def of(gather: Op, made: Mapping[Value, Op]) -> Chain:
        """The chain as far back as one dim stands for the gathered one."""
        value, dim = gather.operands[0], gather.kind.attrs["all_gather_dim"]
        chain = Chain(gather, [value], [dim], [])
        while (op := made.get(value)) is not None and is_move(op.kind):
            before = operand_dim(op.kind, dim)
            if before is None:
                break
            value, dim = op.operands[0], before
            chain.values.append(value)
            chain.dims.append(dim)
            chain.moves.append(op)
        return chain

    @property
    def times(self) -> int:
        """How many pieces the gather joins."""
        return pieces_of(self.gather)

    def repeated(self, b: Builder, count: int, x: Value) -> Value:
        """The last `count` moves again, on a gathered `x`; they convert to what they did."""
        for op, dim in reversed(list(zip(self.moves[:count], self.dims, strict=False))):
            b.loc = op.loc
            if op.kind.about.is_convert:
                x = b.convert(x, op.kind.results[0].dtype)
            else:
                shape = op.kind.results[0].scaled(dim, self.times).shape
                x = again(b, op, (x,), TensorType(shape, b.types[x].dtype))
        return x


def joins(op: Op) -> bool:
    """Whether an op lays several operands side by side."""
    about, count = op.kind.about, len(op.operands)
    if count < 2 or about.rule is None or about.collective or about.is_elementwise:
        return False
    rule = rule_of(op.kind)
    return bool(rule.moves and rule.linear == (tuple(range(count)),))
