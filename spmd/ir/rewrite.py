"""Rebuilding a program op by op: what every rewrite of the local program is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Loc, Op, Program, Region, Value
from spmd.ir.types import TensorType

Rewrite = Callable[[Builder, Op, tuple[Value, ...]], "Sequence[Value] | None"]
"""Given the builder, an op without regions and its new operands: the new results, or None to
copy the op as it is."""


def rewrite_ops(program: Program, rewrite: Rewrite) -> Program:
    """Rebuilds a program, letting `rewrite` replace ops.

    before: `%1 = a %0; %2 = b %1`, with a rewrite that turns `a` into `c; d`
    after:  `%1 = c %0; %2 = d %1; %3 = b %2`
    """
    b = Builder()
    args = [b.value(program.types[v]) for v in program.body.args]
    b.begin(isolated=True)
    results = append_ops(b, program, args, rewrite)
    return program._replace(body=b.end(args, results), types=tuple(b.types))


def append_ops(
    b: Builder,
    program: Program,
    args: Sequence[Value],
    rewrite: Rewrite | None = None,
    loc: Loc | None = None,
) -> tuple[Value, ...]:
    """Appends a program's ops to another program.

    Args:
      b: the builder that ops are appended to.
      program: the program.
      args: what its arguments are there.
      rewrite: may replace ops.
      loc: where all of the ops come from; from where they did if left out.

    Returns:
      What its results are there.
    """
    env = dict(zip(program.body.args, args, strict=True))
    for op in program.body.ops:
        repeat_op(b, op, env, rewrite, loc)
    return tuple([env[v] for v in program.body.results])


def repeat_op(
    b: Builder,
    op: Op,
    env: dict[Value, Value],
    rewrite: Rewrite | None = None,
    loc: Loc | None = None,
) -> None:
    """Appends an op once more, with new values for all that it and its regions make.

    Args:
      b: the builder that it is appended to.
      op: the op, of this program or of another.
      env: what the values that it reads are there; gets its results.
      rewrite: may replace ops.
      loc: where it comes from; from where it did if left out.
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
        made = bind(op.results, op.kind.results)
        b.append(Op(op.kind, operands, made, regions, loc or op.loc))
    else:
        env.update(zip(op.results, results, strict=True))


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
        if op.regions:
            op = op._replace(regions=tuple([region(r, op.is_loop) for r in op.regions]))
        if not replaced.keys().isdisjoint(op.operands):
            op = op._replace(operands=tuple([now(v) for v in op.operands]))
        b.loc = op.loc
        results = edit(b, op, now)
        if results is None:
            b.append(op)
        else:
            replaced.update(zip(op.results, results, strict=True))

    body = region(program.body, True)
    return program._replace(types=tuple(b.types), body=body)
