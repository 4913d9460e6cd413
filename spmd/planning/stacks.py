"""Chooses equal ops to stack: what a plan loses by splitting each of them, against moving them.

Done at once, equal ops are one op with one more dim, of as many elements as there are ops
(`spmd.frontend.lanes`). Devices that split this dim do some of the ops each, whole: nothing is done
twice, and nothing is exchanged in between. This saves what the plan takes beyond that, for the ops'
own time and for reshards between them. It costs to bring operands to where they are read: each op's
to the device that does it, shared ones to all devices, and results back.

    momentum | norm, product, product, ... product | update        16 times
             ^ all-to-all                          ^ all-to-all     in place of an all-reduce each

So where a stack begins and ends is a minimum cut through a row of ops. It decides what is tried and
no more: the planner splits the stacked program as it finds best, and the predicted time decides.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from spmd.frontend.lanes import OUTSIDE, Block, Row, Stack
from spmd.ir.dialect.registry import rule_of
from spmd.ir.min_cut import SINK, SOURCE, FlowNetwork
from spmd.ir.program import Op, Value, walk_region
from spmd.planning.plan import Plan
from spmd.predict.ops import op_seconds
from spmd.predict.timeline import least_seconds
from spmd.reshard.comm import collective_seconds

TENTH = 0.1  # of what all stacks have to win, the share that each of them has to


class Stacks(NamedTuple):
    """Stacks: rows of equal ops, each row to be done as one op; the most seconds they can save."""

    stacks: tuple[Stack, ...]
    seconds: float  # the most that this can win


def stacks_of(plan: Plan, price: float) -> Stacks:
    """Returns equal ops that devices could share as stacks; empty if that saves less than `price`.

    The plan is of the program without stacks, with the predicted time of one run; the price is in
    seconds. Example: `x @ x.T` for 16 matrices that are split by rows; eight devices all-gather
    each of them, and could do two each.
    """
    most = plan.run_seconds - least_seconds(plan.problem.index, plan.mesh, plan.topology)
    none = Stacks((), 0.0)
    if plan.mesh.size < 2 or most < price:
        return none
    costs, least = _Costs(plan), price * TENTH
    block = costs.block
    classes: dict[object, list[int]] = {}
    for place, op in enumerate(block.ops):
        if _is_work(op):
            classes.setdefault(block.shape(place), []).append(place)
    alike = [places for shape, places in classes.items() if shape is not None and len(places) > 1]
    likely = [(-seconds, p) for p in alike if (seconds := costs.most(tuple(p))) >= least]
    found: list[tuple[Stack, float]] = []
    taken: set[int] = set()
    for _, places in sorted(likely):
        for seeds in independent_groups(block, places):
            rows = block.grown(seeds, taken) if taken.isdisjoint(seeds) else []
            if all(seconds < least for seconds in accumulate(map(costs.most, rows))):
                continue
            rows, seconds = costs.worth_it(block.independent(rows, seeds))
            if seconds >= least:
                first = (tuple(block.ops[place].results[0] for place in row) for row in rows)
                found.append((tuple(first), seconds))
                taken.update(place for row in rows for place in row)
    stacks: list[Stack] = []
    won = 0.0
    for stack, seconds in found:
        if block.order([*stacks, stack]) is not None:
            stacks.append(stack)
            won += seconds
    return Stacks(tuple(stacks), min(won, most)) if won >= price else none


def _is_work(op: Op) -> bool:
    """Whether an op, or one in its regions, does more than pass once over its operands."""
    about = op.kind.about
    inside = (inner for region in op.regions for inner in region.ops)
    return bool(about.flops or about.passes) or any(map(_is_work, inside))


def independent_groups(block: Block, places: Sequence[int]) -> Iterator[Row]:
    """Yields groups (two or more) of the ops at `places` in the body of which none needs another.

    They have equally many of these ops on the longest chain that leads to them: of sixteen loops
    that were written out the first iterations are a group, the second ones, and so on.
    """
    members, level = set(places), dict[Value, int]()
    groups: dict[int, list[int]] = {}
    for place in range(places[0], places[-1] + 1):
        above = max((level.get(v, 0) for v in block.reads[place]), default=0)
        if place in members:
            groups.setdefault(above, []).append(place)
            above += 1
        if above:
            level.update((v, above) for v in block.ops[place].results)
    return (tuple(group) for group in groups.values() if len(group) > 1)


class _Costs:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.block = plan, Block(plan.program)
        # Reshards by the op that reads what is moved; those inside a loop are all the loop's.
        home = {
            inner.results[0]: place
            for place, op in enumerate(self.block.ops)
            for inner in (*(o for r in op.regions for o in walk_region(r)), op)
            if inner.results
        }
        self.moves: dict[tuple[Value, int], float] = {}
        for move in plan.moves:
            place = OUTSIDE if move.user is None else home.get(move.user.results[0], OUTSIDE)
            key = move.value, place
            self.moves[key] = self.moves.get(key, 0.0) + move.seconds
        self._shares: dict[object, float] = {}

    def own(self, op: Op, count: int) -> float:
        """Returns the seconds that stacking `count` such ops saves of the own time of each."""
        plan, share = self.plan, min(count, self.plan.mesh.size)
        if op.regions:
            inside = (self.own(o, count) for region in op.regions for o in region.ops)
            return plan.problem.index.runs(op) * sum(inside)
        choice = plan.choices.get(op.results[0]) if op.results else None
        if choice is None or not choice.assignment:
            return 0.0
        key = op.kind, choice.assignment, share
        if key not in self._shares:
            rule, machine = rule_of(op.kind), (plan.mesh, plan.topology, plan.problem.stored(op))
            now = op_seconds(op.kind, rule, choice.assignment, *machine)
            whole = op_seconds(op.kind, rule, ((),) * len(rule.factors), *machine)
            self._shares[key] = max(0.0, now - whole / share)
        return self._shares[key]

    def most(self, row: Row) -> float:
        """Returns the most seconds that stacking equal ops (positions in the body) can save."""
        return sum(self.own(self.block.ops[place], len(row)) + self.moved(place) for place in row)

    def moved(self, place: int) -> float:
        op, block = self.block.ops[place], self.block
        into = [(v, place) for v in block.reads[place]]
        out = [(v, user) for v in op.results for user, _ in block.users.get(v, ())]
        return sum(self.moves.get(key, 0.0) for key in dict.fromkeys((*into, *out)))

    def lanes(self, values: Sequence[Value]) -> float:
        """Returns the seconds of an all-to-all of values, one a lane, to their lanes' devices."""
        plan = self.plan
        if all(plan.states[v] is None for v in values):
            return 0.0
        share = plan.program.types[values[0]].bytes * len(values) // plan.mesh.size
        atoms = tuple(range(len(plan.mesh.atoms)))
        args = "all_to_all", atoms, share, share, plan.mesh, plan.topology
        return collective_seconds(*args) + 2 * share / plan.topology.hbm_bandwidth

    def brought(self, values: Sequence[Value]) -> float:
        """Returns the seconds to bring lanes an operand (all-gathered if it is one for all)."""
        plan, state = self.plan, self.plan.states[values[0]]
        if not self.block.same(values):
            return self.lanes(values)
        atoms, size = tuple(state.used if state else ()), plan.program.types[values[0]].bytes
        args = "all_gather", atoms, size // plan.mesh.extent(atoms), size, plan.mesh, plan.topology
        return collective_seconds(*args)

    def worth_it(self, rows: Sequence[Row]) -> tuple[list[Row], float]:
        """Returns those of `rows` that save most if stacked (maybe none), and the seconds saved."""
        # In front of the cut is what is stacked. It cuts, and so loses or pays:
        #   source -> row                  what is won by a row
        #   source -> moved -> both rows   what is won where a row reads what another one made
        #   row -> read -> row or sink     what is made elsewhere is brought to the lanes, once
        #   row -> made -> rows or sink    what is read elsewhere is brought back, once
        block, network = self.block, FlowNetwork()
        makers = {values: row for row in rows for values in block.results(row)}
        row_at = {place: row for row in rows for place in row}
        for row in rows:
            gain = sum(self.own(block.ops[place], len(row)) for place in row)
            for values in dict.fromkeys(block.operands(row)):
                read, moved, maker = ("read", values), ("moved", values, row), makers.get(values)
                moves = dict.fromkeys(zip(values, row, strict=True))
                seconds = sum(self.moves.get(move, 0.0) for move in moves)
                network.edge(row, read, math.inf)
                if maker is None:
                    gain += seconds
                    network.edge(read, SINK, self.brought(values))
                    continue
                network.edge(read, maker, self.lanes(values))
                network.edge(SOURCE, moved, seconds)
                for both in (row, maker):
                    network.edge(moved, both, math.inf)
            for values in block.results(row):
                network.edge(row, ("made", values), self.lanes(values))
                users = [(v, user) for v in values for user, _ in block.users.get(v, ())]
                for end in dict.fromkeys(row_at.get(user, SINK) for _, user in users):
                    network.edge(("made", values), end, math.inf)
                # What is won for those who read it and are in no row.
                outside = dict.fromkeys(use for use in users if use[1] not in row_at)
                gain += sum(self.moves.get(use, 0.0) for use in outside)
            network.edge(SOURCE, row, gain)
        everything = network.numbers.keys() - {SOURCE}
        behind = network.behind_cut()
        won = network.seconds(everything) - network.seconds(behind)
        return ([row for row in rows if row not in behind], won) if won > 0 else ([], 0.0)
