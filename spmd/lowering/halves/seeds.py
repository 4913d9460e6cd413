"""Which dims of a program's arguments are worth cutting: those that exchanges wait for.

A dim is followed from the arguments through all ops. What is exchanged without it, while nothing
else is computed, could be exchanged half by half, beside the other half's arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from typing import NamedTuple

import numpy as np

from spmd.ir.dialect.rule import REPLICATE, RING
from spmd.ir.program import Op, OpKind, Program
from spmd.lowering.halves.cut import Cut, rule_in_blocks
from spmd.lowering.tied import Dim, Kept, TiedDims
from spmd.predict.timeline import COMPUTE, Timeline

MOST = 2
"""Seeds that are proposed."""


class Seed(NamedTuple):
    """Dims of arguments that go together, to be cut.

    Attributes:
      cuts: (number of an argument, its cut).
      seconds: for which arithmetic waits for what is exchanged of them, in one run.
    """

    cuts: tuple[tuple[int, Cut], ...]
    seconds: float


def seeds_of(program: Program, timeline: Timeline, donated: Container[int]) -> list[Seed]:
    """The seeds that promise most, best first.

    Args:
      program: a local program.
      timeline: its predicted schedule.
      donated: numbers of arguments that are not cut: they lie in memory as their results do.
    """
    tied = TiedDims(program, _passing)
    seconds: dict[Dim, float] = defaultdict(float)
    blocks: dict[Dim, dict[int, None]] = defaultdict(dict)
    for op, waits in _waits(timeline):
        (value,), (before,), (after,) = op.operands, op.kind.operands, op.kind.results
        for d, (size, left) in enumerate(zip(before.shape, after.shape, strict=True)):
            seconds[tied.of((value, d))] += max(0.0, waits)
            if left < size:
                blocks[tied.of((value, d))][size // left] = None
    arguments: dict[Dim, list[tuple[int, int]]] = defaultdict(list)
    for number, value in enumerate(program.body.args):
        if number not in donated:
            for d in range(program.types[value].rank):
                arguments[tied.of((value, d))].append((number, d))
    found = []
    for dim, waits in seconds.items():
        # Of what is scattered along the dim every device's piece has two halves, else just the dim.
        for count in (*blocks[dim], 1):
            pairs = [(number, Cut(d, count)) for number, d in arguments[dim]]
            types = [program.types[program.body.args[number]] for number, _ in pairs]
            cuts = tuple(p for p, t in zip(pairs, types, strict=True) if p[1].fits(t))
            if cuts:
                found.append(Seed(cuts, waits))
                break
    return sorted(found, key=lambda seed: -seed.seconds)[:MOST]


def _passing(kind: OpKind) -> Iterator[Kept]:
    """Pairs of (operand, dim) and (result, dim) that are cut together."""
    rule = rule_in_blocks(kind)
    if rule is None:
        count = len(kind.operands) if kind.about.is_barrier else 0
        yield from (((i, d), (i, d)) for i in range(count) for d in range(kind.operands[i].rank))
        return

    # A dim of several factors goes with the most major one that can be cut.
    def leading(dim: tuple[int, ...]) -> int:
        return next((f for f in dim if rule.factors[f].kind not in (REPLICATE, RING)), -1)

    made = defaultdict(list)
    for j, dims in enumerate(rule.results):
        for to, dim in enumerate(dims):
            made[leading(dim)].append((j, to))
    for i, dims in enumerate(rule.operands):
        for d, dim in enumerate(dims):
            if leading(dim) >= 0:
                yield from (((i, d), place) for place in made[leading(dim)])


def _waits(timeline: Timeline) -> Iterator[tuple[Op, float]]:
    """Collectives, each with the seconds for which no arithmetic runs beside it."""
    slots = [slot for slot in timeline.slots if not slot.op.regions]
    work = sorted((slot.start, slot.end) for slot in slots if slot.lane == COMPUTE)
    ends = np.array(work).reshape(-1)
    done = np.repeat(np.cumsum([0.0] + [end - start for start, end in work]), 2)[1:-1]
    for slot in slots:
        if slot.lane != COMPUTE and len(slot.op.operands) == 1:
            start, end = np.interp([slot.start, slot.end], ends, done) if work else (0.0, 0.0)
            yield slot.op, float(slot.seconds - (end - start)) * slot.trips
