"""Ops that are done again: what that costs, and what holding costs; where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd.ir.description import BARRIER
from spmd.ir.program import Loc, Op, Program, Region, Value, reads
from spmd.lowering.rewrites.clock import Clock
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology

SPREAD = 0.25  # how much dearer a byte of the last value is than one of the first


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of the ops and values of one local program, in seconds."""

    program: Program
    mesh: Mesh
    topology: Topology
    price: float  # of a byte that is held at the fullest moment
    exchanges: bool = True  # whether collectives may be done again

    @cached_property
    def clock(self) -> Clock:
        """The times of the program's ops."""
        return Clock(self.program, self.mesh, self.topology)

    def again(self, op: Op) -> float:
        """Seconds of doing an op, and all inside it, a second time; infinite if it must not be."""
        about = op.kind.about
        if about.has_effect or not op.results or not (about.is_repeatable or op.name == BARRIER):
            return math.inf
        if op.regions:
            inside = sum(self.again(inner) for region in op.regions for inner in region.ops)
            return self.runs(op) * inside
        if op.collective:
            may = self.exchanges and "axes" in op.kind.attrs
            return self.clock.exchange(op) if may else math.inf
        return self.clock.arithmetic(op)

    def runs(self, op: Op) -> int:
        """How often the regions of an op run; at least once, so that infinite stays infinite."""
        return max(1, self.clock.index.runs(op))

    def held(self, value: Value, pieces: int = 1) -> float:
        """Price of a value, or of so many pieces like it, in memory at the fullest moment."""
        # Equal layers, and products with equal contracted dims, save as much for each byte: at one
        # price they would all be held or none. So the price is a little higher for later values.
        slope = 1 + SPREAD * value / len(self.program.types)
        return self.price * slope * self.program.types[value].bytes * pieces

    def moved(self, value: Value) -> float:
        """Seconds of writing a value to memory and reading it again."""
        return 2 * self.program.types[value].bytes / self.topology.hbm_bandwidth


AGAIN = "again, rather than held"  # note of ops that are done again


def again(loc: Loc) -> Loc:
    """The source line of an op, with the note that it is computed a second time there."""
    return loc._replace(note=f"{loc.note} ({AGAIN})" if loc.note else AGAIN)


def late(made: Sequence[Op], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Ops in their order, each of some others in front of the first op that reads it."""
    first: dict[Value, int] = {}
    for i, op in reversed(list(enumerate(ops))):
        first.update(dict.fromkeys(reads(op), i))
    places: list[int] = []
    for op in reversed(made):
        place = min((first.get(v, len(ops)) for v in op.results), default=0)
        places.append(place)
        for value in reads(op):
            first[value] = min(first.get(value, place), place)
    waiting = list(zip(reversed(places), made, strict=True))
    waiting.sort(key=lambda item: item[0])
    found: list[Op] = []
    for i, op in enumerate(ops):
        while waiting and waiting[0][0] <= i:
            found.append(waiting.pop(0)[1])
        found.append(op)
    return *found, *(op for _, op in waiting)


def with_operands(op: Op, instead: Mapping[Value, Value]) -> Op:
    """An op that reads other values in the place of some, inside its regions as well."""
    operands = tuple(instead.get(v, v) for v in op.operands)
    regions = tuple(
        Region(
            region.args,
            tuple(with_operands(inner, instead) for inner in region.ops),
            tuple(instead.get(v, v) for v in region.results),
        )
        for region in op.regions
    )
    return op._replace(operands=operands, regions=regions)
