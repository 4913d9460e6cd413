"""`Choices`: what one op may choose from, for every planner; ops that are alike share the work."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import Rule
from spmd.ir.program import Op, OpKind
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.assignments import assignments_around, every_assignment
from spmd.planning.cost import op_seconds
from spmd.planning.plan import Choice
from spmd.planning.problem import Problem
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

MOST_OPEN = 40
"""Assignments looked at where nothing is known: those that take the least time of their own."""

Partial = tuple[tuple[int, ...], Axes, str]
"""A group of operands that flow through an op partial: (their positions, over what, how)."""


class Choices:
    """Makes choices for the ops of one problem.

    A choice follows from an assignment and from what is partial. Two planners ask for it with the
    states that are known where they are: `around` what one op's values may be, or `everywhere`.
    """

    def __init__(self, problem: Problem) -> None:
        self.propagated = problem.propagated
        self.mesh, self.topology = problem.mesh, problem.topology
        self.resharder = problem.resharder
        self._made: dict[object, tuple[Choice, ...]] = {}
        self._full: dict[tuple[OpKind, Assignment], Choice] = {}
        self._seconds: dict[tuple[OpKind, Assignment], float] = {}

    def around(
        self, op: Op, operands: tuple[States, ...], wishes: tuple[States, ...]
    ) -> tuple[Choice, ...]:
        """The choices that states of the op's values lead to, each with and without partials.

        Args:
          op: the op.
          operands: the states that each operand may be in; none if it is made to order.
          wishes: for each result, what it should look like, the best first.
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

    def everywhere(self, op: Op) -> tuple[Choice, ...]:
        """The choices of an op around which nothing is known; held axes split and owe nothing."""
        if op.is_mark:
            return self.of_mark(op)
        held = self.resharder.held(op.results[0])
        key = (op.kind, held)
        if key not in self._made:
            rule = rule_of(op.kind, op.loc)
            assignments = every_assignment(rule, self.mesh, held)
            assignments.sort(key=lambda a: self.own_seconds(op, a))
            del assignments[MOST_OPEN:]
            carried = [
                self._carried(op.kind, rule, assignment, (tuple(group), partial, "add"))
                for group in rule.linear
                for assignment in assignments
                for partial in axis_sets(self.mesh, {*held, *itertools.chain(*assignment)})
            ]
            found = [*(self._plain(op.kind, rule, a) for a in assignments), *carried]
            options = dict.fromkeys(choice for choice in found if choice is not None)
            self._made[key] = tuple(options)
        return self._made[key]

    def of_mark(self, op: Op) -> tuple[Choice, ...]:
        """The one choice that a mark leaves: what it says."""
        wanted = Sharding(self.propagated.proposals[op.results[0]])
        return (Choice(wanted.dims, (wanted,), (wanted,)),)

    def own_seconds(self, op: Op, assignment: Assignment) -> float:
        """An op's own time, without reshards."""
        found = self._seconds.get((op.kind, assignment))
        if found is None:
            rule = rule_of(op.kind, op.loc)
            found = op_seconds(op.kind, rule, assignment, self.mesh, self.topology)
            self._seconds[op.kind, assignment] = found
        return found

    def _plain(self, kind: OpKind, rule: Rule, assignment: Assignment) -> Choice:
        """The choice in which every operand arrives full."""
        choice = self._full.get((kind, assignment))
        if choice is None:
            choice = self._full[kind, assignment] = plain_choice(rule, assignment, self.mesh)
        return choice

    def _carried(
        self, kind: OpKind, rule: Rule, assignment: Assignment, flowing: Partial
    ) -> Choice | None:
        """The choice in which a group of operands flows through partial, if the op allows that."""
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

    The others of the group become so, where they are not and that kind allows it.
    """
    for group in rule.linear:
        owed = dict.fromkeys((s.partial, s.kind) for i in group for s in operands[i] if s.partial)
        for partial, kind in owed:
            alike = all(any(s.kind == kind for s in operands[i]) for i in group)
            if rule.lets_through(kind) and (alike or kind in SPLITTABLE):
                yield group, partial, kind


def axis_sets(mesh: Mesh, used: set[int]) -> list[Axes]:
    """Every set of whole axes that are not in use, as ascending atoms."""
    free = [atoms for atoms in mesh.axis_atoms.values() if atoms and used.isdisjoint(atoms)]
    return [
        tuple(sorted(itertools.chain(*chosen)))
        for count in range(1, len(free) + 1)
        for chosen in itertools.combinations(free, count)
    ]


def _without(assignment: Assignment, partial: Axes) -> Assignment:
    """An assignment without the atoms over which operands are partial, as these can split nothing.

    Each factor keeps the atoms in front of the first such one: what is behind it would have other
    pieces without it.
    """
    return tuple(
        axes[: next((k for k, a in enumerate(axes) if a in partial), len(axes))]
        for axes in assignment
    )
