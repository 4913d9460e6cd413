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

from collections.abc import Iterable, Sequence

from spmd.frontend.importer.module import Imported
from spmd.ir.control_flow import Index
from spmd.ir.description import BARRIER, CONSTANT, REDUCE, RESHAPE, SCATTER
from spmd.ir.dialect.bodies import with_identity
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import NEUTRAL, REDUCER_OPS, identity_element, is_identity
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Edit, Now, edit_ops, remove_dead
from spmd.ir.types import Dense, DotDims, TensorType


def unflatten(program: Program) -> Program:
    """Rewrites reductions and inner products of flattened tensors, to run over unflattened dims."""
    producers = Index(program).producers

    def before(value: Value, dims: Iterable[int]) -> tuple[Value, tuple[int, ...]] | None:
        """Returns (what is flattened to `value`, its dims that become `dims`); None if not so."""
        made = producers.get(value)
        if made is None or made.name != RESHAPE:
            return None
        found = _dims_before(made.kind.operands[0].shape, made.kind.results[0].shape, set(dims))
        return None if found is None else (made.operands[0], found)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if len(op.results) != 1:
            return None
        attrs, (result,) = op.kind.attrs, op.kind.results
        if op.name == REDUCE and (flat := before(op.operands[0], attrs["dimensions"])):
            whole, dims = now(flat[0]), flat[1]
            shape = tuple(n for d, n in enumerate(b.types[whole].shape) if d not in dims)
            attrs, kept = {**attrs, "dimensions": dims}, result.with_shape(shape)
            (made,) = b.op(op.name, (whole, op.operands[1]), (kept,), attrs)
            return (b.reshape(made, result.shape),)
        if attrs.get("dot_dimension_numbers") != DotDims((), (), (0,), (0,)) or result.rank:
            return None
        flats = [flat for v in op.operands if (flat := before(v, (0,)))]
        wholes = [now(value) for value, _ in flats]
        if len(wholes) < 2 or b.types[wholes[0]].shape != b.types[wholes[1]].shape:
            return None
        every = flats[0][1]
        attrs = {**attrs, "dot_dimension_numbers": DotDims((), (), every, every)}
        return b.op(op.name, wholes, (result,), attrs)

    return _edited(program, edit)


def _edited(program: Program, edit: Edit) -> Program:
    """Returns a program after `edit_ops`, without what nothing reads any more."""
    new = edit_ops(program, edit)
    return program if new is program else remove_dead(new)


def _dims_before(
    before: Sequence[int], after: Sequence[int], dims: set[int]
) -> tuple[int, ...] | None:
    """Returns the dims of the shape `before` that a reshape to the shape `after` makes into `dims`.

    These are (0, 1) for {0} and 8x16x4 -> 128x4, whose shortest runs of equal size are (0, 1) ->
    (0) and (2) -> (1). None if nothing is flattened, or such a run makes dims outside `dims`.
    """
    found: list[int] = []
    is_flattened, i, j = False, 0, 0
    while 0 not in before and (i < len(before) or j < len(after)):
        start, left, right = (i, j), 1, 1
        # One dim of a side first, the other side up to it; dims of one element end a run.
        while (i, j) == start or left != right:
            if left <= right and i < len(before):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        run = range(start[1], j)
        if dims.isdisjoint(run):
            continue
        if not dims.issuperset(run):
            return None
        found += range(start[0], i)
        is_flattened |= i - start[0] > 1
    return tuple(found) if is_flattened else None


def accumulate(program: Program) -> Program:
    """Rewrites `x + scatter_add(zeros, i, u)`, with unique indices, as `scatter_add(x, i, u)`."""
    index = Index(program)

    def is_apart(value: Value) -> bool:
        """Returns whether a value is a scatter-add into zeros, at unique indices, and read once."""
        made = index.producers.get(value)
        if made is None or made.name != SCATTER or len(made.results) > 1:
            return False
        attrs, is_read_once = made.kind.attrs, len(index.users[value]) == 1
        if not is_read_once or attrs["reducer"] != "add" or not attrs.get("unique_indices"):
            return False
        return is_identity(made.operands[0], index.producers, "add")

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        parts = [v for v in op.operands if is_apart(v)] if op.name == "stablehlo.add" else []
        if len(parts) != 1:
            return None
        made = index.producers[parts[0]]
        (whole,) = set(op.operands) - set(parts)
        read = (whole, *map(now, made.operands[1:]))
        return b.op(made.name, read, made.kind.results, made.kind.attrs)

    return _edited(program, edit)


def separate(program: Program) -> Program:
    """Splits each optimization barrier into one for each operand."""

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        if op.name != BARRIER or len(op.operands) < 2:
            return None
        return [b.barrier([value])[0] for value in op.operands]

    return edit_ops(program, edit)


def start_neutral(program: Program) -> Program:
    """Lets all reductions start from an identity; any other initial value joins the result once."""

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        reduces = op.name in (REDUCE, "stablehlo.reduce_window")
        if not reduces or op.kind.attrs.get(NEUTRAL) is not False:
            return None
        types, attrs = op.kind.results, {**op.kind.attrs, NEUTRAL: True}
        xs, inits = op.operands[: len(types)], op.operands[len(types) :]
        shape = types[0].shape
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

    return edit_ops(program, edit)


LARGE = 64 << 10
"""Bytes above which a constant becomes an argument. To pass an argument costs each call some
microseconds on eight devices; to hold a smaller constant whole on each device costs less."""


def lift_constants(imported: Imported) -> Imported:
    """Makes large constants arguments behind the others; equal constants become one argument.

    Large is above `LARGE` bytes. Splats and the constants inside manual regions stay constants.
    """
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
