"""`Units`: a program as decisions and what flows between them, equal decisions taken together.

A unit is whatever has a state of its own to choose: an argument, an op, a carry of a loop (or a
result of a conditional), a result of the program. Units that look alike as far as `RADIUS` steps
around are one *class*: the layers of an unrolled network share their decisions, and a plan costs as
much time as it has different parts. Colours are refined as in Weisfeiler and Leman 1968.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import Tie, ties
from spmd.ir.description import Role
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import REPLICATE
from spmd.ir.program import Op, OpKind, Region, Value
from spmd.mesh.sharding import Sharding
from spmd.planning.problem import Problem
from spmd.predict.ops import op_seconds
from spmd.propagation.projection import unsplit

RADIUS = 2  # steps around a unit that tell it from others

ARGUMENT, OP, CARRY, RESULT, WHOLE = "argument", "op", "carry", "result", "whole"


class Unit(NamedTuple):
    """One node of a program as the planner sees it: an op, an argument, a carry or a result."""

    # One of the roles above; `whole` is for uses that need all of a value. A result that looks like
    # an argument is a use of that one: its value has to get there.
    role: str
    op: Op | None = None  # the op, or the region op that a carry belongs to
    tie: Tie | None = None  # the values that share a carry's state
    number: int = 0  # the position of an argument or a result
    trips: int = 1  # how often the unit runs in one run of the program
    inner: int = 0  # how often the body of a carry's loop does


class Use(NamedTuple):
    """One class reads a `result` of another as its operand `position`, `trips` times in a run.

    Operands that look alike, as the pieces of a concatenation, have the position of the first.
    """

    source: int
    result: int
    target: int
    position: int
    trips: int


class Units(NamedTuple):
    """A program's units in classes that look alike, and which class reads which."""

    units: tuple[Unit, ...]  # the first of each class, in program order
    trips: tuple[int, ...]  # how often all units of each class together run in one run
    inner: tuple[int, ...]  # the same for the bodies of loops that carries belong to
    # Of each value its class (-1 for cheap values) and which of its results it is. A carry has two:
    # 0 is what the loop returns, 1 is the body's argument.
    of: tuple[tuple[int, int], ...]
    wishes: tuple[tuple[Sharding | None, ...], ...]  # proposals for the results of each class
    uses: tuple[Use, ...]  # what reads what, cheap values left out


def units_of(problem: Problem, radius: int = RADIUS) -> Units:
    """Groups the units of a program in classes that look alike up to `radius` steps around."""
    return _Collector(problem).classes(radius)


class _Collector:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.program = problem.program
        self.cheap = problem.propagated.cheap
        self.wishes = problem.wishes
        self.held = problem.index.held
        self.units: list[Unit] = []
        self.colours: list[int] = []
        self.unit_wishes: list[tuple[Sharding | None, ...]] = []
        self.names: dict[Hashable, int] = {}
        self.looks: dict[OpKind, tuple[Hashable, Sequence[int]]] = {}
        self.of: list[tuple[int, int]] = [(-1, 0)] * len(self.program.types)
        self.uses: list[tuple[Value, int, int, int]] = []  # value, unit, position, trips
        body = self.program.body
        for i, (value, states) in enumerate(zip(body.args, problem.arguments, strict=True)):
            self.add(Unit(ARGUMENT, number=i), (self.program.types[value], states), (value,))
        self.whole = self.add(Unit(WHOLE), WHOLE, ())
        self.region(body, 1)
        for i, (value, wanted) in enumerate(zip(body.results, problem.results, strict=True)):
            if wanted is None and i in problem.links:
                argument, _ = self.of[body.args[problem.links[i]]]
                self.uses.append((value, argument, 0, 1))
                continue
            proposal = problem.propagated.proposals[value]
            unit = self.add(Unit(RESULT, number=i), (RESULT, wanted, proposal), ())
            self.uses.append((value, unit, 0, 1))

    def add(self, unit: Unit, colour: Hashable, values: Sequence[Value]) -> int:
        number = len(self.units)
        wishes = tuple([self.wishes[v] for v in values])
        self.units.append(unit)
        self.unit_wishes.append(wishes)
        held = self.held.get(values[0], ()) if values else ()
        self.colours.append(self.names.setdefault((colour, wishes, held), len(self.names)))
        for i, value in enumerate(values):
            self.of[value] = (number, i)
        return number

    def region(self, region: Region, trips: int) -> None:
        cheap = self.cheap
        for op in region.ops:
            if op.regions:
                self.control_flow(op, trips)
            elif not cheap.issuperset(op.results):
                look, alike = self.look(op.kind)
                colour = look, trips, self.problem.stored(op)
                unit = self.add(Unit(OP, op, trips=trips), colour, op.results)
                for value, position in zip(op.operands, alike, strict=True):
                    self.uses.append((value, unit, position, trips))
            else:  # made where it is used, of scalars that are there by then
                self.uses += [(v, self.whole, 0, trips) for v in op.operands if v not in cheap]

    def look(self, kind: OpKind) -> tuple[Hashable, Sequence[int]]:
        """Returns a key shared by kinds that plan alike and, for each operand, the first like it.

        Where a stack is sliced or updated makes mostly no difference: so the layers of a loop that
        was written out are alike, too.
        """
        found = self.looks.get(kind)
        if found is None:
            if kind.about.is_mark:
                return self.looks.setdefault(kind, (kind, range(len(kind.operands))))
            rule, problem = rule_of(kind), self.problem
            seconds = op_seconds(kind, rule, unsplit(rule), problem.mesh, problem.topology)
            first: dict[Hashable, int] = {}
            alike = []
            for i, (type_, dims) in enumerate(zip(kind.operands, rule.operands, strict=True)):
                splits = [[f for f in dim if rule.factors[f].kind != REPLICATE] for dim in dims]
                groups = [i in group for group in rule.linear]
                in_place = i if kind.about.role == Role.UPDATE else -1
                alike.append(first.setdefault((type_, str(splits), str(groups), in_place), i))
            look = kind.name, kind.operands, kind.results, rule, seconds
            found = self.looks[kind] = self.names.setdefault(look, len(self.names)), alike
        return found

    def control_flow(self, op: Op, trips: int) -> None:
        is_loop, bound = op.is_loop, ties(op)
        inner = trips * self.problem.index.runs(op)
        if not is_loop:
            self.uses += [(value, self.whole, 0, trips) for value in op.operands]
        units = []
        for tie in bound:
            colour = (op.kind, inner, self.program.types[tie.result])
            carry = Unit(CARRY, op, tie, trips=trips, inner=inner if is_loop else 0)
            values = (tie.result, tie.inside[1]) if is_loop else (tie.result,)
            units.append(self.add(carry, colour, values))
            if is_loop:
                self.of[tie.inside[0]] = (units[-1], 1)
            if tie.source is not None:
                self.uses.append((tie.source, units[-1], 0, trips))
        for region in op.regions:
            self.region(region, inner)
        for region in op.regions[is_loop:]:
            for unit, value in zip(units, region.results, strict=True):
                if self.of[value][0] != unit:
                    self.uses.append((value, unit, 1, inner))
        if is_loop:
            self.uses += [(value, self.whole, 0, inner) for value in op.regions[0].results]

    def classes(self, radius: int) -> Units:
        uses = [u for u in self.uses if self.of[u[0]][0] >= 0]
        edges = np.array(
            [(*self.of[value], unit, position) for value, unit, position, _ in uses], dtype=np.int64
        ).reshape(-1, 4)
        colours = _refined(np.array(self.colours), edges, radius)
        names: dict[int, int] = {}
        class_of = [names.setdefault(c, len(names)) for c in colours.tolist()]
        first: dict[int, int] = {}
        trips, inner = [0] * len(names), [0] * len(names)
        for unit, c in enumerate(class_of):
            first.setdefault(c, unit)
            trips[c] += self.units[unit].trips
            inner[c] += self.units[unit].inner
        total: dict[tuple[int, int, int, int], int] = {}
        for (source, index, unit, position), use in zip(edges.tolist(), uses, strict=True):
            key = (class_of[source], index, class_of[unit], position)
            total[key] = total.get(key, 0) + use[3]
        return Units(
            tuple(self.units[unit] for unit in first.values()),
            tuple(trips),
            tuple(inner),
            tuple((class_of[u] if u >= 0 else -1, i) for u, i in self.of),
            tuple(self.unit_wishes[unit] for unit in first.values()),
            tuple(Use(*key, count) for key, count in total.items()),
        )


Colours = np.ndarray[tuple[int], np.dtype[np.uint64]]
_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: Colours) -> Colours:
    # Scrambles 64-bit numbers (the finaliser of SplitMix64).
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _refined(colours: Colours, edges: np.ndarray, radius: int) -> Colours:
    """Refines colours, numbers that equal units share, by what is up to `radius` steps away.

    In the first round a unit learns the colours of its neighbours and by which operand each is
    connected, in the second what these had learned in the first. Sums do not depend on the order of
    the neighbours, so units alike at the start stay alike until something near them differs.

    Trace, of five equal ops in a chain between an argument and a result, a letter a colour:
      start    x a a a a a r
      round 1  x b a a a c r    the first has the argument beside it, the last the result
      round 2  x b d a e c r    their neighbours have learned that
    Of thirty ops the 26 in the middle stay one class: they choose once, for all of them.

    Rows of `edges` are (source unit, result index, target unit, operand position).
    """
    colours = _mixed(colours.astype(np.uint64) + np.uint64(1))
    source, target = edges[:, 0], edges[:, 2]
    label = _mixed((edges[:, 1] * 4096 + edges[:, 3]).astype(np.uint64) * _MIX)
    count = len(np.unique(colours))
    for _ in range(radius):
        after = colours * _MIX
        np.add.at(after, target, _mixed(colours[source] ^ label))
        np.add.at(after, source, _mixed(colours[target] + label))
        colours = _mixed(after)
        found = len(np.unique(colours))
        if found == count:
            break
        count = found
    return colours
