"""Rebuilding a program op by op: what every rewrite of the local program is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Region, Value

Rewrite = Callable[[Builder, Op, tuple[Value, ...]], "Sequence[Value] | None"]
"""Given the builder, an op without regions and its new operands: the new results, or None to
copy the op as it is."""


def rewrite_ops(program: Program, rewrite: Rewrite) -> Program:
    """Rebuilds a program, letting `rewrite` replace ops.

    before: `%1 = a %0; %2 = b %1`, with a rewrite that turns `a` into `c; d`
    after:  `%1 = c %0; %2 = d %1; %3 = b %2`
    """
    b = Builder()
    env: dict[Value, Value] = {}

    def bind(values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            env[value] = b.value(program.types[value])
        return tuple(env[value] for value in values)

    def region(old: Region, isolated: bool) -> Region:
        args = bind(old.args)
        b.begin(isolated)
        for op in old.ops:
            visit(op)
        return b.end(args, [env[v] for v in old.results])

    def visit(op: Op) -> None:
        operands = tuple([env[v] for v in op.operands])
        b.loc = op.loc
        results = None if op.regions else rewrite(b, op, operands)
        if results is None:
            is_loop = op.is_loop
            regions = tuple(region(r, is_loop) for r in op.regions)
            results = bind(op.results)
            b.append(Op(op.kind, operands, tuple(results), regions, op.loc))
        env.update(zip(op.results, results, strict=True))

    body = region(program.body, True)
    return program._replace(types=tuple(b.types), body=body)


Now = Callable[[Value], Value]
"""Maps a value of the old program to the one that replaces it, else to itself."""

Edit = Callable[[Builder, Op, Now], "Sequence[Value] | None"]
"""Called with the builder, an op whose operands are replaced already, and `Now` for other values.
Returns the values that replace the op's results, or None to keep the op."""


def edit_ops(program: Program, edit: Edit) -> Program:
    """Walks a program and lets `edit` replace ops; all other values keep their numbers.

    Since numbers stay, an edit may read any value that is visible where it is, not just its op's
    operands. An op with regions comes after the ops inside them.

    before: `%1 = a %0; %2 = b %1`, with an edit that replaces `%1` by `c %0`
    after:  `%3 = c %0; %2 = b %3`
    """
    b = Builder(program.types)
    replaced: dict[Value, Value] = {}

    def now(value: Value) -> Value:
        return replaced.get(value, value)

    def region(old: Region, isolated: bool) -> Region:
        b.begin(isolated)
        for op in old.ops:
            visit(op)
        return b.end(old.args, [now(v) for v in old.results])

    def visit(op: Op) -> None:
        regions = tuple(region(r, op.is_loop) for r in op.regions)
        operands = tuple([now(v) for v in op.operands])
        if operands != op.operands or regions:
            op = op._replace(operands=operands, regions=regions)
        b.loc = op.loc
        results = edit(b, op, now)
        if results is None:
            b.append(op)
        else:
            replaced.update(zip(op.results, results, strict=True))

    body = region(program.body, True)
    return program._replace(types=tuple(b.types), body=body)
