"""Helpers that rewrite a program op by op; `remove_dead` and `dedupe` clean up after rewrites."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import TypeVar

from spmd.ir.control_flow import Tie
from spmd.ir.description import TRANSPOSE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, free_values, has_effect
from spmd.ir.types import TensorType

Rewrite = Callable[[Builder, Op, tuple[Value, ...]], "Sequence[Value] | None"]
"""Takes the builder, an op without regions, and its operands in the new program. Returns the values
there that replace the op's results, or None to copy the op."""


def append_ops(b: Builder, program: Program, args: Sequence[Value], loc: Loc) -> tuple[Value, ...]:
    """Appends a program's ops with location `loc`, like a call with `args`; returns its results."""
    env = dict(zip(program.body.args, args, strict=True))
    for op in program.body.ops:
        repeat_op(b, op, env, loc=loc)
    return tuple([env[v] for v in program.body.results])


def repeat_op(
    b: Builder,
    op: Op,
    env: dict[Value, Value],
    rewrite: Rewrite | None = None,
    loc: Loc | None = None,
) -> None:
    """Appends a copy of an op and of its regions; its results are new values.

    `env` maps values of the old program to those of the new one, and the op's results are added to
    it. `rewrite` may replace ops. New ops have the location `loc`, or that of the old op if left
    out.
    """

    def bind(values: Sequence[Value], types: Sequence[TensorType]) -> tuple[Value, ...]:
        env.update((v, b.value(t)) for v, t in zip(values, types, strict=True))
        return tuple([env[v] for v in values])

    def region(old: Region, types: Sequence[TensorType], isolated: bool) -> Region:
        inner = bind(old.args, types)
        b.begin(isolated)
        for inside in old.ops:
            repeat_op(b, inside, env, rewrite, loc)
        return b.end(inner, [env[v] for v in old.results])

    operands = tuple([env[v] for v in op.operands])
    b.loc = loc or op.loc
    results = rewrite(b, op, operands) if rewrite and not op.regions else None
    if results is None:
        # Only loops have arguments, which are of their operands' types.
        carried = op.kind.operands if op.is_loop else ()
        regions = tuple(region(r, carried, op.is_loop) for r in op.regions)
        b.append(Op(op.kind, operands, bind(op.results, op.kind.results), regions, loc or op.loc))
    else:
        env.update(zip(op.results, results, strict=True))


Now = Callable[[Value], Value]
"""Returns the value that has replaced a value of the program, or that value itself if none has."""

Edit = Callable[[Builder, Op, Now], "Sequence[Value] | None"]
"""Takes the builder, an op whose operands are replaced already, and a `Now` for other values.
Returns the values that replace the op's results, or None to keep the op."""


def edit_ops(program: Program, edit: Edit, chosen: Container[Value] | None = None) -> Program:
    """Returns a program in which `edit` has replaced ops; all other values keep their numbers.

    `edit` is called for each op, or for those whose first result is in `chosen`, if that is given;
    for an op with regions after the ops inside them. It may read any value that is visible at the
    op. A program of which nothing is replaced is returned as it is.

    before: `%1 = a %0; %2 = b %1`, with an edit that replaces `%1` by `c %0`
    after:  `%3 = c %0; %2 = b %3`
    """
    b = Builder(program.types)
    replaced: dict[Value, Value] = {}
    changed = False

    def now(value: Value) -> Value:
        return replaced.get(value, value)

    def region(old: Region, isolated: bool) -> Region:
        nonlocal changed
        b.begin(isolated)
        for op in old.ops:
            if op.regions:
                op = op._replace(regions=tuple([region(r, op.is_loop) for r in op.regions]))
            if not replaced.keys().isdisjoint(op.operands):
                op = op._replace(operands=tuple([now(v) for v in op.operands]))
            b.loc = op.loc
            is_chosen = chosen is None or (op.results and op.results[0] in chosen)
            results = edit(b, op, now) if is_chosen else None
            if results is None:
                b.append(op)
            else:
                changed = True
                replaced.update(zip(op.results, results, strict=True))
        return b.end(old.args, [now(v) for v in old.results])

    body = region(program.body, True)
    return program._replace(types=tuple(b.types), body=body) if changed else program


def remove_dead(program: Program) -> Program:
    """Returns the program without ops that have no effect and whose results nothing reads.

    before: `%1 = negate %0; %2 = tanh %0; return %2`
    after:  `%2 = tanh %0; return %2`
    """

    # Backwards, so that the readers of a value are seen before its op. A loop's carry that nobody
    # reads stays: whether its body needs it takes a look around the loop.
    def region(old: Region, needed: set[Value]) -> Region:
        needed.update(old.results)
        kept = []
        for op in reversed(old.ops):
            if needed.isdisjoint(op.results) and op.results and not has_effect(op):
                continue
            if op.regions:
                for inner in op.regions:
                    needed.update(free_values(inner))
                op = op._replace(regions=tuple(region(r, set()) for r in op.regions))
            needed.update(op.operands)
            kept.append(op)
        return Region(old.args, tuple(reversed(kept)), old.results)

    return program._replace(body=region(program.body, set()))


def dedupe(program: Program) -> Program:
    """Removes ops that equal an earlier op with equal operands, and transposes that undo another.

    An op in a branch may be replaced by one before the branch, never the other way round. In a
    loop's body nothing from outside replaces an op: XLA's export of loops that capture is fragile.

    before: `%2 = all_gather %1 {data}; ...; %7 = all_gather %1 {data}`
    after:  `%2 = all_gather %1 {data}; ...` and every use of `%7` reads `%2`

    before: `%1 = transpose %0 [1, 0]; %2 = transpose %1 [1, 0]`
    after:  every use of `%2` reads `%0`
    """
    turned: dict[Value, tuple[Value, tuple[int, ...]]] = {}  # a transpose -> of what, and how
    undone = False

    # Operands are replaced before they are compared, so that chains collapse: with %3 and %4 equal
    # gathers, `%5 = tanh %3; %6 = tanh %4` are equal as well, once %4 is %3.
    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        nonlocal undone
        if op.regions or not op.kind.about.is_repeatable:
            return None
        if op.name == TRANSPOSE:
            (source,), order = op.operands, tuple(op.kind.attrs["permutation"])
            if source in turned:
                first, before = turned[source]
                if [before[p] for p in order] == list(range(len(order))):
                    undone = True
                    return (first,)
            turned[op.results[0]] = source, order
        made = b.once((op.kind, op.operands), lambda: op.results)
        return None if made is op.results else made

    found = edit_ops(program, edit)
    return remove_dead(found) if undone else found


def recarried(
    loop: Op, types: Sequence[TensorType], without: Container[int] = (), more: Sequence[Tie] = ()
) -> Op:
    """Returns a loop less the carries whose numbers are in `without`, with `more` at the end.

    before: `%5, %6 = while(%0, %1) { body(%2, %3): ...; return %4, %3 }`
    after:  `%5, %9 = while(%0, %7) { body(%2, %8): ...; return %4, %8 }`, without carry 1
    """
    cond, body = loop.regions

    def changed(values: Sequence[Value], added: Sequence[Value]) -> tuple[Value, ...]:
        return (*(v for i, v in enumerate(values) if i not in without), *added)

    operands = changed(loop.operands, [tie.source for tie in more if tie.source is not None])
    kinds = tuple(types[v] for v in operands)
    return loop._replace(
        kind=OpKind(loop.name, kinds, kinds, loop.kind.attrs),
        operands=operands,
        results=changed(loop.results, [tie.result for tie in more]),
        regions=(
            cond._replace(args=changed(cond.args, [tie.inside[0] for tie in more])),
            body._replace(
                args=changed(body.args, [tie.inside[1] for tie in more]),
                results=changed(body.results, [tie.inside[2] for tie in more]),
            ),
        ),
    )


Node = TypeVar("Node")


def in_order(before: Mapping[Node, Iterable[Node]], place: Callable[[Node], int]) -> list[Node]:
    """Returns nodes behind those that are before them, else by place; CycleError if none can be."""
    (sorter := TopologicalSorter(before)).prepare()
    ready, ordered = list[tuple[int, Node]](), list[Node]()
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, (place(node), node))
        _, node = heappop(ready)
        ordered.append(node)
        sorter.done(node)
    return ordered
