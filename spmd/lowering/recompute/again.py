"""Remat of ops: which are computed again, at what cost, and where they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd.ir.description import BARRIER
from spmd.ir.min_cut import SINK, SOURCE, FlowNetwork
from spmd.ir.program import Loc, Op, Program, Region, Value, reads
from spmd.lowering.rewrites.clock import Clock
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology

SPREAD = 0.25  # how much dearer a byte of the last value is than one of the first


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of recomputing ops and of holding values of one local program, in seconds."""

    program: Program
    mesh: Mesh
    topology: Topology
    price: float  # of a byte that is held at the fullest moment
    exchanges: bool = True  # whether collectives may be done again

    @cached_property
    def clock(self) -> Clock:
        """The predicted times of the program's ops."""
        return Clock(self.program, self.mesh, self.topology)

    def again(self, op: Op) -> float:
        """Returns the seconds of recomputing an op with its regions; infinite if not allowed."""
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
        """Returns how often an op's regions run, at least 1: infinite costs stay infinite."""
        return max(1, self.clock.index.runs(op))

    def held(self, value: Value, pieces: int = 1) -> float:
        """Returns the price, in seconds, of holding a value, or `pieces` like it, at the peak."""
        # Equal layers, and products with equal contracted dims, save as much for each byte: at one
        # price they would all be held or none. So the price is a little higher for later values.
        slope = 1 + SPREAD * value / len(self.program.types)
        return self.price * slope * self.program.types[value].bytes * pieces

    def moved(self, value: Value) -> float:
        """Returns the seconds of writing a value to memory and reading it again."""
        return 2 * self.program.types[value].bytes / self.topology.hbm_bandwidth


AGAIN = "again, rather than held"  # note of ops that are done again


def again(loc: Loc) -> Loc:
    """Returns an op's source location with the note that it is computed a second time."""
    return loc._replace(note=f"{loc.note} ({AGAIN})" if loc.note else AGAIN)


def late(made: Sequence[Op], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Merges `made` into `ops`: each op of `made` stands in front of the first op that reads it."""
    first: dict[Value, int] = {}
    for i, op in reversed(list(enumerate(ops))):
        first.update(dict.fromkeys(reads(op), i))
    before: list[list[Op]] = [[] for _ in range(len(ops) + 1)]  # what goes in front of each op
    for op in reversed(made):
        place = min((first.get(v, len(ops)) for v in op.results), default=0)
        before[place].insert(0, op)
        for value in reads(op):
            first[value] = min(first.get(value, place), place)
    return tuple(op for i, own in enumerate(before) for op in (*own, *ops[i : i + 1]))


def with_operands(op: Op, instead: Mapping[Value, Value]) -> Op:
    """Returns an op that reads `instead[v]` in place of `v`, in its regions as well."""
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


# ---------------------------------------------------------------------------------------------
# What to keep and what to make again: a minimum cut.
#
#     %1 = dot %0, %w; %2 = tanh %1; %3 = exp %2        needed afterwards: %2, %3
#
# Kept are %2 and %3; or %2 alone, and `exp` is done again; or nothing but arguments, and all three
# are. Keeping a value has a price, and so has doing an op again, which needs what the op reads. The
# cheapest of all such answers is a minimum cut (project selection: Rhys, "A selection problem of
# shared fixed costs and network flows", Management Science 17(3), 1970).


class CutPrices(NamedTuple):
    """What `cheapest_cut` pays for each value and op, in seconds of one run of the program."""

    # keeping a value; infinite where it cannot be kept, 0 where it is there anyway
    keep: Callable[[Value], float]
    again: Callable[[Op], float]  # doing an op again; infinite where that is not allowed
    # of an op that is done again, for a value that it reads: having that value there from then on,
    # though it is needed later
    early: Callable[[Value, Op], float] = lambda value, op: 0.0


class Cut(NamedTuple):
    """Values that are kept or there anyway, and the ops that are recomputed, in order."""

    kept: frozenset[Value]
    again: tuple[Op, ...]


def cheapest_cut(ops: Sequence[Op], needed: Iterable[Value], prices: CutPrices) -> Cut:
    """Chooses which values to keep and which ops to recompute so that `needed` costs least.

    Values that the ops read and none of them makes can only be kept.
    """
    makers = {value: op for op in ops for value in op.results}
    needed = tuple(dict.fromkeys(needed))
    network, known = FlowNetwork(), set[object]()
    # An edge is cut if it leads from what is in front of the cut to what lies behind it:
    #   source -> op            the op is done again: its price
    #   op -> value             needed, and its op is not done again: it is kept, at its price
    #   value -> op, endless    an op that is done again needs what it reads
    #   value -> sink, endless  needed at the end
    waiting, seen = list(needed), set(needed)
    readers: dict[Value, list[Op]] = {}
    while waiting:
        value = waiting.pop()
        keep = prices.keep(value)
        maker = makers.get(value)
        if maker is None or math.isinf(prices.again(maker)):
            network.edge(SOURCE, ("value", value), keep)
        elif keep:
            node = ("op", maker.results[0])
            network.edge(node, ("value", value), keep)
            if node not in known:
                known.add(node)
                network.edge(SOURCE, node, prices.again(maker))
                for read in reads(maker):
                    readers.setdefault(read, []).append(maker)
                    if read not in seen:
                        seen.add(read)
                        waiting.append(read)
    for value in needed:
        network.edge(("value", value), SINK, math.inf)
    # A value that is read by ops which may be done again has to be there by then. The earlier that
    # is, the longer it lies in memory, and the more it costs (`prices.early`); of several ops only
    # the earliest counts. So prices are a staircase: each step costs what its op asks for beyond
    # the step before. With early prices 1, 3 and 3: steps of 1, 2 and 0.
    for value, ops_again in readers.items():
        last, before = 0.0, None
        waits = [(prices.early(value, op), op) for op in ops_again]
        for early, op in sorted(waits, key=lambda pair: pair[0]):
            node = ("op", op.results[0])
            network.edge(("value", value), node, math.inf)
            if early > last:
                step = ("early", value, early)
                network.edge(SOURCE, step, early - last)
                if before is not None:
                    network.edge(before, step, math.inf)
                last, before = early, step
            if before is not None:
                network.edge(before, node, math.inf)
    behind = network.behind_cut()
    again = tuple(op for op in ops if op.results and ("op", op.results[0]) in behind)
    made = {value for op in again for value in op.results}
    asked = dict.fromkeys((*needed, *(value for op in again for value in reads(op))))
    return Cut(frozenset(value for value in asked if value not in made), again)
