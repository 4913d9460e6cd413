"""Stack: equal work on different values, done one after another, is done at once.

before: `%4 = dot %0, %0; %5 = tanh %4;  %6 = dot %1, %1; %7 = tanh %6`
after:  `%8 = concatenate (reshape %0), (reshape %1); %9 = dot_general[batch 0] %8, %8;
         %10 = tanh %9; %5 = reshape (slice %10 [0:1]); %7 = reshape (slice %10 [1:2])`

A Python loop over matrices, layers or members of an ensemble writes such programs. A device could
do some of them and leave the rest to others, but what is split is a dim, and there is none that
runs over them until they are stacked.

Which ops do the same is for `spmd.frontend.lanes` to say, and which of them are worth it for
`spmd.planning.stacks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.frontend.lanes import Block, Row, Stack, carries_that_differ
from spmd.ir.dialect.batched import Batched, form_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import remove_dead, repeat_op


def stacked(program: Program, stacks: Sequence[Stack]) -> Program:
    """Does the ops of each stack of a program's body at once, in an order that there is."""
    block = Block(program)
    order = block.order(stacks)
    assert order is not None
    writer = _Writer(block, [row for row in order if len(row) > 1])
    for row in order:
        if len(row) == 1:
            writer.b.append(block.ops[row[0]])
        else:
            writer.row(row)
    body = writer.b.end(program.body.args, program.body.results)
    return remove_dead(program._replace(types=tuple(writer.b.types), body=body))


class _Writer:
    """Writes rows."""

    def __init__(self, block: Block, rows: Sequence[Row]) -> None:
        self.block, self.b = block, Builder(block.program.types)
        self.b.begin(isolated=True)
        # values, of each lane one -> what they are together, and whether they differ
        self.made: dict[tuple[Value, ...], tuple[Value, bool]] = {}
        inside = {place for row in rows for place in row}
        self.alone = set(block.program.body.results)  # values read one by one: they keep numbers
        for place, read in enumerate(block.reads):
            if place not in inside:
                self.alone.update(read)
        together = {values for row in rows for values in block.results(row)}
        for row in rows:
            for values in block.operands(row):
                if values not in together:
                    self.alone.update(values)

    def row(self, row: Row) -> None:
        """Writes one row."""
        op, count, b = self.block.ops[row[0]], len(row), self.b
        b.loc = op.loc
        given = [self.together(values) for values in self.block.operands(row)]
        operands, differs = [v for v, _ in given], [d for _, d in given]
        made: tuple[Value, ...]
        differ = [any(differs)] * len(op.results)
        if not any(differs):
            env = dict(zip(op.operands, operands, strict=True))
            repeat_op(b, op, env)
            made = tuple(env[v] for v in op.results)
        elif op.is_loop:
            made, differ = _write_loop(b, op, operands, differs, count)
        else:
            form = form_of(op.kind, count, differs)
            assert form is not None
            made = _write_batched(b, form, operands, differs)
        for values, value, has_dim in zip(self.block.results(row), made, differ, strict=True):
            self.made[values] = value, has_dim
            for lane, old in enumerate(values):
                if old in self.alone:
                    piece = b.slice_dim(value, 0, lane, lane + 1) if has_dim else value
                    kind = OpKind("stablehlo.reshape", (b.types[piece],), (b.types[old],), {})
                    b.append(Op(kind, (piece,), (old,), (), op.loc))

    def together(self, values: tuple[Value, ...]) -> tuple[Value, bool]:
        """What values are together, and whether they differ."""
        if values not in self.made:
            b = self.b
            if self.block.same(values):
                self.made[values] = values[0], False
            else:
                wide = [b.reshape(v, (1, *b.types[v].shape)) for v in values]
                self.made[values] = b.concatenate(wide, 0), True
        return self.made[values]


def _write_batched(
    b: Builder, form: Batched, operands: Sequence[Value], differs: Sequence[bool]
) -> tuple[Value, ...]:
    """Appends a batched op, whose results have a new dim in front, as do operands that differ.

    What is the same for all, and not a scalar beside, is broadcast.
    """
    given = list(zip(operands, differs, strict=True))
    if form.start is not None:
        dtype = b.types[operands[form.start]].dtype
        given.insert(form.start, (b.constant(np.array(0), dtype), False))
    fitting = [
        v
        if b.types[v] == want
        else b.broadcast(v, want.shape, (0,) if has_dim else range(1, want.rank))
        for (v, has_dim), want in zip(given, form.kind.operands, strict=True)
    ]
    made = b.repeat(form.kind, tuple(fitting))
    rest = [[d for d in range(b.types[v].rank) if d != form.dim] for v in made]
    return tuple(b.transpose(v, (form.dim, *dims)) for v, dims in zip(made, rest, strict=True))


def _write_loop(
    b: Builder, op: Op, operands: Sequence[Value], differs: Sequence[bool], count: int
) -> tuple[tuple[Value, ...], list[bool]]:
    """A loop that does the trips of all lanes at once; its results, and which of them differ."""
    carried = carries_that_differ(op, count, differs)
    assert carried is not None

    def wide(value: Value, is_wide: bool, becomes_wide: bool) -> Value:
        if is_wide or not becomes_wide:
            return value
        shape = b.types[value].shape
        return b.broadcast(value, (count, *shape), range(1, len(shape) + 1))

    given = [wide(v, d, c) for v, d, c in zip(operands, differs, carried, strict=True)]
    types = tuple(b.types[v] for v in given)

    def region(old: Region) -> Region:
        b.begin(isolated=True)
        args = [b.value(t) for t in types]
        env = dict(zip(old.args, args, strict=True))
        flags = dict(zip(old.args, carried, strict=True))
        for inner in old.ops:
            now = [flags.get(v, False) for v in inner.operands]
            read = [env[v] for v in inner.operands]
            b.loc = inner.loc
            made: tuple[Value, ...]
            if not any(now):
                repeat_op(b, inner, env)
                flags.update((v, False) for v in inner.results)
                continue
            if inner.is_loop:
                made, differ = _write_loop(b, inner, read, now, count)
            else:
                form = form_of(inner.kind, count, now)
                assert form is not None
                made, differ = _write_batched(b, form, read, now), [True] * len(inner.results)
            env.update(zip(inner.results, made, strict=True))
            flags.update(zip(inner.results, differ, strict=True))
        becomes = carried if old is op.regions[1] else [False]
        results = [wide(env[v], flags[v], c) for v, c in zip(old.results, becomes, strict=True)]
        return b.end(args, results)

    regions = tuple(region(r) for r in op.regions)
    b.loc = op.loc
    kind = OpKind(op.name, types, types, op.kind.attrs)
    return b.repeat(kind, tuple(given), regions), carried
