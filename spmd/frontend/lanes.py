"""Lanes: finds equal ops on different values, and replaces them by one op with a new leading dim.

before: `%4 = dot %0, %0; %5 = tanh %4;  %6 = dot %1, %1; %7 = tanh %6`
after:  `%8 = concatenate (reshape %0), (reshape %1); %9 = dot_general[batch 0] %8, %8;
         %10 = tanh %9; %5 = reshape (slice %10 [0:1]); %7 = reshape (slice %10 [1:2])`

A Python loop over matrices, layers or members of an ensemble writes such programs. Devices can only
split dims. The new dim runs over the equal computations, so that each device can do some of them.

A *lane* is one of the equal computations: above `%4, %5` and `%6, %7`. A *row* has one op of each
lane, all of one kind: `%4, %6` and `%5, %7`. Rows are found from a first one (`Block.grown`): the
producers of an operand, or the readers of a result, are a row if they are of one kind. No op may
depend on an op of another lane. `spmd.planning.stacks` decides which rows are stacked.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError

import numpy as np

from spmd.ir.dialect.batched import form_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values, has_effect, reads
from spmd.ir.rewrite import in_order, remove_dead, repeat_op

Row = tuple[int, ...]  # one op of each lane, all of one kind, by their indices in the body

OUTSIDE = -1
"""In `Block.users`: for an op, the program's results; for an operand, the op's regions."""

Stack = tuple[tuple[Value, ...], ...]
"""Rows of equal ops, each to become a batched op; an op is given by its first result."""


def described(program: Program, stack: Stack) -> str:
    """Returns text for people on ops to be batched: how many are equal, the first, its source line.

    For instance `16 times dot_general and 56 more ops (muon.py:12 (step))`.
    """
    first = {op.results[0]: op for op in program.body.ops if op.results}
    ops = [first[row[0]] for row in stack]
    more = f" and {len(ops) - 1} more op{'s' if ops[2:] else ''}" if ops[1:] else ""
    work = ops[0]  # rows are found from it
    return f"{len(stack[0])} times {work.label}{more} ({work.loc.source or 'unknown'})"


class Block:
    """Finds rows of equal ops in a program's body; the *place* of an op is its index there."""

    def __init__(self, program: Program) -> None:
        self.program, self.ops = program, program.body.ops
        self.places = {v: place for place, op in enumerate(self.ops) for v in op.results}
        self._shapes: dict[int, Hashable] = {}

    @cached_property
    def reads(self) -> list[tuple[Value, ...]]:
        """Returns for each op its operands, then the values that its regions read from outside."""
        return [reads(op) if op.regions else op.operands for op in self.ops]

    @cached_property
    def users(self) -> Mapping[Value, Sequence[tuple[int, int]]]:
        """Returns value -> (index of a reader, number of its operand) pairs.

        `(i, -1)` stands for a read inside the regions of op i, `(-1, -1)` for a program's result.
        """
        users: dict[Value, list[tuple[int, int]]] = {}
        for place, op in enumerate(self.ops):
            for i, value in enumerate(self.reads[place]):
                users.setdefault(value, []).append((place, i if i < len(op.operands) else OUTSIDE))
        for value in self.program.body.results:
            users.setdefault(value, []).append((OUTSIDE, OUTSIDE))
        return users

    def shape(self, place: int) -> Hashable:
        """Returns a key that equal ops share; None if regions keep the op from being batched."""
        op = self.ops[place]
        if not op.regions:
            return op.kind
        if place not in self._shapes:
            can = op.is_loop and not any(map(free_values, op.regions)) and not has_effect(op)
            self._shapes[place] = (op.kind, *map(_structure, op.regions)) if can else None
        return self._shapes[place]

    def same(self, values: Iterable[Value]) -> bool:
        """Returns whether all values are one value, or results of equal constants or iotas."""
        names: set[Hashable] = set()
        for value in values:
            op = self.ops[self.places[value]] if value in self.places else None
            names.add(op.kind if op is not None and op.kind.about.is_source else value)
        return len(names) == 1

    def operands(self, row: Row) -> list[tuple[Value, ...]]:
        """Returns for each operand position a tuple with that operand of every op of a row."""
        return list(zip(*(self.ops[place].operands for place in row), strict=True))

    def results(self, row: Row) -> list[tuple[Value, ...]]:
        """Returns for each result position a tuple with that result of every op of a row."""
        return list(zip(*(self.ops[place].results for place in row), strict=True))

    def rows(self, stack: Stack) -> list[Row]:
        """Returns the rows of equal ops in a stack, each op by its index in the body."""
        return [tuple(self.places[v] for v in row) for row in stack]

    # What does the same.

    def grown(self, seeds: Row, taken: Iterable[int] = ()) -> list[Row]:
        """Returns `seeds`, a row of equal ops, and rows of producers and readers found from there.

        No other row has an op whose index is in `taken`. [] if the ops of `seeds` can't be batched.
        """
        if not self._fits(seeds):
            return []
        rows, waiting, used = [seeds], [seeds], {*taken, *seeds}
        while waiting:
            for row in self._beside(waiting.pop()):
                if used.isdisjoint(row) and len(set(row)) == len(row) and self._fits(row):
                    used.update(row)
                    rows.append(row)
                    waiting.append(row)
        return rows

    def _beside(self, row: Row) -> Iterator[Row]:
        """Yields rows: producers of one operand, or equal readers of one result, of a row's ops."""
        for values in self.operands(row):
            if all(v in self.places for v in values):
                yield tuple(self.places[v] for v in values)
        for values in self.results(row):
            readers: list[dict[tuple[Hashable, int], list[int]]] = []
            for value in values:
                readers.append({})
                for place, i in self.users.get(value, ()):
                    if i != OUTSIDE:
                        readers[-1].setdefault((self.shape(place), i), []).append(place)
            for key, first in readers[0].items():
                others = [found.get(key, []) for found in readers]
                if all(len(other) == len(first) for other in others):
                    yield from zip(*others, strict=True)

    def _fits(self, row: Row) -> bool:
        shape = self.shape(row[0])
        if shape is None or any(self.shape(place) != shape for place in row):
            return False
        differs = [not self.same(values) for values in self.operands(row)]
        op = self.ops[row[0]]
        if not any(differs) or not op.results:
            return False
        if op.is_loop:
            return carries_that_differ(op, len(row), differs) is not None
        return form_of(op.kind, len(row), differs) is not None

    def independent(self, rows: Sequence[Row], seeds: Row) -> list[Row]:
        """Returns the rows in which no op depends on another lane (lane k: the k-th ops of rows).

        First it drops rows in which an op depends on another lane's op in `seeds`, or that on it;
        then rows in which an op depends on another lane's op in a row that is kept.
        """
        span = range(min(map(min, rows)), max(map(max, rows)) + 1)
        seed = {place: 1 << lane for lane, place in enumerate(seeds)}
        ahead: dict[Value, int] = {}
        for place in reversed(span):
            lanes = seed.get(place, 0)
            for value in self.ops[place].results:
                lanes |= ahead.get(value, 0)
            if lanes:
                for value in (*self.reads[place], *self.ops[place].results[:1]):
                    ahead[value] = ahead.get(value, 0) | lanes
        behind = self._led_to_by(seed, span)  # sets of lanes are bits, here and above

        def is_apart(row: Row, lanes: Callable[[int], int]) -> bool:
            """Returns whether `lanes(place)` of the k-th op of a row has no bit but the k-th."""
            return not any(lanes(place) & ~(1 << lane) for lane, place in enumerate(row))

        def beside(place: int) -> int:
            return behind.get(place, 0) | ahead.get(self.ops[place].results[0], 0)

        fine = [row for row in rows if is_apart(row, beside)]
        kept: list[Row] = []
        while len(fine) != len(kept):
            kept = fine
            own = {place: 1 << lane for row in kept for lane, place in enumerate(row)}
            found = self._led_to_by(own, span)
            fine = [row for row in kept if row == seeds or is_apart(row, found.__getitem__)]
        return kept

    def _led_to_by(self, own: Mapping[int, int], span: range) -> dict[int, int]:
        """Returns index of an op in `span` -> all bits in `own` of it and of what it depends on."""
        of: dict[Value, int] = {}
        found: dict[int, int] = {}
        for place in span:
            lanes = own.get(place, 0)
            for value in self.reads[place]:
                lanes |= of.get(value, 0)
            if lanes:
                found[place] = lanes
                of.update((value, lanes) for value in self.ops[place].results)
        return found

    # In which order.

    def order(self, stacks: Sequence[Stack]) -> list[Row] | None:
        """Returns an order of the body with each row of equal ops at one place, behind producers.

        Entries are tuples, of one op's index or of a row's. None if there is no such order. The old
        order is kept as far as it can be, a row where its last op was. Effects keep their order.
        """
        nodes: list[Row] = [(place,) for place in range(len(self.ops))]
        for stack in stacks:
            for row in self.rows(stack):
                for place in row:
                    nodes[place] = row
        before: dict[Row, set[Row]] = {}
        effect: Row | None = None
        for place, node in enumerate(nodes):
            mine = before.setdefault(node, set())
            mine.update(nodes[self.places[v]] for v in self.reads[place] if v in self.places)
            if len(node) == 1 and has_effect(self.ops[place]):
                mine.update((effect,) if effect is not None else ())
                effect = node
        try:
            return in_order(before, max)
        except CycleError:
            return None


def _structure(region: Region) -> Hashable:
    """Returns a region as tuples with its values renumbered from 0: equal for equal regions."""
    numbers: dict[Value, int] = {}

    def named(values: Iterable[Value]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(v, len(numbers)) for v in values])

    def inside(region: Region) -> Hashable:
        args = named(region.args)
        ops = tuple(
            (op.kind, named(op.operands), tuple(map(inside, op.regions)), named(op.results))
            for op in region.ops
        )
        return args, ops, named(region.results)

    return inside(region)


# Loops: what differs among the lanes inside.


def carries_that_differ(op: Op, count: int, differs: Sequence[bool]) -> list[bool] | None:
    """Returns for each carry whether it differs among `count` loops; None if not batchable.

    `differs` says for each operand of the loops, a carry's initial value, whether it differs.
    """
    cond, body = op.regions
    carried, after = list[bool](), list(differs)
    while after != carried:
        carried, found = after, _spread(body, count, after)
        if found is None:
            return None
        after = [a or b for a, b in zip(carried, found, strict=True)]
    return carried if _spread(cond, count, carried) == [False] else None


def _spread(region: Region, count: int, given: Sequence[bool]) -> list[bool] | None:
    """Returns which results of equal regions differ if arguments do; None if not batchable."""
    env = dict(zip(region.args, given, strict=True))
    for op in region.ops:
        differs = [env.get(v, False) for v in op.operands]
        found: Sequence[bool] | None = [False] * len(op.results)
        if op.is_loop and any(differs):
            found = carries_that_differ(op, count, differs)
        elif any(differs) and not op.regions:
            fits = form_of(op.kind, count, differs) is not None
            found = [True] * len(op.results) if fits else None
        elif any(env.get(v, False) for v in reads(op)):
            found = None
        if found is None:
            return None
        env.update(zip(op.results, found, strict=True))
    return [env[v] for v in region.results]


# Writing: rows are done at once.


def stacked(program: Program, stacks: Sequence[Stack]) -> Program:
    """Writes each row of `stacks` as one op; `Block(program).order(stacks)` must not be None."""
    block, b = Block(program), Builder(program.types)
    order = block.order(stacks)
    assert order is not None
    rows = [row for row in order if len(row) > 1]
    inside = {place for row in rows for place in row}
    written = {values for row in rows for values in block.results(row)}
    alone = set(program.body.results)  # values read one by one: they keep their numbers
    alone.update(*(read for place, read in enumerate(block.reads) if place not in inside))
    alone.update(*(v for row in rows for v in block.operands(row) if v not in written))
    # values, of each lane one -> what they are together, and whether they differ
    made: dict[tuple[Value, ...], tuple[Value, bool]] = {}

    def together(values: tuple[Value, ...]) -> tuple[Value, bool]:
        if values not in made:
            if block.same(values):
                made[values] = values[0], False
            else:
                wide = [b.reshape(v, (1, *b.types[v].shape)) for v in values]
                made[values] = b.concatenate(wide, 0), True
        return made[values]

    b.begin(isolated=True)
    for row in order:
        op = block.ops[row[0]]
        if len(row) == 1:
            b.append(op)
            continue
        b.loc = op.loc
        given = [together(values) for values in block.operands(row)]
        operands, differs = [v for v, _ in given], [d for _, d in given]
        env = dict(zip(op.operands, operands, strict=True))
        results, differ = _write(b, op, operands, differs, len(row), env)
        for values, value, has_dim in zip(block.results(row), results, differ, strict=True):
            made[values] = value, has_dim
            for lane, old in enumerate(values):
                if old in alone:
                    piece = b.slice_dim(value, 0, lane, lane + 1) if has_dim else value
                    kind = OpKind("stablehlo.reshape", (b.types[piece],), (b.types[old],), {})
                    b.append(Op(kind, (piece,), (old,), (), op.loc))
    body = b.end(program.body.args, program.body.results)
    return remove_dead(program._replace(types=tuple(b.types), body=body))


def _write(
    b: Builder,
    op: Op,
    operands: Sequence[Value],
    differs: Sequence[bool],
    count: int,
    env: dict[Value, Value],
) -> tuple[tuple[Value, ...], list[bool]]:
    """Appends one op for `count` ops like `op`; returns results, and which have a batch dim.

    Operands that differ among the ops (`differs`) have it, too: dim 0, of `count` elements. `env`
    maps the values that `op` reads to those of the new program.
    """
    if not any(differs):
        repeat_op(b, op, env)
        return tuple(env[v] for v in op.results), [False] * len(op.results)
    b.loc = op.loc
    if op.is_loop:
        return _write_loop(b, op, operands, differs, count)
    form = form_of(op.kind, count, differs)
    assert form is not None
    given = list(zip(operands, differs, strict=True))
    if form.start is not None:
        dtype = b.types[operands[form.start]].dtype
        given.insert(form.start, (b.constant(np.array(0), dtype), False))
    fitting = [  # what is the same for all, and not a scalar beside, is broadcast
        v
        if b.types[v] == want
        else b.broadcast(v, want.shape, (0,) if has_dim else range(1, want.rank))
        for (v, has_dim), want in zip(given, form.kind.operands, strict=True)
    ]
    made = b.repeat(form.kind, tuple(fitting))
    rest = [[d for d in range(b.types[v].rank) if d != form.dim] for v in made]
    moved = zip(made, rest, strict=True)
    return tuple(b.transpose(v, (form.dim, *dims)) for v, dims in moved), [True] * len(made)


def _write_loop(
    b: Builder, op: Op, operands: Sequence[Value], differs: Sequence[bool], count: int
) -> tuple[tuple[Value, ...], list[bool]]:
    """Appends one loop for `count` loops like `op`; arguments and results are as for `_write`."""
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
            made, differ = _write(b, inner, [env[v] for v in inner.operands], now, count, env)
            env.update(zip(inner.results, made, strict=True))
            flags.update(zip(inner.results, differ, strict=True))
        becomes = carried if old is op.regions[1] else [False]
        results = [wide(env[v], flags[v], c) for v, c in zip(old.results, becomes, strict=True)]
        return b.end(args, results)

    regions = tuple(region(r) for r in op.regions)
    b.loc = op.loc
    return b.repeat(OpKind(op.name, types, types, op.kind.attrs), tuple(given), regions), carried
