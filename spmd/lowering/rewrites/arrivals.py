"""Arguments in the host's memory come to GPUs in turn, not all at once.

before: `%8 = to device %1; %9 = to device %2; %5 = add %8, %3; %6 = add %9, %4`
after:  `%10, %11 = optimization_barrier %1, %3; %8 = to device %10; %5 = add %8, %3;
        %12, %13 = optimization_barrier %2, %3; %9 = to device %12; %6 = add %9, %4`

Without it XLA's scheduler for GPUs moves all of them before anything else runs, and they lie on a
device together. Those that meet one computed value, as both moments of a gradient do, come in one
turn. The first turn waits for what it meets. Each one behind it waits for what the turn before it
meets, so that it comes while that one is computed, and for what the turn before that has become, so
that two are there at most. XLA schedules by barriers, and takes them out afterwards.

An H200, a step of Llama 2 7B, 8 x 4,096 tokens, AdamW in float32: 86 GiB and 4.54 s with its state
in the host's memory, 114 GiB and 4.89 s without turns, 113 GiB and 2.97 s all on the device.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple

from spmd.ir.description import BARRIER
from spmd.ir.dialect.host import DEVICE, HOST, moves_to
from spmd.ir.program import Op, OpKind, Program, Value, reads


class _Turn(NamedTuple):
    """Moves that come together."""

    moves: list[Op]
    meets: Value  # what is computed without them, and meets them first
    makes: list[Value]  # what comes of them without more than elementwise ops, and leaves


def in_turn(program: Program) -> Program:
    """Returns a local program whose arguments in the host's memory are moved in turn."""
    body, types = program.body, list(program.types)
    graph = _Graph(program)
    if not (turns := graph.turns()):
        return program
    last = graph.last_turns(turns)
    barriers, behind = [], dict[Value, Value]()
    for n, (moves, *_) in enumerate(turns):
        # What comes of this turn or a later one cannot be waited for.
        awaited = (turns[max(n - 1, 0)].meets, *(turns[n - 2].makes if n > 1 else ()))
        held = [move.operands[0] for move in moves]
        held += dict.fromkeys(v for v in awaited if last.get(v, -1) < n)
        ends = tuple(types[v] for v in held)
        made = tuple(range(len(types), len(types) + len(held)))
        types += ends
        behind |= {move.results[0]: v for move, v in zip(moves, made, strict=False)}
        kind = OpKind(BARRIER, ends, ends, {})
        barriers.append(Op(kind, tuple(held), made, (), moves[0].loc))
    ops = [
        op._replace(operands=(behind[op.results[0]],)) if behind.keys() & op.results else op
        for op in body.ops
    ]
    body = body._replace(ops=tuple(_sorted([*ops, *barriers])))
    return program._replace(types=tuple(types), body=body)


class _Graph:
    """Who reads what at the top level of a program, and what takes more than elementwise ops."""

    def __init__(self, program: Program) -> None:
        self.program, self.ops = program, program.body.ops
        self.reads = list(map(reads, self.ops))
        self.maker = {v: i for i, op in enumerate(self.ops) for v in op.results}
        moved = (op.operands for op in self.ops if moves_to(op) == HOST)
        self.leaving = {*program.body.results, *chain.from_iterable(moved)}
        self.readers: dict[Value, list[int]] = {}
        self.computed: set[Value] = set()
        for i, op in enumerate(self.ops):
            for v in self.reads[i]:
                self.readers.setdefault(v, []).append(i)
            if _is_heavy(op) or not self.computed.isdisjoint(self.reads[i]):
                self.computed.update(op.results)

    def turns(self) -> list[_Turn]:
        """In the order in which they are needed; a move that meets nothing computed has none."""
        found: dict[Value, tuple[int, _Turn]] = {}
        for move in self.ops:
            if moves_to(move) != DEVICE or move.operands[0] not in self.program.body.args:
                continue
            inside, turn = set(move.results), None
            for i in self._readers_of(move.results):
                op, is_heavy = self.ops[i], _is_heavy(self.ops[i])
                met = self.computed.intersection(self.reads[i]) - inside
                if turn is None and met:
                    # What is awaited lies in memory: elementwise ops may be parts of a kernel.
                    value = max(met, key=self._bytes) if is_heavy else self._root(met)
                    turn = found.setdefault(value, (i, _Turn([], value, [])))[1]
                    turn.moves.append(move)
                inside.update(op.results)
                leaving = self.leaving.intersection(op.results)
                if turn is not None and (is_heavy or leaving):
                    turn.makes.extend(() if is_heavy else sorted(leaving))
                    break
        return [turn for _, turn in sorted(found.values(), key=lambda at: at[0])]

    def last_turns(self, turns: Iterable[_Turn]) -> dict[Value, int]:
        """Maps values to the last turn that they depend on, if they depend on any."""
        last = {move.results[0]: n for n, turn in enumerate(turns) for move in turn.moves}
        for op, read in zip(self.ops, self.reads, strict=True):
            if found := [last[v] for v in read if v in last]:
                last |= dict.fromkeys(op.results, max(found))
        return last

    def _readers_of(self, values: Iterable[Value]) -> Iterator[int]:
        """Numbers of the ops that values go into, directly or through others, in order."""
        ready, seen = [i for v in values for i in self.readers.get(v, ())], set[int]()
        heapify(ready)
        while ready:
            i = heappop(ready)
            if i not in seen:
                seen.add(i)
                yield i
                for v in self.ops[i].results:
                    for reader in self.readers.get(v, ()):
                        heappush(ready, reader)

    def _root(self, values: Iterable[Value]) -> Value:
        """The largest value that more than elementwise ops computed, on the way to these."""
        while True:
            value = max(self.computed.intersection(values), key=self._bytes)
            at = self.maker[value]
            if _is_heavy(self.ops[at]):
                return value
            values = self.reads[at]

    def _bytes(self, value: Value) -> tuple[int, int]:
        return self.program.types[value].bytes, -value


def _is_heavy(op: Op) -> bool:
    return bool(op.regions or op.kind.about.flops is not None or op.collective)


def _sorted(ops: list[Op]) -> Iterator[Op]:
    """Ops in their order, but for those that wait for one behind them."""
    maker = {v: i for i, op in enumerate(ops) for v in op.results}
    needs = [{maker[v] for v in reads(op) if v in maker} for op in ops]
    readers: list[list[int]] = [[] for _ in ops]
    for i, each in enumerate(needs):
        for n in each:
            readers[n].append(i)
    left = list(map(len, needs))
    ready = [i for i, n in enumerate(left) if not n]
    while ready:
        i = heappop(ready)
        yield ops[i]
        for reader in readers[i]:
            left[reader] -= 1
            if not left[reader]:
                heappush(ready, reader)
