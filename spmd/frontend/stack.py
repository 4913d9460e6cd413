"""Stack: equal work on different values, done one after another, is done at once.

before: `%4 = dot %0, %0; %5 = tanh %4;  %6 = dot %1, %1; %7 = tanh %6`
after:  `%8 = concatenate (reshape %0), (reshape %1); %9 = dot_general[batch 0] %8, %8;
         %10 = tanh %9; %5 = reshape (slice %10 [0:1]); %7 = reshape (slice %10 [1:2])`

A Python loop over matrices, layers or members of an ensemble writes such programs. A device could
do some of them and leave the rest to others, but what is split is a dim, and there is none that
runs over them until they are stacked.

Which ops do the same is found from a few that do (`Block.grown`): what makes their operands, and
what reads their results, does the same as long as it is of one kind. Each op of a *row* does in its
*lane* what the first one does in the first lane. No op of a lane may need one of another lane.
Which of the rows are worth it is for `spmd.planning.stacks` to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmd.ir.dialect.batched import Batched, form_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values, has_effect, reads
from spmd.ir.rewrite import remove_dead, repeat_op

Row = tuple[int, ...]
"""Places of ops, of each lane one, that do the same."""

OUTSIDE = -1
"""In place of a reader: a region's results, or an op that reads a value inside its regions."""


class Stack(NamedTuple):
    """Ops that are to be done at once.

    Attributes:
      rows: of each op the first results in every lane.
    """

    rows: tuple[tuple[Value, ...], ...]

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.rows[0])


def described(program: Program, stack: Stack) -> str:
    """`16 times dot_general and 56 more ops (muon.py:12 (step))`."""
    first = {op.results[0]: op for op in program.body.ops if op.results}
    ops = [first[row[0]] for row in stack.rows]
    more = f" and {len(ops) - 1} more ops" if ops[1:] else ""
    work = ops[0]  # rows are found from it
    return f"{stack.lanes} times {work.label}{more} ({work.loc.source or 'unknown'})"


class Block:
    """The ops of a program's body, by place.

    Attributes:
      program: the program.
      ops: the ops.
      places: the place of the op that makes a value; arguments have none.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.ops = program, program.body.ops
        self.places = {v: place for place, op in enumerate(self.ops) for v in op.results}
        self._shapes: dict[int, Hashable] = {}

    @cached_property
    def reads(self) -> list[tuple[Value, ...]]:
        """For each op all that it reads."""
        return [reads(op) if op.regions else op.operands for op in self.ops]

    @cached_property
    def users(self) -> Mapping[Value, Sequence[tuple[int, int]]]:
        """For each value the places that read it, and as which operand."""
        users: dict[Value, list[tuple[int, int]]] = {}
        for place, op in enumerate(self.ops):
            for i, value in enumerate(self.reads[place]):
                users.setdefault(value, []).append((place, i if i < len(op.operands) else OUTSIDE))
        for value in self.program.body.results:
            users.setdefault(value, []).append((OUTSIDE, OUTSIDE))
        return users

    def shape(self, place: int) -> Hashable:
        """What ops that do the same have in common; None for one that cannot be stacked."""
        if place not in self._shapes:
            op = self.ops[place]
            self._shapes[place] = op.kind
            if op.regions:
                is_closed = op.is_loop and not any(map(free_values, op.regions))
                can = is_closed and not has_effect(op)
                self._shapes[place] = (op.kind, *map(_structure, op.regions)) if can else None
        return self._shapes[place]

    def same(self, values: Iterable[Value]) -> bool:
        """Whether values are one, or constants that are alike."""
        return len({self._name(v) for v in values}) == 1

    def _name(self, value: Value) -> Hashable:
        op = self.ops[self.places[value]] if value in self.places else None
        return op.kind if op is not None and op.kind.about.is_source else value

    def operands(self, row: Row) -> list[tuple[Value, ...]]:
        """Each operand of a row's ops, in every lane."""
        return list(zip(*(self.ops[place].operands for place in row), strict=True))

    def results(self, row: Row) -> list[tuple[Value, ...]]:
        """Each result of a row's ops, in every lane."""
        return list(zip(*(self.ops[place].results for place in row), strict=True))

    def rows(self, stack: Stack) -> list[Row]:
        """The rows of a stack by place."""
        return [tuple(self.places[v] for v in row) for row in stack.rows]

    # What does the same.

    def grown(self, seeds: Row, taken: Iterable[int] = ()) -> list[Row]:
        """Every row that is found from one.

        Args:
          seeds: the one; its ops are independent.
          taken: places of ops that are in other stacks.
        """
        lanes = {place: (seeds, lane) for lane, place in enumerate(seeds)}
        rows, used = {seeds: None}, set(taken)
        if not self._fits(seeds):
            return []
        waiting = [seeds]
        while waiting:
            for row in self._beside(waiting.pop()):
                free = used.isdisjoint(row) and lanes.keys().isdisjoint(row)
                if free and len(set(row)) == len(row) and self._fits(row):
                    lanes.update((place, (row, lane)) for lane, place in enumerate(row))
                    rows[row] = None
                    waiting.append(row)
        return list(rows)

    def _beside(self, row: Row) -> Iterator[Row]:
        """Of ops that do the same, those that make the same operand, or read the same result."""
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
        """Whether ops do the same and can be done at once."""
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
        """The rows in which no lane needs another.

        Lanes are bits. First go ops that two lanes' seeds lead to, or that lead to two lanes'
        seeds: the layers of a network, found from the gradients of its weights. Then those
        that an op of another lane leads to in some other way.
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
        behind = self._led_to_by(seed, span)

        def is_apart(row: Row) -> bool:
            return all(
                not (behind.get(place, 0) | ahead.get(self.ops[place].results[0], 0)) & ~(1 << lane)
                for lane, place in enumerate(row)
            )

        kept = [row for row in rows if is_apart(row)]
        while True:
            own = {place: 1 << lane for row in kept for lane, place in enumerate(row)}
            found = self._led_to_by(own, span)
            fine = [
                row
                for row in kept
                if row == seeds
                or not any(found[place] & ~(1 << lane) for lane, place in enumerate(row))
            ]
            if len(fine) == len(kept):
                return kept
            kept = fine

    def _led_to_by(self, own: Mapping[int, int], span: range) -> dict[int, int]:
        """For each op, the lanes of the ops that lead to it, its own included."""
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
        """Ops and rows so that each comes behind what it reads; None if there is no such order.

        Each is as early as it can be without passing what was in front of it, a row at the place of
        its last op. Effects keep their order.
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
            if node in mine:
                return None
        behind: dict[Row, list[Row]] = {}
        for node, mine in before.items():
            for other in mine:
                behind.setdefault(other, []).append(node)
        missing = {node: len(mine) for node, mine in before.items()}
        ready = [(max(node), node) for node, count in missing.items() if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            _, node = heapq.heappop(ready)
            ordered.append(node)
            for other in behind.get(node, ()):
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, (max(other), other))
        return ordered if len(ordered) == len(before) else None


def _structure(region: Region) -> Hashable:
    """A region that reads nothing from around it, whatever its values are called."""
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


# ---------------------------------------------------------------------------------------------
# Loops: what differs among the lanes inside, and how it is done at once.


def carries_that_differ(op: Op, count: int, differs: Sequence[bool]) -> list[bool] | None:
    """Which carries of a loop differ among lanes; None if its trips cannot be done at once.

    Args:
      op: the loop.
      count: the number of lanes.
      differs: for each operand whether it does.
    """
    cond, body = op.regions
    carried = list(differs)
    while True:
        env = dict(zip(body.args, carried, strict=True))
        if not _spread(body, count, env):
            return None
        after = [a or env[v] for a, v in zip(carried, body.results, strict=True)]
        if after == carried:
            break
        carried = after
    env = dict(zip(cond.args, carried, strict=True))
    is_shared = _spread(cond, count, env) and not any(env[v] for v in cond.results)
    return carried if is_shared else None


def _spread(region: Region, count: int, env: dict[Value, bool]) -> bool:
    """Adds for each value of a region whether it differs; False if an op has no form for that."""
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
            return False
        env.update(zip(op.results, found, strict=True))
    return True


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


# ---------------------------------------------------------------------------------------------
# Writing.


def _write_batched(
    b: Builder, form: Batched, operands: Sequence[Value], differs: Sequence[bool]
) -> tuple[Value, ...]:
    """Appends a batched op; what is the same for all, and not a scalar beside, is broadcast.

    Args:
      b: the builder that it is appended to.
      form: what `form_of` gave.
      operands: those that differ have a new dim in front.
      differs: for each operand whether it does.

    Returns:
      Its results, with a new dim in front.
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


def stacked(program: Program, stacks: Sequence[Stack]) -> Program:
    """Does the ops of each stack at once.

    Args:
      program: a whole program.
      stacks: of its body, such that there is an order (`Block.order`).
    """
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
    """Writes rows.

    Attributes:
      b: the builder. Values that are read one by one keep their numbers.
      made: values, of each lane one -> what they are together, and whether they differ.
      alone: values of rows that are read one by one.
    """

    def __init__(self, block: Block, rows: Sequence[Row]) -> None:
        self.block, self.b = block, Builder(block.program.types)
        self.b.begin(isolated=True)
        self.made: dict[tuple[Value, ...], tuple[Value, bool]] = {}
        inside = {place for row in rows for place in row}
        self.alone = set(block.program.body.results)
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
