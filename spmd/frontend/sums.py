"""Sums that need less: over a tensor's own dims, and into what they are added to.

Unflatten: a sum over a flattened tensor becomes a sum over the tensor's own dims. A flattened dim
can be split as its major dim is, and no further: a tensor that is split over another dim would be
gathered just to be added up.

before: `%1 = reshape %0 : 8x16x4 -> 128x4;  %2 = reduce[add, dims 0] %1 : 4`
after:  `%2 = reduce[add, dims 0 1] %0 : 4`

before: `%2 = reshape %0 : 8x16 -> 128;  %3 = reshape %1 : 8x16 -> 128;  %4 = dot %2, %3`
after:  `%4 = dot_general[contract 0 1, 0 1] %0, %1`

Accumulate: what is scattered into zeros and then added to something is scattered into that. The
gradient of a value of which each step of a loop reads a piece is made so: zeros around a step's
piece, added to the sum of those before, reading and writing all of it.

before: `%3 = scatter[add] zeros, %i, %update;  %4 = add %sum, %3`
after:  `%4 = scatter[add] %sum, %i, %update`

Only where no two updates fall together: a sum of few bits depends on its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import producers_of, users_of
from spmd.ir.description import BROADCAST, CONSTANT, RESHAPE, SCATTER
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import is_identity
from spmd.ir.program import Op, Program, Region, Value
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


# ---------------------------------------------------------------------------------------------
# What is scattered and added.


def accumulate(program: Program) -> Program:
    """Rewrites such sums; a program without any is returned as it is."""
    if not any(_adds_apart(op) for op in program.walk()):
        return program
    producers, users = producers_of(program), users_of(program)
    sums = {
        op.results[0]: made
        for op, made in _sums_in(program.body)
        if len(users[made.results[0]]) == 1 and _is_zero(made.operands[0], producers)
    }
    scattered = {made.results[0] for made in sums.values()}
    parts: dict[Value, tuple[Value, ...]] = {}  # result of a scatter -> what it reads, in the new

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        result = op.results[0] if op.results else None
        if result in scattered:
            parts[result] = operands
            return operands[:1]
        if result not in sums:
            return None
        made = sums[result]
        (whole,) = [new for v, new in zip(op.operands, operands, strict=True) if v not in parts]
        read = (whole, *parts[made.results[0]][1:])
        return b.op(made.name, read, made.kind.results, made.kind.attrs)

    return rewrite_ops(program, rewrite) if sums else program


def _adds_apart(op: Op) -> bool:
    """Whether an op adds updates to a tensor, each at a place of its own."""
    attrs = op.kind.attrs
    is_alone = op.name == SCATTER and len(op.results) == 1
    return is_alone and attrs["reducer"] == "add" and bool(attrs.get("unique_indices"))


def _sums_in(region: Region) -> Iterator[tuple[Op, Op]]:
    """Each sum of something and of what was scattered in the same region, with the scatter."""
    made: dict[Value, Op] = {}
    for op in region.ops:
        if _adds_apart(op):
            made[op.results[0]] = op
        if op.name == "stablehlo.add" and len(found := made.keys() & set(op.operands)) == 1:
            yield op, made[found.pop()]
        for inner in op.regions:
            yield from _sums_in(inner)


def _is_zero(value: Value, producers: Mapping[Value, Op]) -> bool:
    """Whether a value is zeros: a constant, or one that was broadcast."""
    op = producers.get(value)
    while op is not None and op.name == BROADCAST:
        op = producers.get(op.operands[0])
    if op is None or op.name != CONSTANT:
        return False
    return is_identity(op.kind.attrs["value"], op.kind.results[0].dtype, "add")
