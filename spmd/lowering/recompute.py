"""Remat of a program that exceeds the memory: recomputes values rather than keep them in memory.

Every byte that is in memory at the peak has a price in seconds. A value is recomputed where it is
read if that takes less time than keeping it costs: in the backward loop of a scan instead of being
stacked by the forward loop, or after the peak of a block instead of being kept across it. All can
be recomputed: all-gathers of weights, elementwise chains, norms, products. It is the trade-off of
Jain et al., "Checkmate" (MLSys 2020), relaxed by a price so that minimum cuts solve it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import Index, Tie, integer_of, sign_of
from spmd.ir.description import BARRIER, BROADCAST, CONVERT, DYNAMIC_SLICE, RESHAPE, SCATTER, Role
from spmd.ir.dialect.builder import Builder
from spmd.ir.min_cut import SINK, SOURCE, FlowNetwork
from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, reads, walk_region
from spmd.ir.rewrite import dedupe, recarried, remove_dead, repeat_op
from spmd.ir.types import TensorType, numpy_dtype
from spmd.lowering.rewrites.schedule import Clock
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.planning.plan import Recomputed
from spmd.predict.fusion import is_untouched
from spmd.predict.memory import peak_memory

MOMENTS = 4  # peaks of a program that are lowered one by one, the highest first
DEPTH = 8  # levels of nested loops that are rewritten, the outermost first
SPREAD = 0.25  # price of a byte: by how much the last value's exceeds the first's


def recompute(
    program: Program, mesh: Mesh, topology: Topology, price: float, limit: int,
    donated: Sequence[int] = (), exchanges: bool = True,
) -> tuple[Program, tuple[Recomputed, ...]]:  # fmt: skip
    """Recomputes values where that takes less time than keeping them at peak memory costs.

    `price`: seconds for each byte at the peak. Loops come first, then blocks while that is above
    `limit` bytes. `donated` are positions of arguments that may be overwritten; with `exchanges`,
    collectives may be recomputed. Returns the program, and which values are not kept any more.
    """
    costs = Costs(Clock(program, mesh, topology), price, exchanges)
    dropped = list[Recomputed]()
    for _ in range(DEPTH):
        b, more = Builder(program.types), list[Recomputed]()
        body = _collecting_less(program.body, 1, costs, b, more)
        if not more:
            break
        # An inner loop that is run again is now in one region with the loop that reads its stacks.
        dropped += more
        program = remove_dead(program._replace(types=tuple(b.types), body=body))
        costs = costs._replace(clock=Clock(program, mesh, topology))
    program = dedupe(program)
    memory = peak_memory(program, donated, topology.platform)
    for _ in range(MOMENTS):
        if memory.peak <= limit or not memory.order:
            break
        moment = memory.order[memory.peak_at]
        costs = costs._replace(clock=Clock(program, mesh, topology))
        relieved, more = recompute_in_block(costs, moment)
        after = peak_memory(relieved, donated, topology.platform)
        if after.peak >= memory.peak:
            break
        program, memory = relieved, after
        dropped += more
    return program, tuple(dropped)


class Costs(NamedTuple):
    """Costs, in seconds, of recomputing a local program's ops and of keeping values in memory."""

    clock: Clock  # predicts the seconds of the program's ops
    price: float  # seconds for each byte in memory at the peak
    exchanges: bool = True  # whether collectives may be done again

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
        types = self.clock.index.program.types
        return self.price * (1 + SPREAD * value / len(types)) * types[value].bytes * pieces


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


def recompute_in_block(costs: Costs, moment: Op) -> tuple[Program, list[Recomputed]]:
    """Recomputes values after `moment`, the op at the memory peak, rather than keep them across it.

    Does so in each region around the op. Returns the program, and which values are not kept.
    """
    program, dropped = costs.clock.index.program, list[Recomputed]()
    b = Builder(program.types)

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
    return remove_dead(program._replace(types=tuple(b.types), body=body)), dropped


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
        types, stored = self.b.types, self.costs.clock.stored
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


# A backward loop recomputes what its forward loop would stack for it.
#
# before: `%5 = while { %p = dot %x, %w; %q = tanh %p; collect %x, %q }; while { read %q ... }`
# after:  `%5 = while { %p = dot %x, %w; %q = tanh %p; collect %x }
#          while { read %x; %p = dot %x, %w; %q = tanh %p ... }`
#
# Each value of the forward loop's body can be collected, at the price of its memory and of writing
# and reading it, or made again in the backward loop of what is collected. What the forward loop
# changes from trip to trip can only be collected; what it reads from around it is there.


def _collecting_less(
    region: Region, runs: int, costs: Costs, b: Builder, dropped: list[Recomputed]
) -> Region:
    """Returns a region whose loops stack fewer values; appends those left out to `dropped`."""
    changed = dict[Value, Sequence[Op]]()
    for pair in pairs_of(region, costs.clock.index):
        rewrite = _Rewrite(pair, costs, runs, b)
        if rewrite.gone:
            dropped += rewrite.dropped()
            changed[pair.forward.results[0]] = rewrite.forward()
            changed[pair.backward.results[0]] = (rewrite.backward(),)
    ops: list[Op] = []
    for op in region.ops:
        if op.results and op.results[0] in changed:
            ops += changed[op.results[0]]
        else:
            inside = runs * costs.runs(op), costs, b, dropped
            regions = tuple(_collecting_less(inner, *inside) for inner in op.regions)
            ops.append(op._replace(regions=regions))
    return region._replace(ops=tuple(ops))


class _Rewrite:
    """Rewrites both loops of a `Pair`, each run `runs` times, so that fewer values are stacked."""

    def __init__(self, pair: "Pair", costs: Costs, runs: int, b: Builder) -> None:
        self.pair, self.b, self.index = pair, b, costs.clock.index
        self.around = _around(pair.forward, self.index)
        self.cores = {stack.written: _core(stack.piece, self.index) for stack in pair.stacks}
        trips = pair.trips * runs
        carried = set(_around(pair.backward, self.index).values())

        def keep(value: Value) -> float:
            """Returns the price, in seconds, of a value in the backward loop, if not recomputed."""
            if value == pair.place:
                return 0.0
            if value in self.around:
                source = self.around[value]
                lives = source in carried or source not in self.index.producers
                return 0.0 if lives else costs.held(source)
            moved = (
                2 * b.types[value].bytes / costs.clock.topology.hbm_bandwidth
            )  # written, and read
            return costs.held(value, pair.trips) + trips * moved

        ops, needed = pair.forward.regions[1].ops, self.cores.values()
        self.cut = cheapest_cut(ops, needed, keep, lambda op: trips * costs.again(op))
        # Two stacks of one value, which XLA would merge: the first is enough.
        self.stacks = {self.cores[s.written]: s for s in reversed(pair.stacks)}
        kept = [self.stacks[core] for core in self.cut.kept if core in self.stacks]
        self.gone = [stack for stack in pair.stacks if stack not in kept]  # no longer collected
        # What is collected instead, and the forward loop's results with the pieces.
        there = {pair.place, *self.around, *self.stacks}
        self.added = {v: b.value(self.stacked(v)) for v in sorted(self.cut.kept) if v not in there}

    def stacked(self, value: Value) -> TensorType:
        type_ = self.b.types[value]
        return type_.with_shape((self.pair.trips, *type_.shape))

    def dropped(self) -> list[Recomputed]:
        found = []
        for core in dict.fromkeys(self.cores[stack.written] for stack in self.gone):
            op = self.index.producers.get(core)
            if op is not None and core not in self.cut.kept:
                size = self.b.types[core].bytes * self.pair.trips
                found.append(Recomputed(op.loc, op.label, size))
        return found

    def forward(self) -> tuple[Op, ...]:
        """Returns the ops that make the new stacks, of zeros, and then the new forward loop.

        That fills the new stacks, and has those in `gone` no longer.
        """
        b, loop = self.b, self.pair.forward
        b.loc = loop.loc
        b.begin(isolated=True)
        empty = {
            value: b.broadcast(b.splat(0, b.types[value].with_shape(())), self.stacked(value).shape)
            for value in self.added
        }
        before = b.end((), ()).ops
        body = loop.regions[1]
        b.begin(isolated=True)
        for op in body.ops:
            b.append(op)
        carries = []
        for value, result in self.added.items():
            test, inside = (b.value(self.stacked(value)) for _ in range(2))
            places = self.places(self.pair.place, value)
            piece = b.reshape(value, (1, *b.types[value].shape))
            after = b.dynamic_update_slice(inside, piece, places)
            carries.append(Tie(empty[value], (test, inside, after), result))
        body = b.end(body.args, body.results)
        loop = loop._replace(regions=(loop.regions[0], body))
        return *before, recarried(loop, b.types, {s.written for s in self.gone}, carries)

    def backward(self) -> Op:
        """Returns the new backward loop; each recomputed op is right before its first reader."""
        b, loop = self.b, self.pair.backward
        body = loop.regions[1]
        carries: list[Tie] = []
        there = {source: value for value, source in _around(loop, self.index).items()}

        def carried(source: Value) -> Value:
            if source not in there:
                test, inside, result = (b.value(b.types[source]) for _ in range(3))
                carries.append(Tie(source, (test, inside, inside), result))
                there[source] = inside
            return there[source]

        b.begin(isolated=True)
        b.loc = loop.loc
        env = {self.pair.place: self.pair.read_at}
        for value in sorted(self.cut.kept - env.keys()):
            if value in self.around:
                env[value] = carried(self.around[value])
            else:
                stack = self.stacks.get(value)
                source = body.args[stack.read] if stack else carried(self.added[value])
                shape = b.types[value].shape
                places = self.places(self.pair.read_at, value)
                env[value] = b.reshape(b.dynamic_slice(source, places, (1, *shape)), shape)
        for op in self.cut.again:
            repeat_op(b, op, env, loc=again(op.loc))
        instead: dict[Value, Value] = {}
        for stack in self.gone:
            for op in stack.slices:
                b.loc = op.loc
                core = env[self.cores[stack.written]]
                instead[op.results[0]] = b.reshape(core, op.kind.results[0].shape)
        made = b.end((), ()).ops
        kept = (op for op in body.ops if not op.results or op.results[0] not in instead)
        ops = [with_operands(op, instead) for op in kept]
        for op in reversed(made):  # right before the first op that reads its results
            own = set(op.results)
            readers = (i for i, other in enumerate(ops) if not own.isdisjoint(reads(other)))
            ops.insert(next(readers, len(ops)), op)
        results = tuple(instead.get(v, v) for v in body.results)
        loop = loop._replace(regions=(loop.regions[0], Region(body.args, tuple(ops), results)))
        return recarried(loop, b.types, {s.read for s in self.gone}, carries)

    def places(self, first: Value, value: Value) -> list[Value]:
        index = self.b.types[first]
        return [first, *(self.b.splat(0, index) for _ in self.b.types[value].shape)]


def _core(piece: Value, index: Index) -> Value:
    op = index.producers.get(piece)
    if op is not None and op.name in (RESHAPE, BROADCAST):
        return op.operands[0] if op.name == RESHAPE or op.kind.is_renaming else piece
    return piece


def _around(loop: Op, index: Index) -> dict[Value, Value]:
    """Maps each argument of a loop's body that no trip changes to its value before the loop."""
    found: dict[Value, Value] = {}
    for i, (argument, value) in enumerate(zip(loop.regions[1].args, loop.operands, strict=True)):
        if is_untouched(loop, i):
            op = index.producers.get(value)
            # Other loops may hand it on, too, under another name.
            while op is not None and op.is_loop and is_untouched(op, op.results.index(value)):
                value = op.operands[op.results.index(value)]
                op = index.producers.get(value)
            found[argument] = value
    return found


# What a loop collects, one piece in each trip, and a later loop reads again piece by piece.
#
#     %5 = while(%i = 0, %a = zeros) { %p = tanh ...; return %i + 1, dynamic_update_slice %a, %p }
#     %9 = while(%j = 3, %c = %5) { %q = dynamic_slice %c, %j; ...; return %j - 1, %c }
#
# So the gradient of a scan keeps what its forward loop made: %q in one loop is %p in the other.


class Residual(NamedTuple):
    """A stack from a forward to a backward loop: carry numbers, piece, ops that read one."""

    written: int  # number of the forward loop's carry that is the stack
    read: int  # number of the backward loop's carry that is the stack
    piece: Value  # that the forward loop writes in each trip
    slices: tuple[Op, ...]  # the ops that read one piece


class Pair(NamedTuple):
    """A forward loop, the backward loop that reads its stacks, these, trips, both piece indices."""

    forward: Op
    backward: Op
    trips: int  # how often the forward loop runs: the length of every stack
    place: Value  # index of the piece that the forward loop's body writes
    read_at: Value  # index of the piece that the backward loop's body reads
    stacks: tuple[Residual, ...]


def pairs_of(region: Region, index: Index) -> list[Pair]:
    """Returns the pairs of forward and backward loops in a region; no loop is in two pairs."""
    loops = {op.results[0]: op for op in region.ops if op.is_loop and op.results}
    found: list[Pair] = []
    taken: set[Value] = set()
    for forward in loops.values():
        pairs = [] if forward.results[0] in taken else _between(forward, loops, index)
        pair = next((pair for pair in pairs if pair.backward.results[0] not in taken), None)
        if pair is not None:
            found.append(pair)
            taken.update((forward.results[0], pair.backward.results[0]))
    return found


def _between(forward: Op, loops: Mapping[Value, Op], index: Index) -> list[Pair]:
    """Returns pairs of `forward` and a loop that reads its stacks, those with most stacks first."""
    types = index.program.types
    found: dict[tuple[Value, Value, Value], list[Residual]] = {}
    for number in range(len(forward.results)):
        written = _written(forward, number, index)
        reader = _reader(forward.results[number], loops, index)
        if written is None or reader is None:
            continue
        (update, place), (backward, read) = written, reader
        slices = _slices(backward, read, index)
        places = {op.operands[1] for op in slices}
        if len(places) == 1:
            at = places.pop()
            ends = _ends(backward, at, index)
            last = update.kind.results[0].shape[0] - 1
            # What was made at `place` is recomputed at `at` in its stead.
            if ends and min(ends) >= 0 and max(ends) <= last and types[place] == types[at]:
                stack = Residual(number, read, update.operands[1], slices)
                found.setdefault((backward.results[0], place, at), []).append(stack)
    trips = index.trips[forward.results[0]] or 0
    pairs = [
        Pair(forward, loops[backward], trips, place, at, tuple(stacks))
        for (backward, place, at), stacks in found.items()
    ]
    return sorted(pairs, key=lambda pair: -len(pair.stacks))


def _written(loop: Op, number: int, index: Index) -> tuple[Op, Value] | None:
    """Returns (update op, its index value) if a loop fills a carry, one slice a trip; else None."""
    body = loop.regions[1]
    carry = body.args[number]
    update = index.producers.get(body.results[number])
    if update is None or update.name == SCATTER or update.kind.about.role != Role.UPDATE:
        return None
    if update.operands[0] != carry or index.users.get(loop.regions[0].args[number]):
        return None
    # Nothing else may read the stack while it is filled.
    if any(len(index.users[value]) != 1 for value in (carry, update.results[0])):
        return None
    shape, piece = (t.shape for t in update.kind.operands[:2])
    place = update.operands[2]
    if piece != (1, *shape[1:]):
        return None
    ends = _ends(loop, place, index)
    fills = ends and sorted(ends) == [0, shape[0] - 1] and index.trips[loop.results[0]] == shape[0]
    return (update, place) if fills else None


def _reader(value: Value, loops: Mapping[Value, Op], index: Index) -> tuple[Op, int] | None:
    """Returns (loop, carry number) if only a loop reads a value, never changing it; else None."""
    uses = index.users.get(value, ())
    if len(uses) != 1:
        return None
    (op, number) = uses[0]
    if op is None or not op.is_loop or loops.get(op.results[0]) is not op:
        return None
    is_read = any(map(index.users.get, (op.results[number], op.regions[0].args[number])))
    return (op, number) if is_untouched(op, number) and not is_read else None


def _slices(loop: Op, number: int, index: Index) -> tuple[Op, ...]:
    """Returns the ops that read a carry, if each reads one slice in the loop's body; else ()."""
    body = loop.regions[1]
    uses = index.users.get(body.args[number], ())
    ops = tuple(
        op for op, place in uses if op is not None and op.name == DYNAMIC_SLICE and place == 0
    )
    own = {op.results[0] for op in body.ops if op.results}
    fits = all(
        op.results[0] in own and op.kind.results[0].shape == (1, *op.kind.operands[0].shape[1:])
        for op in ops
    )
    # The carry is handed on by the body's return as well.
    return ops if fits and len(uses) == len(ops) + 1 else ()


def _ends(loop: Op, value: Value, index: Index) -> tuple[int, int] | None:
    """Returns what an integer of a loop's body is in its first trip and in its last one.

    None if it is not computed from constants and loop counters alone, or wraps around.
    """
    trips, dtype = index.trips.get(loop.results[0]), numpy_dtype(index.program.types[value].dtype)
    if not trips or not np.issubdtype(dtype, np.integer):
        return None
    args, op = loop.regions[1].args, index.producers.get(value)
    constant = loop.operands[args.index(value)] if value in args else value
    begin = end = integer_of(index.producers, constant)
    if value in args:
        step = index.step(loop, args.index(value))
        end = None if begin is None or step is None else begin + step * (trips - 1)
    elif begin is None and op is not None and (op.name == CONVERT or sign_of(op)):
        match [_ends(loop, v, index) for v in op.operands]:
            case [(first, last)]:
                begin, end = first, last
            case [(first, last), (other, other_last)]:
                begin, end = first + sign_of(op) * other, last + sign_of(op) * other_last
    if begin is None or end is None:
        return None
    limits = np.iinfo(dtype)
    return (begin, end) if limits.min <= min(begin, end) <= max(begin, end) <= limits.max else None
