"""Domains without proposals: every way to lay whole axes on an op's factors.

For programs of which little or nothing is marked there is nothing to spread from. Each axis splits
one factor of an op or none; arguments and carries may lie in every way that divides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from spmd.ir.control_flow import held_atoms
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import FIXED, REPLICATE, Rule
from spmd.ir.program import OpKind, Value
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, is_even
from spmd.planning.domains import Domains, Maker, States
from spmd.planning.plan import Choice
from spmd.planning.problem import Problem
from spmd.planning.units import ARGUMENT, CARRY, OP, Units
from spmd.propagation.projection import Assignment, is_legal_assignment, unsplit

MOST_CHOICES = 40
"""Choices of one op; those that take the least time of its own are kept."""


def every_state(type_: TensorType, mesh: Mesh) -> States:
    """Every way to split a value's dims over whole axes that divide them, the finest first."""
    axes = [atoms for atoms in mesh.axis_atoms.values() if atoms]
    found: list[Sharding] = []
    for places in itertools.product(range(-1, type_.rank), repeat=len(axes)):
        dims: list[Axes] = [()] * type_.rank
        for place, atoms in zip(places, axes, strict=True):
            if place >= 0:
                dims[place] += atoms
        if all(is_even(n, a, mesh) for n, a in zip(type_.shape, dims, strict=True)):
            found.append(Sharding(tuple(dims)))
    return tuple(sorted(found, key=lambda s: -len(s.used)))


def open_domains(problem: Problem, units: Units) -> Domains:
    """Every choice of every op, dominated ones left out."""
    maker = Maker(problem.propagated.mesh, problem.topology)
    held_at = held_atoms(problem.propagated.program)
    made: dict[tuple[OpKind, Axes], tuple[Choice, ...]] = {}
    left: list[tuple[States, ...]] = []
    choices: list[tuple[Choice, ...]] = []
    for i, unit in enumerate(units.units):
        options: tuple[Choice, ...] = ()
        states: tuple[States, ...] = ()
        if unit.role == ARGUMENT:
            states = (problem.arguments[unit.number],)
        elif unit.role == CARRY:
            assert unit.tie is not None
            held = held_at.get(unit.tie.result, ())
            states = (_carry_states(problem, unit.tie.result, held),) * len(units.wishes[i])
        elif unit.role == OP:
            assert unit.op is not None
            kind = unit.op.kind
            if kind.about.is_mark:
                wanted = Sharding(problem.propagated.proposals[unit.op.results[0]])
                options = (Choice(wanted.dims, (wanted,), (wanted,)),)
            else:
                key = (kind, held_at.get(unit.op.results[0], ()))
                if key not in made:
                    made[key] = _op_choices(maker, kind, rule_of(kind, unit.op.loc), key[1])
                options = made[key]
            count = len(units.wishes[i])
            states = tuple(tuple(c.results[k] for c in options) for k in range(count))
        left.append(states)
        choices.append(options)
    return Domains(tuple(left), tuple(choices))


def _carry_states(problem: Problem, value: Value, held: Axes) -> States:
    """Every way a carry may lie, and be partial over the axes that are left and not held."""
    mesh = problem.propagated.mesh
    full = every_state(problem.propagated.program.types[value], mesh)
    states = (*full, *(p for s in full for p in _partials(s, mesh)))
    return tuple(s for s in states if s.used.isdisjoint(held))


def _partials(state: Sharding, mesh: Mesh) -> Iterable[Sharding]:
    """A full state, partial by addition over some whole axes that it does not use."""
    for partial in _axis_sets(mesh, state.used):
        yield state.with_partial(partial, "add")


def _axis_sets(mesh: Mesh, used: Iterable[int]) -> list[Axes]:
    taken = set(used)
    free = [atoms for atoms in mesh.axis_atoms.values() if atoms and taken.isdisjoint(atoms)]
    return [
        tuple(sorted(a for atoms in chosen for a in atoms))
        for count in range(1, len(free) + 1)
        for chosen in itertools.combinations(free, count)
    ]


def _op_choices(maker: Maker, kind: OpKind, rule: Rule, held: Axes) -> tuple[Choice, ...]:
    """The choices of one op; where axes are held they split and owe nothing."""
    assignments = [a for a in _assignments(rule, maker.mesh) if _leaves_alone(rule, a, held)]
    assignments.sort(key=lambda a: maker.own_seconds(kind, rule, a))
    found: list[Choice] = [maker.full(kind, rule, a) for a in assignments[:MOST_CHOICES]]
    for group in rule.linear:
        for assignment in assignments[:MOST_CHOICES]:
            used = {a for axes in assignment for a in axes}.union(held)
            for partial in _axis_sets(maker.mesh, used):
                choice = maker.carried(kind, rule, assignment, tuple(group), partial, "add")
                if choice is not None:
                    found.append(choice)
    return maker.undominated(kind, rule, tuple(dict.fromkeys(found)))


def _assignments(rule: Rule, mesh: Mesh) -> list[Assignment]:
    """Every way to lay whole axes on factors that they divide."""
    axes = [atoms for atoms in mesh.axis_atoms.values() if atoms]
    factors = [
        number
        for number, factor in enumerate(rule.factors)
        if factor.kind not in (REPLICATE, FIXED) and factor.size > 1
    ]
    found = []
    for places in itertools.product([-1, *factors], repeat=len(axes)):
        assignment = list(unsplit(rule))
        for place, atoms in zip(places, axes, strict=True):
            if place >= 0:
                assignment[place] += atoms
        if _divides(rule, assignment, mesh) and is_legal_assignment(
            rule, tuple(assignment), mesh.atom_sizes
        ):
            found.append(tuple(assignment))
    return found


def _leaves_alone(rule: Rule, assignment: Assignment, held: Axes) -> bool:
    return all(
        factor.kind == FIXED or not set(axes).intersection(held)
        for factor, axes in zip(rule.factors, assignment, strict=True)
    )


def _divides(rule: Rule, assignment: Sequence[Axes], mesh: Mesh) -> bool:
    return all(
        factor.kind == FIXED or is_even(factor.size, axes, mesh)
        for factor, axes in zip(rule.factors, assignment, strict=True)
    )
