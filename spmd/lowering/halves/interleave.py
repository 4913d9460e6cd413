"""The order of a program in halves: while one half is exchanged, the other one computes.

before: a dot | b dot | a sum ... | b sum ... | a dot | b dot
after:  a dot | b dot | a dot     | b dot
                a sum | b sum

Each block is run ahead of time, as the timeline will run it: arithmetic on one lane, collectives on
a lane for each set of links. Of all ops whose operands are there a lane takes the one that has the
least arithmetic left to do in front of its half's next exchange, so that links have work early;
others take their turn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from spmd.ir.program import Op, Program, Region, Value, has_effect
from spmd.lowering.rewrites.clock import Clock

BOTH = -1

URGENCY = 4
"""For how many seconds of arithmetic in front of it an op waits for each second that stands between
it and the next exchange: large enough for exchanges to come first, and no op waits for ever."""


def interleave(program: Program, half_of: Mapping[Value, int], clock: Clock) -> Program:
    """Orders the ops of each block.

    Args:
      program: a local program in halves.
      half_of: a value that is made for one half -> which one it is, 0 or 1.
      clock: predicts how long ops take.
    """

    def region(old: Region) -> Region:
        ops: list[Op] = []
        run: list[Op] = []
        for op in old.ops:
            if op.regions:
                op = op._replace(regions=tuple(map(region, op.regions)))
            if op.regions or has_effect(op):  # these keep their places
                ops += [*_ordered(run, half_of, clock), op]
                run = []
            else:
                run.append(op)
        return old._replace(ops=(*ops, *_ordered(run, half_of, clock)))

    return program._replace(body=region(program.body))


def _ordered(ops: Sequence[Op], half_of: Mapping[Value, int], clock: Clock) -> Sequence[Op]:
    halves = [half_of.get(op.results[0], BOTH) for op in ops]
    return _Schedule(ops, halves, clock).run() if 1 in halves else ops


def _ranks(ops: Sequence[Op], halves: Sequence[int], clock: Clock) -> list[float]:
    """The order in which ops are taken: by the arithmetic in front of them, and left to do."""
    left: list[float] = []
    after: dict[Value, float] = {}
    for op, half in zip(reversed(ops), reversed(halves), strict=True):
        rest = 0.0
        if half == BOTH or not op.collective:
            rest = min([after.get(v, math.inf) for v in op.results]) + clock.arithmetic(op)
        left.append(rest)
        for v in op.operands:
            after[v] = min(after.get(v, math.inf), rest)
    most = max((rest for rest in left if rest < math.inf), default=0.0)
    ranks, now = [], 0.0
    for op, rest in zip(ops, reversed(left), strict=True):
        ranks.append(now + URGENCY * min(rest, most))
        now += clock.arithmetic(op)
    return ranks


class _Lane:
    """What computes, or a set of links.

    Attributes:
      free: when it has done all that it was given.
      waiting: (when its operands are there, op).
      ready: (rank, op), of those whose operands were there when it was free last.
    """

    def __init__(self) -> None:
        self.free = 0.0
        self.waiting: list[tuple[float, int]] = []
        self.ready: list[tuple[float, int]] = []

    def next(self) -> float:
        """When it can go on."""
        if self.ready:
            return self.free
        return max(self.free, self.waiting[0][0]) if self.waiting else math.inf


class _Schedule:
    """Runs a block.

    Attributes:
      readers: for each op, those that read its results.
      followers: for each op of the first half, what is done once and stands behind it.
      pending: for each op, what it needs that is not there yet.
      since: for each op, when the last that it needs was there.
      placed: the ops in their new order.
    """

    def __init__(self, ops: Sequence[Op], halves: Sequence[int], clock: Clock) -> None:
        self.ops = ops
        self.ranks = _ranks(ops, halves, clock)
        self.seconds = [clock.exchange(o) if o.collective else clock.arithmetic(o) for o in ops]
        self.lanes: dict[object, _Lane] = defaultdict(_Lane)
        self.makers = {v: i for i, op in enumerate(ops) for v in op.results}
        self.readers: list[list[int]] = [[] for _ in ops]
        self.followers: list[list[int]] = [[] for _ in ops]
        self.pending, self.since = [0] * len(ops), [0.0] * len(ops)
        self.placed: dict[int, None] = {}
        leader = -1
        for i, op in enumerate(ops):
            for maker in {self.makers[v] for v in op.operands if v in self.makers}:
                self.readers[maker].append(i)
                self.pending[i] += 1
            if self.seconds[i] and halves[i] == 0:
                leader = i
            elif self.seconds[i] and halves[i] == BOTH and leader >= 0:
                # A weight is gathered no earlier than it was: else all would be, at the beginning.
                self.followers[leader].append(i)
                self.pending[i] += 1

    def run(self) -> list[Op]:
        """The ops in the order in which they begin."""
        for i in [i for i, count in enumerate(self.pending) if not count]:
            self.enter(i)
        lanes = self.lanes
        while (now := min((lane.next() for lane in lanes.values()), default=math.inf)) < math.inf:
            self.go_on(next(lane for lane in lanes.values() if lane.next() == now), now)
        for i in range(len(self.ops)):
            self.place(i)
        return [self.ops[i] for i in self.placed]

    def go_on(self, lane: _Lane, now: float) -> None:
        """Starts the next op of a lane."""
        while lane.waiting and lane.waiting[0][0] <= now:
            i = heappop(lane.waiting)[1]
            heappush(lane.ready, (self.ranks[i], i))
        i = heappop(lane.ready)[1]
        self.place(i)
        lane.free = now + self.seconds[i]
        self.tell(self.followers[i], now)
        self.tell(self.readers[i], lane.free)

    def enter(self, i: int) -> None:
        """An op has all it needs: it waits for its lane, or is done if it takes no time."""
        if self.seconds[i]:
            op = self.ops[i]
            lane = self.lanes[op.kind.attrs["axes"] if op.collective else None]
            heappush(lane.waiting, (self.since[i], i))
        else:
            self.tell(self.readers[i], self.since[i])

    def tell(self, others: Sequence[int], now: float) -> None:
        for i in others:
            self.pending[i] -= 1
            self.since[i] = max(self.since[i], now)
            if not self.pending[i]:
                self.enter(i)

    def place(self, i: int) -> None:
        """Puts an op behind those placed before, and in front of it what makes its operands."""
        if i in self.placed:
            return
        for v in self.ops[i].operands:
            if v in self.makers:
                self.place(self.makers[v])
        self.placed[i] = None
