"""`Domains`: the states of arguments and carries, and the choices of ops, that are weighed.

They have three sources, the likely first. *Suggested* are choices that follow from the proposals
for an op's values. *Taken* are those of a plan for ops of the same kind. *Placed* is every way to
split an op's factors, or a carry's dims, over some axes of the mesh, or to leave values partial
over them, wished for or not; partial values are among these only where one may arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import REDUCE
from spmd.ir.program import OpKind
from spmd.mesh.sharding import Axes, replicated
from spmd.planning.choices import Choices, Sums, axis_sets
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem, laid
from spmd.planning.units import ARGUMENT, CARRY, Unit, Units
from spmd.reshard.paths import States

Taken = Mapping[tuple[OpKind, Axes], tuple[Choice, ...]]  # by kind of op and axes held there


def taken_by(plan: Plan) -> Taken:
    """Returns the choices that a plan made for ops of each kind."""
    found: dict[tuple[OpKind, Axes], dict[Choice, None]] = {}
    for op in plan.program.walk():
        if not op.regions and (choice := plan.choices.get(op.results[0])) is not None:
            held = plan.problem.resharder.held(op.results[0])
            found.setdefault((op.kind, held), {})[choice] = None
    return {key: tuple(choices) for key, choices in found.items()}


class Domains(NamedTuple):
    """The choices and states that the solver weighs, for each class of units (`Units`)."""

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
    """Returns the states and choices to be weighed for a whole program.

    The `axes` are placed in every way, all others as in the `base` plan, whose choices are among
    those suggested. Where `taken` has choices for an op, they stand in for its placements.
    """

    def states_of(unit: Unit, sums: Sequence[str]) -> States:
        """Returns what an argument or carry may be in; `sums` are kinds of partial that arrive."""
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
        # Some axes are on every dim, or among what it is partial over, or nowhere.
        first, moved = suggested[0], set(itertools.chain(*runs))
        dims = tuple([tuple([a for a in own if a not in moved]) for own in first.dims])
        owed = tuple([a for a in first.partial if a not in moved])
        full = laid(type_, dims, runs, choices.mesh)
        partial = [
            state.with_partial(tuple(sorted((*owed, *more))), kind)
            for kind in ((first.kind,) if owed else sums)
            for more in axis_sets(runs)
            for state in full
            if state.used.isdisjoint(more)
        ]
        if owed:
            full = tuple(state.with_partial(owed, first.kind) for state in full)
        return tuple(dict.fromkeys((*suggested, *full, *partial)))

    left: list[tuple[States, ...]] = []
    made: list[tuple[Choice, ...]] = []
    suggested: list[int] = []
    arriving = _sums_arriving(problem, units)
    for number, (unit, wishes) in enumerate(zip(units.units, units.wishes, strict=True)):
        options: tuple[Choice, ...] = ()
        if unit.op is not None and unit.tie is None:
            # The choices that follow from what is proposed for its values, and the known one.
            operands, results = (
                tuple([(wish,) if (wish := problem.wishes[v]) is not None else () for v in values])
                for values in (unit.op.operands, unit.op.results)
            )
            first = choices.around(unit.op, operands, results)
            known = base.choice(unit.op) if base else None
            if known is not None:
                first = tuple(dict.fromkeys((known, *first)))
            held = choices.resharder.held(unit.op.results[0])
            more = (taken or {}).get((unit.op.kind, held)) or choices.placed(
                unit.op, axes, known, arriving[number]
            )
            options = tuple(dict.fromkeys((*first, *more)))
            states = tuple(tuple([c.results[k] for c in options]) for k in range(len(wishes)))
            suggested.append(len(first))
        else:
            sums = [how for _, how in arriving[number]]
            states = (states_of(unit, sums),) * len(wishes)
            suggested.append(1)
        left.append(states)
        made.append(options)
    return Domains(tuple(left), tuple(made), tuple(suggested))


def _sums_arriving(problem: Problem, units: Units) -> list[Sums]:
    """Returns, for each class, which operands may arrive partial, and how their terms combine.

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
