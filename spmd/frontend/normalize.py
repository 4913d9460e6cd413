"""Small rewrites of an imported program, after which more of its dims can be split over devices.

Unflatten: a sum over a flattened tensor becomes a sum over the tensor's own dims. A flattened dim
can be split only as the first of the dims that it is made of. A tensor that is split along another
one would be all-gathered for the sum.

before: `%1 = reshape %0 : 8x16x4 -> 128x4;  %2 = reduce[add, dims 0] %1 : 4`
after:  `%2 = reduce[add, dims 0 1] %0 : 4`

before: `%2 = reshape %0 : 8x16 -> 128;  %3 = reshape %1 : 8x16 -> 128;  %4 = dot %2, %3`
after:  `%4 = dot_general[contract 0 1, 0 1] %0, %1`

Accumulate: updates that are scattered into zeros and then added to a tensor are scattered into that
tensor, if no two hit one element (the order of a sum changes its rounding). Gradients of loops that
read a value piece by piece have such sums: each step writes, reads and adds a tensor of zeros.

before: `%3 = scatter[add] zeros, %i, %update;  %4 = add %sum, %3`
after:  `%4 = scatter[add] %sum, %i, %update`

Separate: a barrier becomes one for each operand. One op has one assignment of mesh axes for all of
its operands; independent operands can then be split in different ways.

before: `%2, %3 = stablehlo.optimization_barrier %0, %1`
after:  `%2 = stablehlo.optimization_barrier %0; %3 = stablehlo.optimization_barrier %1`

Start: a reduction from anything but an identity starts from one, and its initial value joins the
result once: devices that reduce pieces would each bring one. A body without a name gets an identity
that is nothing at all, by a flag that says whether there is anything.

before: `%3 = stablehlo.reduce %0, %1 ({ (a, b): sqrt(a a + b b) })`
after:  `%4, %5 = stablehlo.reduce %0, true, %1, false (...)`, and `sqrt(%1 %1 + %4 %4)` where %5

Barriers that were one are put together again when the program is partitioned
(`spmd.lowering.partition`): what waits for what stays as the user wrote it.

Lift: large constants become arguments of the program, behind the user's, to be split like these.

before: `main(%0: "x") { %1 = constant {value = dense<...>}; %2 = add %0, %1; return %2 }`
after:  `main(%0: "x", %1: "constants/0") { %2 = add %0, %1; return %2 }`

They are put on devices once, when the program is compiled, and passed at each call
(`spmd.lowering.execute`). Constants inside a manual region stay: they are one device's own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from spmd.frontend.importer.module import Imported
from spmd.ir.control_flow import Index
from spmd.ir.description import BARRIER, CONSTANT, REDUCE, RESHAPE, SCATTER
from spmd.ir.dialect.bodies import with_identity
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import (
    NEUTRAL,
    REDUCER_OPS,
    identity_element,
    is_identity,
)
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, rewrite_ops
from spmd.ir.types import Dense, DotDims, TensorType

# ---------------------------------------------------------------------------------------------
# Unflatten.


class DimGroup(NamedTuple):
    """Holds adjacent dims of a reshape's operand, and the dims of its result that they become."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def unflatten(program: Program) -> Program:
    """Lets reductions and inner products of flattened tensors run over the dims before that."""
    producers = Index(program).producers
    flattened: dict[Value, list[DimGroup]] = {}  # of reshapes in which several dims become one
    for value, op in producers.items():
        if op.name == RESHAPE:
            groups = _groups(op.kind.operands[0].shape, op.kind.results[0].shape)
            if any(len(group.before) > 1 for group in groups):
                flattened[value] = groups

    def is_sum(op: Op) -> bool:
        """Returns whether an op reduces whole flattened dims, or is a dot of flattened tensors."""
        if op.name == "stablehlo.reduce":
            groups = flattened.get(op.operands[0], [])
            is_single = len(op.operands) == 2
            return is_single and _dims_in(groups, op.kind.attrs["dimensions"]) is not None
        if op.name != "stablehlo.dot_general" or any(v not in flattened for v in op.operands):
            return False
        left, right = (producers[v].kind.operands[0].shape for v in op.operands)
        is_inner = op.kind.attrs["dot_dimension_numbers"] == DotDims((), (), (0,), (0,))
        return is_inner and not op.kind.results[0].shape and left == right

    sums = {id(op): op.results for op in program.walk() if is_sum(op)}
    if not sums:
        return program
    # A reshape that only such sums read goes with them: one that nobody reads would be planned for.
    users = Index(program).users
    unread = {v for v in flattened if all(id(op) in sums for op, _ in users.get(v, ()))}
    rewritten = set(sums.values())
    new: dict[Value, Value] = {}  # result of a reshape -> its operand, in the new program

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if op.results[0] in flattened:
            new[op.results[0]] = operands[0]
            return operands if op.results[0] in unread else None
        if op.results not in rewritten:
            return None
        wholes = [new[v] for v in op.operands if v in flattened]
        type_, (result,) = b.types[wholes[0]], op.kind.results
        if op.name == "stablehlo.reduce":
            dims = _dims_in(flattened[op.operands[0]], op.kind.attrs["dimensions"]) or ()
            kept = result.with_shape(tuple(n for d, n in enumerate(type_.shape) if d not in dims))
            attrs = {**op.kind.attrs, "dimensions": dims}
            (made,) = b.op(op.name, (wholes[0], operands[1]), (kept,), attrs)
            return (b.reshape(made, result.shape),)
        every = tuple(range(type_.rank))
        attrs = {**op.kind.attrs, "dot_dimension_numbers": DotDims((), (), every, every)}
        return b.op(op.name, wholes, op.kind.results, attrs)

    return rewrite_ops(program, rewrite)


def _dims_in(groups: Sequence[DimGroup], after: Iterable[int]) -> tuple[int, ...] | None:
    """Returns the dims that a reshape, given by its groups, turns into its result's dims `after`.

    None if no dims are flattened there, or if `after` has only some of the dims of a group.
    """
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


def _groups(before: Sequence[int], after: Sequence[int]) -> list[DimGroup]:
    """Pairs the dims of a reshape in the shortest runs of equal size; [] for empty tensors.

    For 8x16x4 -> 128x4 the groups are (0, 1) -> (0) and (2) -> (1), since 8 * 16 = 128 and 4 = 4.
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
        found.append(DimGroup(tuple(range(start[0], i)), tuple(range(start[1], j))))
    return found


# ---------------------------------------------------------------------------------------------
# Accumulate.


def accumulate(program: Program) -> Program:
    """Rewrites `x + scatter_add(zeros, i, u)`, with unique indices, as `scatter_add(x, i, u)`."""
    if not any(_adds_apart(op) for op in program.walk()):
        return program
    producers, users = Index(program).producers, Index(program).users
    sums = {
        op.results[0]: made
        for op, made in _sums_in(program.body)
        if len(users[made.results[0]]) == 1 and is_identity(made.operands[0], producers, "add")
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
    """Returns whether an op is a scatter-add at unique indices, with one result."""
    attrs = op.kind.attrs
    is_alone = op.name == SCATTER and len(op.results) == 1
    return is_alone and attrs["reducer"] == "add" and bool(attrs.get("unique_indices"))


def _sums_in(region: Region) -> Iterator[tuple[Op, Op]]:
    """Yields (add, scatter): each `add`, nested too, of a value and a scatter-add of its region."""
    made: dict[Value, Op] = {}
    for op in region.ops:
        if _adds_apart(op):
            made[op.results[0]] = op
        if op.name == "stablehlo.add" and len(found := made.keys() & set(op.operands)) == 1:
            yield op, made[found.pop()]
        for inner in op.regions:
            yield from _sums_in(inner)


# ---------------------------------------------------------------------------------------------
# Separate.


def separate(program: Program) -> Program:
    """Splits barriers into one for each operand."""

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if op.name != BARRIER or len(operands) < 2:
            return None
        return [b.barrier([value])[0] for value in operands]

    several = any(op.name == BARRIER and len(op.results) > 1 for op in program.walk())
    return rewrite_ops(program, rewrite) if several else program


# ---------------------------------------------------------------------------------------------
# Start.


def start_neutral(program: Program) -> Program:
    """Lets reductions start from an identity; other initial values join their results, once."""

    def starts(op: Op) -> bool:
        reduces = op.name in (REDUCE, "stablehlo.reduce_window")
        return reduces and op.kind.attrs.get(NEUTRAL) is False

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if not starts(op):
            return None
        types, attrs = op.kind.results, {**op.kind.attrs, NEUTRAL: True}
        xs, inits, shape = operands[: len(types)], operands[len(types) :], types[0].shape
        if reducer := attrs["reducer"]:
            identity = b.constant(identity_element(reducer, types[0].dtype), types[0].dtype)
            made = b.op(op.name, (*xs, identity), types, attrs)
            return b.op(REDUCER_OPS[reducer], (b.broadcast(inits[0], shape), *made), types)
        attrs["body"] = body = with_identity(attrs["body"])
        flag, ahead = TensorType((), "i1"), (1, *shape)
        starts_from = (*inits, b.splat(False, flag))
        given = (*xs, b.splat(True, flag.with_shape(b.types[xs[0]].shape)))
        terms = b.op(op.name, (*given, *starts_from), (*types, flag.with_shape(shape)), attrs)
        # In front of them come the initial values, reduced by the same body.
        heads = [b.broadcast(init, ahead) for init in inits]
        heads.append(b.splat(True, flag.with_shape(ahead)))
        pairs = zip(heads, terms, strict=True)
        rows = [b.concatenate([head, b.reshape(term, ahead)], 0) for head, term in pairs]
        attrs = {"dimensions": (0,), "body": body, "reducer": "", NEUTRAL: True}
        return b.op(REDUCE, (*rows, *starts_from), [b.types[v] for v in terms], attrs)[:-1]

    return rewrite_ops(program, rewrite) if any(map(starts, program.walk())) else program


# ---------------------------------------------------------------------------------------------
# Lift.

LARGE = 64 << 10
"""Bytes above which a constant becomes an argument. To pass an argument costs each call some
microseconds on eight devices; to hold a smaller constant whole on each device costs less."""


def lift_constants(imported: Imported) -> Imported:
    """Makes large constants arguments behind the others; equal constants become one argument."""
    program = imported.program
    made = {op.results[0]: op.kind.attrs["value"] for op in program.walk() if op.name == CONSTANT}
    large = {v for v, dense in made.items() if not dense.splat and len(dense.data) > LARGE}
    large -= Index(program).held.keys() if large else set()
    if not large:
        return imported
    lifted: dict[Dense, Value] = {}

    def edit(_: Builder, op: Op, __: Now) -> Sequence[Value]:
        return (lifted.setdefault(op.kind.attrs["value"], op.results[0]),)

    program = edit_ops(program, edit, large)
    body = program.body._replace(args=(*program.body.args, *lifted.values()))
    names = (*program.arg_names, *(f"constants/{number}" for number in range(len(lifted))))
    marks = (*imported.arg_marks, *[None] * len(lifted))
    program = program._replace(body=body, arg_names=names, constants=tuple(lifted))
    return imported._replace(program=program, arg_marks=marks)
