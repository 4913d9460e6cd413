"""Remat: what recomputing ops costs, what to keep in memory (a minimum cut), remat of a block."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd.ir.description import BARRIER
from spmd.ir.dialect.builder import Builder
from spmd.ir.min_cut import SINK, SOURCE, FlowNetwork
from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, reads, walk_region
from spmd.ir.rewrite import repeat_op
from spmd.lowering.rewrites.schedule import Clock
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.planning.plan import Recomputed

SPREAD = 0.25  # price of a byte: by how much the last value's exceeds the first's


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs, in seconds, of recomputing a local program's ops and of keeping values in memory."""

    program: Program
    mesh: Mesh
    topology: Topology
    price: float  # seconds for each byte in memory at the peak
    exchanges: bool = True  # whether collectives may be done again

    @cached_property
    def clock(self) -> Clock:
        """Predicts the seconds of the program's ops."""
        return Clock(self.program, self.mesh, self.topology)

    def again(self, op: Op) -> float:
        """Returns the seconds of recomputing an op, regions included; infinity if not allowed."""
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
        """Returns a loop's trip count, at least 1 as 0 times infinity is NaN; 1 for other ops."""
        return max(1, self.clock.index.runs(op))

    def held(self, value: Value, pieces: int = 1) -> float:
        """Returns the price, in seconds, of `pieces` values of this one's size held at the peak."""
        # Equal layers, and products with equal contracted dims, save as much for each byte: at one
        # price they would all be held or none. So the price is a little higher for later values.
        slope = 1 + SPREAD * value / len(self.program.types)
        return self.price * slope * self.program.types[value].bytes * pieces


AGAIN = "again, rather than held"  # note of ops that are recomputed


def again(loc: Loc) -> Loc:
    """Returns an op's source location with the note that it is computed a second time."""
    return loc._replace(note=f"{loc.note} ({AGAIN})" if loc.note else AGAIN)


def with_operands(op: Op, instead: Mapping[Value, Value]) -> Op:
    """Returns a copy of an op that reads `instead[v]` in place of `v`, in its regions as well."""
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


# What to keep and what to make again: a minimum cut.
#
#     %1 = dot %0, %w; %2 = tanh %1; %3 = exp %2        needed afterwards: %2, %3
#
# Kept are %2 and %3; or %2 alone, and `exp` is done again; or nothing but arguments, and all three
# ops are. Keeping a value has a price. So has doing an op again, which needs what it reads. The
# cheapest of all such answers is a minimum cut (project selection: Rhys, "A selection problem of
# shared fixed costs and network flows", Management Science 17(3), 1970).


class Cut(NamedTuple):
    """Which values are kept in memory (or there anyway), and which ops are recomputed, in order."""

    kept: frozenset[Value]
    again: tuple[Op, ...]


def cheapest_cut(
    ops: Sequence[Op],
    needed: Iterable[Value],
    keep: Callable[[Value], float],
    redo: Callable[[Op], float],
    early: Callable[[Value, Op], float] = lambda value, op: 0.0,
) -> Cut:
    """Chooses values to keep and ops to recompute so that having `needed` values costs least.

    `keep` returns the price of keeping a value: infinity if it cannot be kept, 0 if it is there
    anyway. `redo` returns that of recomputing an op, which needs its operands; `early(value, op)`
    that of having an operand for a recomputed op sooner than its other readers need it. Values that
    none of `ops` makes can only be kept.
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
        price, maker = keep(value), makers.get(value)
        if maker is None or math.isinf(redo(maker)):
            network.edge(SOURCE, ("value", value), price)
        elif price:
            node = ("op", maker.results[0])
            network.edge(node, ("value", value), price)
            if node not in known:
                known.add(node)
                network.edge(SOURCE, node, redo(maker))
                for read in reads(maker):
                    readers.setdefault(read, []).append(maker)
                    if read not in seen:
                        seen.add(read)
                        waiting.append(read)
    for value in needed:
        network.edge(("value", value), SINK, math.inf)
    # A value that is read by ops which may be done again has to be there by then. The earlier that
    # is, the longer it is in memory, and the more it costs (`early`); of several ops only the
    # earliest counts. So prices are a staircase: each step costs what `early` of its op is above
    # the step before. With early prices 1, 3 and 3: steps of 1, 2 and 0.
    for value, ops_again in readers.items():
        last, before = 0.0, None
        waits = [(early(value, op), op) for op in ops_again]
        for wait, op in sorted(waits, key=lambda pair: pair[0]):
            node = ("op", op.results[0])
            network.edge(("value", value), node, math.inf)
            if wait > last:
                step = ("early", value, wait)
                network.edge(SOURCE, step, wait - last)
                if before is not None:
                    network.edge(before, step, math.inf)
                last, before = wait, step
            if before is not None:
                network.edge(before, node, math.inf)
    behind = network.behind_cut()
    again = tuple(op for op in ops if op.results and ("op", op.results[0]) in behind)
    made = {value for op in again for value in op.results}
    asked = dict.fromkeys((*needed, *(value for op in again for value in reads(op))))
    return Cut(frozenset(value for value in asked if value not in made), again)


# Values across the fullest moment of a block: made again behind it rather than held.
#
# before: `%2 = dot %0, %w; %3 = tanh %2; (peak) %8 = dot ...; %9 = multiply %8, %3`
# after:  `%2 = dot %0, %w; (lower) %8 = dot ...;
#          %10, %11 = optimization_barrier %2, %8; %12 = tanh %10; %9 = multiply %11, %12`
#
# The barrier lets what is made again begin no earlier than its reader's other operands are there,
# and keeps XLA from merging it with the first time. A gather begins earlier, to be hidden.


def recompute_in_block(
    program: Program, costs: Costs, moment: Op
) -> tuple[Program, list[Recomputed]]:
    """Recomputes values after `moment`, the op at the memory peak, rather than keep them across it.

    Does so in each region around the op. Returns the program, and which values are not kept.
    """
    b = Builder(program.types)
    dropped: list[Recomputed] = []

    def holds(op: Op) -> bool:
        return op is moment or any(
            inner is moment for region in op.regions for inner in walk_region(region)
        )

    def region(old: Region, runs: int) -> Region:
        full = next((i for i, op in enumerate(old.ops) if holds(op)), None)
        if full is None:
            return old
        op = old.ops[full]
        regions = tuple(region(inner, runs * costs.runs(op)) for inner in op.regions)
        ops = (*old.ops[:full], op._replace(regions=regions), *old.ops[full + 1 :])
        block = _Block(old._replace(ops=ops), full, costs, runs, b)
        dropped.extend(block.dropped())
        return block.rewritten()

    body = region(program.body, 1)
    return program._replace(types=tuple(b.types), body=body), dropped


class _Block:
    """Remat in one region: chooses what is recomputed after op `full`, at which memory peaks.

    Recomputed ops stand behind optimization barriers, right before the first op that reads them.
    """

    def __init__(self, region: Region, full: int, costs: Costs, runs: int, b: Builder) -> None:
        self.region, self.costs, self.b = region, costs, b
        self.before, self.after = region.ops[:full], region.ops[full:]
        self.makers = {value: op for op in self.before for value in op.results}
        # Values from before that moment -> the first op from then on that reads them.
        self.crossing: dict[Value, int] = {}
        for i, op in enumerate(self.after):
            for value in reads(op):
                if value in self.makers:
                    self.crossing.setdefault(value, i)
        self.returned = set(region.results)
        # How often the ops that take most of the time are repeated: the weighted median.
        seconds: dict[OpKind, list[float]] = {}
        for op in self.before:
            seconds.setdefault(op.kind, []).append(costs.clock.arithmetic(op))
        counts = sorted((len(times), sum(times)) for times in seconds.values())
        half, layers = sum(total for _, total in counts) / 2, 1
        for count, total in counts:
            layers, half = count, half - total
            if half <= 0:
                break
        self.layer = len(self.after) / layers  # ops of a layer, on the average
        # When values would have to be made again, in numbers of ops behind the fullest moment: when
        # they are read; of values that no op reads, when what is made of them is needed.
        self.needed_at: dict[Value, int] = {}
        could: dict[Value, int] = {}
        for op in reversed(self.before):
            own = [self.crossing[v] for v in op.results if v in self.crossing]
            when = min(own or [could[v] for v in op.results if v in could], default=len(self.after))
            self.needed_at.update(dict.fromkeys(op.results, when))
            for value in reads(op):
                could[value] = min(could.get(value, when), when)
        self.cut = cheapest_cut(
            self.before, self.crossing, self.keep, lambda op: runs * costs.again(op), self.early
        )
        # Values that are made again behind the moment -> the ops that make them.
        self.again = {value: op for op in self.cut.again for value in op.results}
        self.made: dict[Value, Value] = {}  # value -> its recomputed or barriered copy
        self.now = 0.0  # seconds of arithmetic since the peak
        self.past: list[tuple[float, Value]] = []  # (time, value stored by then)

    def keep(self, value: Value) -> float:
        """Returns the price of keeping a value: 0 of inputs and results, infinity if not stored."""
        if value not in self.makers or value in self.returned:
            return 0.0
        # What is computed inside its readers has no memory of its own: what it is made of does.
        is_stored = value in self.costs.clock.stored
        return self.costs.held(value) if is_stored else math.inf

    def early(self, value: Value, op: Op) -> float:
        """Returns the price of having a value for `op` before its first reader after the peak.

        It grows with the time between, to the price of keeping the value at a layer's time or more.
        """
        # A layer's values, made again together, take the memory of one layer: little beside what
        # all layers would hold. What is held for longer than that saves nothing: making the input
        # of one layer again would hold the values of all those in front of it.
        if value not in self.crossing or value in self.returned:
            return 0.0
        wait = self.crossing[value] - self.needed_at[op.results[0]]
        return self.costs.held(value) * min(1.0, max(0, wait) / self.layer)

    def dropped(self) -> list[Recomputed]:
        types, stored = self.costs.program.types, self.costs.clock.stored
        gone = [(v, self.makers[v]) for v in self.crossing if v in self.again and v in stored]
        return [Recomputed(op.loc, op.label, types[v].bytes) for v, op in gone]

    def rewritten(self) -> Region:
        if not self.dropped():
            return self.region
        self.b.begin()
        for op in self.before:
            self.b.append(op)
        stored, arithmetic = self.costs.clock.stored, self.costs.clock.arithmetic
        last = [v for v in self.makers if v in stored and v not in self.again][-1:]
        self.past += [(-math.inf, value) for value in last]
        for op in self.after:
            needed = {v for v in reads(op) if v in self.again and v not in self.made}
            missing: list[Op] = []  # the ops that make values again, the last one first
            for maker in reversed(self.cut.again if needed else ()):
                if not needed.isdisjoint(maker.results):
                    missing.append(maker)
                    needed.update(v for v in reads(maker) if v not in self.made)
            if missing:
                self.repeat(op, {maker.results[0]: maker for maker in reversed(missing)})
            self.b.append(with_operands(op, self.made))
            self.now += arithmetic(op)
            self.past += [(self.now, value) for value in op.results if value in stored]
        return self.b.end(self.region.args, [self.made.get(v, v) for v in self.region.results])

    def repeat(self, reader: Op, missing: dict[Value, Op]) -> None:
        fresh = {v for op in missing.values() for v in op.results}
        gathers = [op for op in missing.values() if op.collective]
        first = set[Value]().union(*(self.leading_to(op, missing) for op in gathers))
        early = {v: op for v, op in missing.items() if v in first}
        rest = {v: op for v, op in missing.items() if v not in first}
        seconds = sum(self.costs.clock.exchange(op) for op in gathers)
        for ops, lead in ((early, seconds), (rest, 0.0)):
            inputs = dict.fromkeys(
                v for op in ops.values() for v in reads(op) if v not in fresh and v not in self.made
            )
            self.wait(inputs, lead, reader)
            env = {v: self.made.get(v, v) for op in ops.values() for v in reads(op)}
            for op in ops.values():
                repeat_op(self.b, op, env, loc=again(op.loc))
                self.made.update((v, env[v]) for v in op.results)

    def leading_to(self, gather: Op, missing: dict[Value, Op]) -> set[Value]:
        """Returns first results of a gather and ops that feed it; empty if these do arithmetic."""
        found, waiting = set[Value](), [gather]
        while waiting:
            op = waiting.pop()
            if op is not gather and self.costs.clock.arithmetic(op):
                return set()
            found.add(op.results[0])
            waiting += [missing[v] for v in reads(op) if v in missing and v not in found]
        return found

    def wait(self, inputs: Iterable[Value], lead: float, reader: Op) -> None:
        """Makes uses of `inputs` wait, by a barrier, until `lead` seconds before `reader` runs."""
        inputs = [v for v in inputs if self.b.types[v].rank]
        if not inputs:
            return
        due = self.now - lead
        done = [value for end, value in self.past if end <= due or math.isclose(end, due)]
        own = [v for v in done if v in reader.operands] if not lead else []
        signal = (own or done)[-1:]
        values = list(dict.fromkeys((*inputs, *signal)))
        opened = self.b.barrier([self.made.get(v, v) for v in values])
        self.made.update(zip(values, opened, strict=True))
