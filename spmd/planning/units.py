"""`Units`: a program as decisions and what flows between them, equal decisions taken together.

A unit is whatever has a sharding of its own to choose: an argument, an op, a carry of a loop (or a
result of a conditional), a result of the program. Units that look alike as far as `RADIUS` steps
around are one *class*, and decide alike: so the layers of an unrolled network take as long to plan
as one of each sort. `Domains` are what each class decides between. Colours are refined as in
Weisfeiler and Leman 1968.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from spmd.ir.control_flow import Tie, ties
from spmd.ir.description import Role
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import REDUCE, REPLICATE
from spmd.ir.program import Op, OpKind, Region, Value
from spmd.mesh.sharding import Axes, Sharding, is_even, replicated
from spmd.planning.choices import Choices, Sums, axis_sets
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem, laid_out
from spmd.predict.ops import op_seconds
from spmd.propagation.projection import unsplit
from spmd.reshard.paths import States

RADIUS = 2  # steps around a unit that tell it from others

ARGUMENT, OP, CARRY, RESULT, WHOLE = "argument", "op", "carry", "result", "whole"


class Unit(NamedTuple):
    """Something whose sharding a planner decides: an op, an argument, a carry or a result."""

    # One of the roles above; `whole` is for uses that need all of a value. A result that looks like
    # an argument is a use of that one: its value has to get there.
    role: str
    op: Op | None = None  # the op, or the region op that a carry belongs to
    tie: Tie | None = None  # the values that share a carry's state
    number: int = 0  # the position of an argument or a result
    # How often the unit, or all units of its class together, run in one run of the program; and how
    # often the bodies of a carry's loops do.
    trips: int = 1
    inner: int = 0


class Use(NamedTuple):
    """Class `target` reads the result number `result` of class `source`, `trips` times in one run.

    It is the reader's operand `position`: the first of several operands that look alike.
    """

    source: int
    result: int
    target: int
    position: int
    trips: int


class Units(NamedTuple):
    """A program's units (ops, arguments, ...) in classes that look alike, and their reads."""

    units: tuple[Unit, ...]  # the first of each class, in program order, with all of their trips
    # Of each value its class (-1 for cheap values) and which of its results it is. A carry has two:
    # 0 is what the loop returns, 1 is the body's argument.
    of: tuple[tuple[int, int], ...]
    uses: tuple[Use, ...]  # what reads what, cheap values left out


def units_of(problem: Problem, radius: int = RADIUS) -> Units:
    """Returns the units of a program in classes that look alike up to `radius` steps around."""
    return _Collector(problem).classes(radius)


class _Collector:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.program = problem, problem.program
        self.cheap = problem.propagated.cheap
        self.units: list[Unit] = []
        self.colours: list[int] = []
        self.names: dict[Hashable, int] = {}
        self.look = cache(self._look)
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
        self.units.append(unit)
        wishes = tuple([self.problem.wishes[v] for v in values])
        held = self.problem.index.held.get(values[0], ()) if values else ()
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

    def _look(self, kind: OpKind) -> tuple[Hashable, Sequence[int]]:
        """Returns a key shared by kinds that plan alike; each operand's first alike, by position.

        The key tells apart no more than matters for a plan, mostly not where a stack is sliced or
        updated: so the layers of a loop that was written out are alike, too.
        """
        if kind.about.is_mark:
            return kind, range(len(kind.operands))
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
        return self.names.setdefault(look, len(self.names)), alike

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
        reads = [
            ((*self.of[value], unit, position), trips)
            for value, unit, position, trips in self.uses
            if self.of[value][0] >= 0
        ]
        class_of = _refined(self.colours, [edge for edge, _ in reads], radius)
        first: dict[int, Unit] = {}
        for unit, c in zip(self.units, class_of, strict=True):
            if (known := first.get(c)) is not None:
                trips, inner = known.trips + unit.trips, known.inner + unit.inner
                unit = known._replace(trips=trips, inner=inner)
            first[c] = unit
        total = Counter[Edge]()
        for (source, index, target, position), trips in reads:
            total[class_of[source], index, class_of[target], position] += trips
        return Units(
            tuple(first.values()),
            tuple((class_of[u] if u >= 0 else -1, i) for u, i in self.of),
            tuple(Use(*key, count) for key, count in total.items()),
        )


Edge = tuple[int, int, int, int]  # source unit, number of its result, target unit, its operand


def _refined(colours: Sequence[int], edges: Sequence[Edge], radius: int) -> list[int]:
    """Returns a number (colour) of each unit, equal for those alike up to `radius` steps away.

    `colours` are those of the units themselves. In the first round a unit learns the colours of its
    neighbours and by which operand each is connected, in the second what these had learned in the
    first. So units alike at the start stay alike until something near them differs.

    Trace, of five equal ops in a chain between an argument and a result, a letter a colour:
      start    x a a a a a r
      round 1  x b a a a c r    the first has the argument beside it, the last the result
      round 2  x b d a e c r    their neighbours have learned that
    Of thirty ops the 26 in the middle stay one class: they choose once, for all of them.
    """
    for _ in range(radius):
        near: list[list[tuple[int, ...]]] = [[] for _ in colours]
        for source, index, target, position in edges:
            near[target].append((0, index, position, colours[source]))
            near[source].append((1, index, position, colours[target]))
        names: dict[Hashable, int] = {}
        around = zip(colours, near, strict=True)
        colours = [names.setdefault((own, *sorted(seen)), len(names)) for own, seen in around]
    return list(colours)


# What units decide between: the states of arguments and carries, and the choices of ops. They have
# three sources, the likely first. *Suggested* are choices that follow from the proposals for an
# op's values. *Taken* are those of a plan for ops of the same kind. *Placed* is every way to split
# an op's factors, or a carry's dims, over some axes of the mesh, or to leave values partial over
# them, wished for or not; partial values are among these only where one may arrive.

Taken = Mapping[tuple[OpKind, Axes], tuple[Choice, ...]]  # by kind of op and axes held there


def taken_by(plan: Plan) -> Taken:
    """Returns (kind of op, atoms held there) -> the choices that a plan made for such ops."""
    found: dict[tuple[OpKind, Axes], dict[Choice, None]] = {}
    for op in plan.program.walk():
        if not op.regions and (choice := plan.choices.get(op.results[0])) is not None:
            held = plan.problem.resharder.held(op.results[0])
            found.setdefault((op.kind, held), {})[choice] = None
    return {key: tuple(choices) for key, choices in found.items()}


class Domains(NamedTuple):
    """For each class of units the choices and states that the solver decides between."""

    left: tuple[tuple[States, ...], ...]  # of each result, the state for each choice
    choices: tuple[tuple[Choice, ...], ...]  # of ops; none for other classes
    suggested: tuple[int, ...]  # how many of these, at the front, the marks lead to


def domains_of(
    problem: Problem,
    units: Units,
    choices: Choices,
    axes: Sequence[Axes] = (),
    base: Plan | None = None,
    taken: Taken | None = None,
) -> Domains:
    """Returns, for each class of units, the choices and states that the solver decides between.

    Ops have the choice of the plan `base`, those that proposals lead to, and those that place
    `axes` in every way, others being as in `base`; where `taken` has choices for such ops, those
    are in place of the placements. Arguments have the states that the problem allows.
    """
    left: list[tuple[States, ...]] = []
    made: list[tuple[Choice, ...]] = []
    suggested: list[int] = []
    for unit, sums in zip(units.units, _sums_arriving(problem, units), strict=True):
        options: tuple[Choice, ...] = ()
        states: tuple[States, ...] = ()
        count = 1
        if unit.role == OP:
            assert unit.op is not None
            # The choices that follow from what is proposed for its values, and the known one.
            operands, results = (
                tuple([(wish,) if (wish := problem.wishes[v]) is not None else () for v in values])
                for values in (unit.op.operands, unit.op.results)
            )
            first = choices.around(unit.op, operands, results)
            if (known := base.choice(unit.op) if base else None) is not None:
                first = tuple(dict.fromkeys((known, *first)))
            held = choices.resharder.held(unit.op.results[0])
            more = (taken or {}).get((unit.op.kind, held))
            more = more or choices.placed(unit.op, axes, known, sums)
            options, count = tuple(dict.fromkeys((*first, *more))), len(first)
            states = tuple(tuple([c.results[k] for c in options]) for k in range(len(results)))
        elif unit.role == ARGUMENT:
            states = (problem.arguments[unit.number],)
        elif unit.role == CARRY:
            assert unit.tie is not None
            hows = [how for _, how in sums]
            states = (_states_of_carry(problem, unit.tie.result, axes, base, hows),) * 2
        left.append(states)
        made.append(options)
        suggested.append(count)
    return Domains(tuple(left), tuple(made), tuple(suggested))


def _states_of_carry(
    problem: Problem, value: Value, axes: Sequence[Axes], base: Plan | None, hows: Sequence[str]
) -> States:
    """Returns the states of a carry: likely ones, all with `axes` on dims, in sums, or nowhere."""
    type_, held = problem.program.types[value], problem.index.held.get(value, ())
    likely = (base and base.states[value], problem.wishes[value], replicated(type_.rank))
    wished = [s for s in likely if s is not None]
    runs = [atoms for atoms in axes if set(held).isdisjoint(atoms)]
    start, moved = wished[0], set(itertools.chain(*runs))
    dims = tuple([tuple([a for a in own if a not in moved]) for own in start.dims])
    owed = tuple([a for a in start.partial if a not in moved])
    split = laid_out(dims, runs, lambda d, own: is_even(type_.shape[d], own, problem.mesh))
    placed = [
        Sharding(each).with_partial((*owed, *more), how)
        for how in ([start.kind] if owed else hows or [""])
        for more in ((), *(axis_sets(runs) if how else ()))
        for each in split
        if set(more).isdisjoint(itertools.chain(*each))
    ]
    return tuple(dict.fromkeys((*wished, *placed)))


def _sums_arriving(problem: Problem, units: Units) -> list[Sums]:
    """Returns for each class the groups of operands that may arrive partial, and how terms combine.

    To make a whole value partial only costs. So operands flow through an op partial only where one
    of them comes from a contraction over a split dim, say, through linear ops.

    Trace:
      %2 = dot %0, %1          leaves a sum
      %3 = multiply %2, %w     a sum may arrive as %2, and so %3 may be one; none as %w
      %4 = tanh %3             not linear: %3 is reduced before it, and it leaves no sum
    """
    read: list[dict[int, list[int]]] = [{} for _ in units.units]  # operand position -> sources
    for use in units.uses:
        read[use.target].setdefault(use.position, []).append(use.source)
    leaves: dict[int, dict[str, None]] = {}

    def arriving(number: int, positions: Iterable[int]) -> dict[str, None]:
        sources = (source for i in positions for source in read[number].get(i, ()))
        return {how: None for source in sources for how in leaves.get(source, ())}

    found: list[Sums] = [()] * len(units.units)
    todo = True
    while todo:  # loops carry sums to ops before
        todo = False
        for number, unit in enumerate(units.units):
            before = len(leaves.get(number, ()))
            if unit.role == CARRY:
                hows = arriving(number, read[number])
                found[number] = tuple([((), how) for how in hows])
            elif unit.role == ARGUMENT:
                states = problem.arguments[unit.number]
                hows = dict.fromkeys([state.kind for state in states if state.partial])
            elif unit.op is not None and not unit.op.is_mark:
                rule = rule_of(unit.op.kind, unit.op.loc)
                found[number] = tuple(
                    (tuple(group), how)
                    for group in rule.linear
                    for how in arriving(number, group)
                    if rule.lets_through(how)
                )
                hows = dict.fromkeys([how for _, how in found[number]])
                if any(factor.kind == REDUCE for factor in rule.factors):
                    hows[rule.reduction] = None
            else:
                continue
            leaves[number] = hows
            todo |= len(hows) > before
    return found
