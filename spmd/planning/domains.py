"""`Domains`: the states that each class of units may be in, and the choices that each op has.

Three sources, the likely first. *Suggested* is what the marks lead to: choices that follow from
what propagation proposed for an op's values. *Taken* is what a plan took for ops of one kind.
*Placed* is every way to lay some axes of the mesh on the factors of an op, on the dims of a carry,
or among its terms, wished for or not. Terms of a sum are among these only where a sum arrives.
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
    """What a plan took for ops of each kind."""
    found: dict[tuple[OpKind, Axes], dict[Choice, None]] = {}
    for op in plan.program.walk():
        if not op.regions and (choice := plan.choices.get(op.results[0])) is not None:
            held = plan.problem.resharder.held(op.results[0])
            found.setdefault((op.kind, held), {})[choice] = None
    return {key: tuple(choices) for key, choices in found.items()}


class Domains(NamedTuple):
    """What each class of units can choose from."""

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
    """States and choices to cost, for a whole program.

    Some axes are placed in every way. All others are where a `base` plan has them, whose choices
    are among those suggested. `taken` is what a plan of another form of the program took.
    """

    def states_of(unit: Unit, sums: Sequence[str]) -> States:
        """The states of an argument, of a carry where such sums may arrive, or of nothing."""
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
    """For each class, what may arrive partial: a sum that no op has put together on the way.

    To take a whole value apart into terms only costs. So operands flow through an op partial only
    where one of them comes from a product over a split dim, say, through linear ops.

    Trace:
      %2 = dot %0, %1          leaves a sum
      %3 = multiply %2, %w     a sum may arrive as %2, and so %3 may be one; none as %w
      %4 = tanh %3             not linear: what it reads is put together, and it leaves no sum
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
