"""`Domains`: the states that each class of units may be in, and the choices that each op has.

Three sources, the likely first. *Suggested* is what the marks lead to: choices that follow from
what propagation proposed for an op's values. *Taken* is what a plan took for ops of one kind.
*Placed* is every way to lay some axes of the mesh on the factors of an op, on the dims of a carry,
or among its terms, whoever wished for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.program import OpKind
from spmd.ir.types import TensorType
from spmd.mesh.sharding import Axes, Sharding, replicated
from spmd.planning.choices import Choices, axis_sets
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem, laid
from spmd.planning.units import ARGUMENT, CARRY, Unit, Units
from spmd.reshard.resharder import States

Taken = Mapping[tuple[OpKind, Axes], tuple[Choice, ...]]
"""A kind of op, and the axes that are held around it -> choices that a plan took."""


def taken_by(plan: Plan) -> Taken:
    """What a plan took for ops of each kind."""
    found: dict[tuple[OpKind, Axes], dict[Choice, None]] = {}
    for op in plan.program.walk():
        if not op.regions and (choice := plan.choices.get(op.results[0])) is not None:
            held = plan.problem.resharder.held(op.results[0])
            found.setdefault((op.kind, held), {})[choice] = None
    return {key: tuple(choices) for key, choices in found.items()}


class Domains(NamedTuple):
    """What there is to choose from.

    Attributes:
      left: for each class and each of its results, the state for each of its choices.
      choices: for each class of ops its choices; none for others.
      suggested: for each class, how many of these, at the front, the marks lead to.
    """

    left: tuple[tuple[States, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]
    suggested: tuple[int, ...]


def domains_of(
    problem: Problem,
    units: Units,
    choices: Choices,
    axes: Sequence[Axes] = (),
    base: Plan | None = None,
    taken: Taken | None = None,
) -> Domains:
    """States and choices to cost, for a whole program.

    Args:
      problem: what is to be planned.
      units: the program taken apart.
      choices: makes the choices of ops.
      axes: atoms of the axes that are placed in every way.
      base: a plan that says where all other axes are; its choices are among those suggested.
      taken: what a plan of another form of the program took.
    """
    left: list[tuple[States, ...]] = []
    made: list[tuple[Choice, ...]] = []
    suggested: list[int] = []
    for unit, wishes in zip(units.units, units.wishes, strict=True):
        options: tuple[Choice, ...] = ()
        if unit.op is not None and unit.tie is None:
            first = _suggested(problem, choices, unit, base)
            known = base.choice(unit.op) if base else None
            held = choices.resharder.held(unit.op.results[0])
            more = (taken or {}).get((unit.op.kind, held)) or choices.placed(unit.op, axes, known)
            options = tuple(dict.fromkeys((*first, *more)))
            states = tuple(tuple([c.results[k] for c in options]) for k in range(len(wishes)))
            suggested.append(len(first))
        else:
            states = (_states(problem, choices, unit, axes, base),) * len(wishes)
            suggested.append(1)
        left.append(states)
        made.append(options)
    return Domains(tuple(left), tuple(made), tuple(suggested))


def _suggested(
    problem: Problem, choices: Choices, unit: Unit, base: Plan | None
) -> tuple[Choice, ...]:
    """The choices of an op that follow from what is proposed for its values, and the known one."""
    assert unit.op is not None
    wishes = problem.wishes
    operands, results = (
        tuple([(wish,) if (wish := wishes[v]) is not None else () for v in values])
        for values in (unit.op.operands, unit.op.results)
    )
    found = choices.around(unit.op, operands, results)
    known = (base.choice(unit.op),) if base else ()
    return tuple(dict.fromkeys((*known, *found)))


def _states(
    problem: Problem, choices: Choices, unit: Unit, axes: Sequence[Axes], base: Plan | None
) -> States:
    """The states of an argument, of a carry, or of nothing."""
    if unit.role == ARGUMENT:
        return problem.arguments[unit.number]
    if unit.role != CARRY:
        return ()
    assert unit.tie is not None
    value = unit.tie.result
    type_ = problem.program.types[value]
    known = base.states[value] if base else None
    suggested = [s for s in (known, problem.wishes[value], replicated(type_.rank)) if s]
    held = problem.index.held.get(value, ())
    runs = [atoms for atoms in axes if set(held).isdisjoint(atoms)]
    placed = _placed(type_, runs, suggested[0], choices)
    return tuple(dict.fromkeys((*suggested, *placed)))


def _placed(type_: TensorType, runs: Sequence[Axes], base: Sharding, choices: Choices) -> States:
    """A value with some axes on every dim, or among what it is partial over, or nowhere."""
    moved = set(itertools.chain(*runs))
    dims = tuple([tuple([a for a in own if a not in moved]) for own in base.dims])
    owed = tuple([a for a in base.partial if a not in moved])
    full = laid(type_, dims, runs, choices.mesh)
    kinds = (base.kind,) if owed else choices.reductions
    partial = [
        state.with_partial(tuple(sorted((*owed, *more))), kind)
        for kind in kinds
        for more in axis_sets(runs)
        for state in full
        if state.used.isdisjoint(more)
    ]
    return (*(s.with_partial(owed, base.kind) if owed else s for s in full), *partial)
