"""Unflatten: a sum over a flattened tensor becomes a sum over the tensor's own dims.

A flattened dim can be split as its major dim is, and no further: a tensor that is split over
another dim would be gathered just to be added up.

before: `%1 = reshape %0 : 8x16x4 -> 128x4;  %2 = reduce[add, dims 0] %1 : 4`
after:  `%2 = reduce[add, dims 0 1] %0 : 4`

before: `%2 = reshape %0 : 8x16 -> 128;  %3 = reshape %1 : 8x16 -> 128;  %4 = dot %2, %3`
after:  `%4 = dot_general[contract 0 1, 0 1] %0, %1`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import producers_of
from spmd.ir.description import RESHAPE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.types import DotDims


class Group(NamedTuple):
    """Dims of a tensor, and those that they become by a reshape; both have as many elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def unflatten(program: Program) -> Program:
    """Rewrites such sums; a program without any is returned as it is."""
    flattened = {  # results of reshapes in which several dims become one
        value: op
        for value, op in producers_of(program).items()
        if op.name == RESHAPE and any(len(group.before) > 1 for group in _groups_of(op))
    }
    sums = [op for op in program.walk() if _is_sum(op, flattened)]
    if not sums:
        return program
    # A reshape that only such sums read goes with them: one that nobody reads would be planned for.
    unread = flattened.keys() - _read_by(program, without={id(op) for op in sums})
    rewritten = {op.results for op in sums}
    new: dict[Value, Value] = {}  # result of a reshape -> its operand, in the new program

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if op.results[0] in flattened:
            new[op.results[0]] = operands[0]
            return operands if op.results[0] in unread else None
        if op.results not in rewritten:
            return None
        wholes = [new[v] for v in op.operands if v in flattened]
        if op.name == "stablehlo.reduce":
            return (_reduced(b, op, wholes[0], operands[1]),)
        every = tuple(range(len(b.types[wholes[0]].shape)))
        attrs = {**op.kind.attrs, "dot_dimension_numbers": DotDims((), (), every, every)}
        return b.op(op.name, wholes, op.kind.results, attrs)

    return rewrite_ops(program, rewrite)


def _is_sum(op: Op, flattened: dict[Value, Op]) -> bool:
    """Whether an op takes flattened dims together, each of them whole."""
    if op.name == "stablehlo.reduce":
        made = flattened.get(op.operands[0])
        if made is None or len(op.operands) != 2:
            return False
        return _dims_in(_groups_of(made), op.kind.attrs["dimensions"]) is not None
    if op.name != "stablehlo.dot_general" or any(v not in flattened for v in op.operands):
        return False
    whole = [flattened[v].kind.operands[0].shape for v in op.operands]
    is_inner = op.kind.attrs["dot_dimension_numbers"] == DotDims((), (), (0,), (0,))
    return is_inner and not op.kind.results[0].shape and whole[0] == whole[1]


def _read_by(program: Program, without: Iterable[int]) -> set[Value]:
    """Values that the program's ops, regions and results read, some ops left out."""
    left_out = set(without)
    found = set(program.body.results)
    for op in program.walk():
        found.update(value for region in op.regions for value in region.results)
        if id(op) not in left_out:
            found.update(op.operands)
    return found


def _reduced(b: Builder, op: Op, x: Value, init: Value) -> Value:
    """A reduction of what is flattened, of which `x` is the whole."""
    type_, result = b.types[x], op.kind.results[0]
    groups = _groups(type_.shape, op.kind.operands[0].shape)
    dims = _dims_in(groups, op.kind.attrs["dimensions"]) or ()
    shape = tuple(n for d, n in enumerate(type_.shape) if d not in dims)
    attrs = {**op.kind.attrs, "dimensions": dims}
    (made,) = b.op(op.name, (x, init), (result.with_shape(shape),), attrs)
    return b.reshape(made, result.shape)


def _dims_in(groups: Sequence[Group], after: Iterable[int]) -> tuple[int, ...] | None:
    """The dims that became these; None where a group is taken in part, or none was flattened."""
    dims: list[int] = []
    taken, is_flattened = set(after), False
    for group in groups:
        if taken.isdisjoint(group.after):
            continue
        if not taken.issuperset(group.after):
            return None
        dims += group.before
        is_flattened |= len(group.before) > 1
    return tuple(dims) if is_flattened else None


def _groups_of(reshape: Op) -> list[Group]:
    return _groups(reshape.kind.operands[0].shape, reshape.kind.results[0].shape)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The smallest runs of dims on both sides with as many elements; none for empty tensors.

    Example:
      8 16 4 -> 128 4: the groups (0, 1) -> (0) and (2) -> (1)
    """
    if not math.prod(before):
        return []
    found, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, left, right = (i, j), 1, 1
        # One dim of a side first, the other side up to it; dims of one element end a group.
        while (i, j) == start or left != right:
            if left <= right and i < len(before):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        found.append(Group(tuple(range(start[0], i)), tuple(range(start[1], j))))
    return found
