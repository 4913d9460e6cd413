"""What one op may choose from, for every planner, and what reshards of its values cost then."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import Rule
from spmd.ir.program import Op, OpKind, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.assignments import assignments_around, placements
from spmd.planning.plan import Choice
from spmd.planning.problem import Problem
from spmd.planning.solver import FORBIDDEN, Table
from spmd.predict.ops import op_seconds
from spmd.propagation.projection import (
    Assignment,
    is_legal_assignment,
    project,
    reduced_axes,
    unsplit,
)
from spmd.reshard.paths import SPLITTABLE
from spmd.reshard.resharder import States

MOST_CARRIED = 12
"""Choices with partial operands among those that are made from what lies around an op."""

Partial = tuple[tuple[int, ...], Axes, str]
"""A group of operands that flow through an op partial: (their positions, over what, how)."""

Sums = tuple[tuple[tuple[int, ...], str], ...]
"""What may flow through an op partial: (positions of a group of operands, how)."""


class Choices:
    """Makes choices for the ops of one problem; ops that are alike share the work.

    A choice follows from an assignment and from what is partial. Planners ask for those that lead
    on from states that are known `around` an op, and for axes `placed` in every way.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.propagated = problem, problem.propagated
        self.mesh, self.topology = problem.mesh, problem.topology
        self.resharder, self.ways = problem.resharder, Ways(problem)
        self._made: dict[object, tuple[Choice, ...]] = {}
        self._full: dict[tuple[OpKind, Assignment], Choice] = {}
        self._seconds: dict[tuple[OpKind, tuple[bool, ...], Assignment], float] = {}

    def around(
        self, op: Op, operands: tuple[States, ...], wishes: tuple[States, ...]
    ) -> tuple[Choice, ...]:
        """The choices that states of the op's values lead to, each with and without partials.

        An operand without states is made to order. For each result, `wishes` are the states that it
        should be in, the best first.
        """
        if op.is_mark:
            return self.of_mark(op)
        key = (op.kind, self.resharder.held(op.results[0]), operands, wishes)
        if key not in self._made:
            rule = rule_of(op.kind, op.loc)
            assignments = assignments_around(rule, (*operands, *wishes), self.mesh.atom_sizes)
            carried = dict.fromkeys(
                (_without(assignment, partial[1]), partial)
                for partial in partials_of(rule, operands)
                for assignment in assignments
            )
            found = [self._carried(op.kind, rule, *each) for each in carried]
            more = [choice for choice in found if choice is not None][:MOST_CARRIED]
            options = [*(self._plain(op.kind, rule, a) for a in assignments), *more]
            self._made[key] = tuple(dict.fromkeys(options))
        return self._made[key]

    def placed(
        self, op: Op, axes: Sequence[Axes], base: Choice | None, sums: Sums
    ) -> tuple[Choice, ...]:
        """The choices in which some axes have every place that they may have, whoever wished so.

        An axis splits a factor, or is one over which operands flow through partial, or is idle; so
        are axes that are held. All other axes are where they are in `base`, or idle.
        """
        if op.is_mark:
            return self.of_mark(op)
        held = self.resharder.held(op.results[0])
        key = (op.kind, held, tuple(axes), base, sums)
        if key not in self._made:
            rule = rule_of(op.kind, op.loc)
            runs = [atoms for atoms in axes if not set(atoms) & {*held, *rule.held}]
            moved = set(itertools.chain(*runs))
            start = base.assignment if base else unsplit(rule)
            start = tuple([tuple([a for a in own if a not in moved]) for own in start])
            assignments = placements(rule, start, runs, self.mesh.atom_sizes)
            sets = axis_sets(runs)
            partials = [(group, over, how) for (group, how) in sums for over in sets]
            found: list[Choice | None] = []
            # What flows through the base partial over other axes goes on to do so.
            group = tuple([i for i, s in enumerate(base.operands) if s.partial]) if base else ()
            state = base.operands[group[0]] if base and group else None
            if state and (kept := tuple([a for a in state.partial if a not in moved])):
                over = [kept, *(tuple(sorted((*kept, *more))) for more in sets)]
                partials = [(group, axes, state.kind) for axes in over]
            else:
                found += [self._plain(op.kind, rule, a) for a in assignments]
            for partial in partials:
                owed = set(partial[1])
                found += [
                    self._carried(op.kind, rule, a, partial)
                    for a in assignments
                    if owed.isdisjoint(itertools.chain(*a))
                ]
            self._made[key] = tuple(dict.fromkeys([c for c in found if c is not None]))
        return self._made[key]

    def of_mark(self, op: Op) -> tuple[Choice, ...]:
        """The one choice that a mark leaves: what it says."""
        wanted = Sharding(self.propagated.proposals[op.results[0]])
        return (Choice(wanted.dims, (wanted,), (wanted,)),)

    def own_seconds(self, op: Op, assignment: Assignment) -> float:
        """An op's own time, without reshards."""
        stored = self.problem.stored(op)
        key = op.kind, stored, assignment
        found = self._seconds.get(key)
        if found is None:
            rule = rule_of(op.kind, op.loc)
            found = op_seconds(op.kind, rule, assignment, self.mesh, self.topology, stored)
            self._seconds[key] = found
        return found

    def _plain(self, kind: OpKind, rule: Rule, assignment: Assignment) -> Choice:
        choice = self._full.get((kind, assignment))
        if choice is None:
            choice = self._full[kind, assignment] = plain_choice(rule, assignment, self.mesh)
        return choice

    def _carried(
        self, kind: OpKind, rule: Rule, assignment: Assignment, flowing: Partial
    ) -> Choice | None:
        # The choice in which a group of operands flows through partial, if the op allows that.
        group, partial, how = flowing
        if not rule.lets_through(how):
            return None
        if reduced_axes(rule, assignment) and rule.reduction != how:
            return None
        if not is_legal_assignment(rule, assignment, self.mesh.atom_sizes):
            return None
        if not set(partial).isdisjoint(rule.held):
            return None
        plain = self._plain(kind, rule, assignment)
        operands = [
            s.with_partial(partial, how) if i in group else s for i, s in enumerate(plain.operands)
        ]
        results = [s.with_partial((*partial, *s.partial), how) for s in plain.results]
        return Choice(assignment, tuple(operands), tuple(results))


def making_choice(op: Op, wanted: Sharding, mesh: Mesh) -> Choice:
    """The choice by which a cheap op makes its result in the wanted sharding."""
    rule = rule_of(op.kind, op.loc)
    assignment = list(unsplit(rule))
    for dim, axes in zip(rule.results[0], wanted.dims, strict=True):
        assignment[dim[0]] = axes
    return plain_choice(rule, tuple(assignment), mesh)


def plain_choice(rule: Rule, assignment: Assignment, mesh: Mesh) -> Choice:
    """The choice in which every operand arrives full."""
    sizes = mesh.atom_sizes
    operands = [project(rule, dims, assignment, sizes) for dims in rule.operands]
    results = [
        project(rule, dims, assignment, sizes).with_partial(
            reduced_axes(rule, assignment, dims), rule.reduction
        )
        for dims in rule.results
    ]
    return Choice(assignment, tuple(operands), tuple(results))


def partials_of(rule: Rule, operands: Sequence[States]) -> Iterable[Partial]:
    """What may flow through an op partial: whatever one operand of a linear group may be.

    The others of the group are made partial, too, where their kind allows it.
    """
    for group in rule.linear:
        owed = dict.fromkeys((s.partial, s.kind) for i in group for s in operands[i] if s.partial)
        for partial, kind in owed:
            alike = all(any(s.kind == kind for s in operands[i]) for i in group)
            if rule.lets_through(kind) and (alike or kind in SPLITTABLE):
                yield group, partial, kind


def axis_sets(runs: Sequence[Axes]) -> list[Axes]:
    """Every set of some axes but the empty one, as ascending atoms."""
    return [
        tuple(sorted(itertools.chain(*chosen)))
        for count in range(1, len(runs) + 1)
        for chosen in itertools.combinations(runs, count)
    ]


def _without(assignment: Assignment, partial: Axes) -> Assignment:
    """An assignment in which each factor keeps the atoms in front of the first partial one."""
    return tuple(
        axes[: next((k for k, a in enumerate(axes) if a in partial), len(axes))]
        for axes in assignment
    )


class Ways:
    """What it takes to bring values from one sharding to another, as tables of numbers.

    Values of one type share a table of all shardings that anybody asked about; it grows. So what it
    costs from any states of a value to any needs is a few rows and columns of that.

    Example:
      >>> states, needs = ways.numbers(value, (rows, columns)), ways.numbers(value, (whole,))
      >>> ways.costs(value, states, needs, stores=True)  # seconds, a row for each state
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._alike: dict[object, _Alike] = {}
        self._of: dict[Value, _Alike] = {}

    def numbers(self, value: Value, shardings: Sequence[Sharding]) -> Table:
        """The rows, or columns, that stand for shardings in the table of a value."""
        index = self._table(value).index
        return np.array([index.setdefault(s, len(index)) for s in shardings], dtype=np.intp)

    def costs(self, value: Value, states: Table, needs: Table, stores: bool) -> Table:
        """Seconds from each state (rows) to each need (columns); `FORBIDDEN` where no way leads.

        The reader may want the value in memory: it `stores` it.
        """
        alike, inside = self._table(value), not self.problem.in_memory[value]
        found: Table = alike.costs(value, inside, stores)[states[:, None], needs]
        if np.isnan(found).any():
            alike.ask(value, states, needs)
            found = alike.costs(value, inside, stores)[states[:, None], needs]
        return found

    def _table(self, value: Value) -> _Alike:
        found = self._of.get(value)
        if found is None:
            key = self.problem.program.types[value], self.problem.resharder.held(value)
            found = self._alike.setdefault(key, _Alike(self.problem))
            self._of[value] = found
        return found


class _Alike:
    """The table of the values of one type."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.index: dict[Sharding, int] = {}  # number of each sharding
        # Of reshards between the first of these; not a number where that has to be asked.
        self.seconds: Table = np.zeros((0, 0))
        self._costs: dict[tuple[bool, bool], Table] = {}

    def costs(self, value: Value, inside: bool, stores: bool) -> Table:
        """Seconds of reshards, and of the memory that they move, between all shardings."""
        every = tuple(self.index)
        if len(every) > (known := len(self.seconds)):
            glance = self.problem.resharder.glance
            table = np.empty((len(every), len(every)))
            table[:known, :known] = self.seconds
            table[known:] = glance(value, every[known:], every)
            table[:known, known:] = glance(value, every[:known], every[known:])
            self.seconds = table
            self._costs.clear()
        found = self._costs.get((inside, stores))
        if found is None:
            more = self.problem.traffic(value, every, every, self.seconds > 0, stores)
            found = self._costs[inside, stores] = np.minimum(self.seconds + more, FORBIDDEN)
        return found

    def ask(self, value: Value, states: Table, needs: Table) -> None:
        """Asks for the ways that are not a number yet."""
        every = tuple(self.index)
        for i, j in zip(*np.nonzero(np.isnan(self.seconds[states[:, None], needs])), strict=True):
            ends = int(states[i]), int(needs[j])
            self.seconds[ends] = self.problem.resharder.seconds(value, *(every[e] for e in ends))
        self._costs.clear()
