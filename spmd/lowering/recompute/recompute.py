"""Remat of a program that does not fit: it computes values again rather than holding them.

Every byte that is held at the moment of peak memory gets a price. What is worth less than its price
is recomputed where it is read: in the backward loop of a scan instead of being stacked by its
forward loop, or behind the peak of a block instead of being held across it. A weight may be
gathered again, an elementwise chain, a norm or a product computed again: whatever saves the most
memory for its seconds. It is the trade-off of Jain et al., "Checkmate" (MLSys 2020), relaxed by a
price of memory so that minimum cuts solve it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, reads, walk_region
from spmd.ir.rewrite import dedupe, remove_dead, repeat_op
from spmd.lowering.recompute.again import Costs, CutPrices, again, cheapest_cut, with_operands
from spmd.lowering.recompute.loops import recompute_in_loops
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.planning.plan import Recomputed
from spmd.predict.memory import peak_memory

ROUNDS = 4  # moments of a program that are relieved, the fullest first


def recompute(
    program: Program,
    mesh: Mesh,
    topology: Topology,
    price: float,
    limit: int,
    donated: Sequence[int] = (),
    exchanges: bool = True,
) -> tuple[Program, tuple[Recomputed, ...]]:
    """Remats values where that costs less than the price of holding them at peak memory.

    `price` is in seconds for each byte held there. Loops come first, then blocks while the peak is
    above `limit` bytes. `donated` are arguments that may be overwritten; with `exchanges`,
    collectives may be done again. Returns the program, and what it no longer holds.
    """
    costs = Costs(program, mesh, topology, price, exchanges)
    program, dropped = recompute_in_loops(program, costs)
    program = dedupe(program)
    memory = peak_memory(program, donated, topology.platform)
    for _ in range(ROUNDS):
        if memory.peak <= limit or not memory.order:
            break
        moment = memory.order[memory.peak_at]
        relieved, more = recompute_in_block(program, replace(costs, program=program), moment)
        relieved = remove_dead(relieved)
        after = peak_memory(relieved, donated, topology.platform)
        if after.peak >= memory.peak:
            break
        program, memory = relieved, after
        dropped += more
    return program, tuple(dropped)


# ---------------------------------------------------------------------------------------------
# Values across the fullest moment of a block: made again behind it rather than held.
#
# before: `%2 = dot %0, %w; %3 = tanh %2; (full here) %8 = dot ...; %9 = multiply %8, %3`
# after:  `%2 = dot %0, %w; (no longer) %8 = dot ...;
#          %10, %11 = optimization_barrier %2, %8; %12 = tanh %10; %9 = multiply %11, %12`
#
# The barrier lets what is made again begin no earlier than what has to wait for it anyway, and
# keeps XLA from finding that it has the value already. A gather begins earlier, to be hidden.


def recompute_in_block(
    program: Program, costs: Costs, moment: Op
) -> tuple[Program, list[Recomputed]]:
    """Remats values held while `moment`, the op at the peak, runs, in every block around it."""
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
    """A block of ops, and the one at which memory peaks: what is recomputed behind it."""

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
        # How often the ops are repeated that take most of the time: the weighted median.
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
        prices = CutPrices(self.keep, lambda op: runs * costs.again(op), self.early)
        cut = cheapest_cut(self.before, self.crossing, prices)
        # Values that are made again behind the moment -> the ops that make them.
        self.again = {value: op for op in cut.again for value in op.results}

    def keep(self, value: Value) -> float:
        """Returns the price of holding a value across the peak; 0 for the block's own ends."""
        if value not in self.makers or value in self.returned:
            return 0.0
        # What is computed inside its readers has no memory of its own: what it is made of does.
        is_stored = value in self.costs.clock.stored
        return self.costs.held(value) if is_stored else math.inf

    def early(self, value: Value, op: Op) -> float:
        """Returns the price of having a value before its first reader, as a recomputed op needs it.

        It then lies in memory from there on. For a layer's time or longer, that costs as much as
        holding it.
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
        b = self.b
        b.begin()
        for op in self.before:
            b.append(op)
        stored = self.costs.clock.stored
        last = [v for v in self.makers if v in stored and v not in self.again][-1:]
        behind = _Again(b, self.again, self.costs, last)
        for op in self.after:
            b.append(behind.with_values_for(op))
            behind.ran(op)
        results = tuple(behind.now(v) for v in self.region.results)
        return b.end(self.region.args, results)


class _Again:
    """Appends recomputed ops to a block, behind optimization barriers, when they are first read."""

    def __init__(
        self, b: Builder, again: dict[Value, Op], costs: Costs, last: Sequence[Value]
    ) -> None:
        self.b, self.again, self.costs = b, again, costs
        self.made: dict[Value, Value] = {}  # what is not held, or is behind a barrier, now
        # (time of arithmetic by which it is stored, value) from the fullest moment on
        self.past = [(-math.inf, value) for value in last]
        self.clock = 0.0

    def now(self, value: Value) -> Value:
        return self.made.get(value, value)

    def ran(self, op: Op) -> None:
        self.clock += self.costs.clock.arithmetic(op)
        stored = self.costs.clock.stored
        self.past += [(self.clock, value) for value in op.results if value in stored]

    def with_values_for(self, op: Op) -> Op:
        """Returns an op that reads recomputed values, once those that are missing are appended."""
        missing: dict[Value, Op] = {}  # the ops that make values again, in order
        waiting = [(value, False) for value in reversed(reads(op))]
        while waiting:
            value, ready = waiting.pop()
            maker = self.again.get(value)
            if maker is None or value in self.made or maker.results[0] in missing:
                continue
            if ready:
                missing[maker.results[0]] = maker
            else:
                waiting.append((value, True))
                waiting += [(v, False) for v in reads(maker)]
        if missing:
            self.repeat(op, missing)
        return with_operands(op, self.made)

    def repeat(self, reader: Op, missing: dict[Value, Op]) -> None:
        fresh = {v for op in missing.values() for v in op.results}
        gathers = [op for op in missing.values() if op.collective]
        first = set[Value]()
        for op in gathers:
            first |= self.leading_to(op, missing)
        early = {v: op for v, op in missing.items() if v in first}
        rest = {v: op for v, op in missing.items() if v not in first}
        seconds = sum(self.costs.clock.exchange(op) for op in gathers)
        for ops, lead in ((early, seconds), (rest, 0.0)):
            inputs = dict.fromkeys(
                v for op in ops.values() for v in reads(op) if v not in fresh and v not in self.made
            )
            self.wait(inputs, lead, reader)
            env = {v: self.now(v) for op in ops.values() for v in reads(op)}
            for op in ops.values():
                repeat_op(self.b, op, env, loc=again(op.loc))
                self.made.update((v, env[v]) for v in op.results)

    def leading_to(self, gather: Op, missing: dict[Value, Op]) -> set[Value]:
        """Returns a gather and the ops that feed it; nothing if one of these is arithmetic."""
        found, waiting = set[Value](), [gather]
        while waiting:
            op = waiting.pop()
            if op is not gather and self.costs.clock.arithmetic(op):
                return set()
            found.add(op.results[0])
            waiting += [missing[v] for v in reads(op) if v in missing and v not in found]
        return found

    def wait(self, inputs: Iterable[Value], lead: float, reader: Op) -> None:
        """Puts `inputs` behind a barrier that opens `lead` seconds before the reader runs."""
        inputs = [v for v in inputs if self.b.types[v].rank]
        if not inputs:
            return
        due = self.clock - lead
        done = [value for end, value in self.past if end <= due or math.isclose(end, due)]
        own = [v for v in done if v in reader.operands] if not lead else []
        signal = (own or done)[-1:]
        values = list(dict.fromkeys((*inputs, *signal)))
        opened = self.b.barrier([self.now(v) for v in values])
        self.made.update(zip(values, opened, strict=True))
