"""What marks cost: the program is propagated and planned again without them, one after another.

Only those next to the most expensive reshards are tried.

    price of a mark  =  cost of the plan with it  -  cost of the plan without it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.explain.price import Price
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value, numberless
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import local_type
from spmd.mesh.sharding import Mark, Sharding
from spmd.options import Options
from spmd.pipeline import plan_problem
from spmd.planning.plan import Move, Plan
from spmd.planning.problem import problem_of
from spmd.propagation.cheap import cheap_values
from spmd.propagation.propagate import propagate
from spmd.propagation.propagated import Propagated

WORTH = 0.01
"""The part of the time of all reshards that a mark must cost to be mentioned."""


class MarkGroup(NamedTuple):
    """Marks that are one to a person: made at one line, or of arguments that differ in numbers.

    Attributes:
      name: `mark_sharding at model.py:12 (f)`, `argument layers/*/w`.
      values: the marked values.
      sharding: what the first of them says.
      seconds: time of the reshards that are next to them.
    """

    name: str
    values: tuple[Value, ...]
    sharding: Sharding
    seconds: float


class Relief(NamedTuple):
    """Some marks, and what the program would cost without them."""

    marks: MarkGroup
    price: Price


class MarkPrices(NamedTuple):
    """Marks that cost something.

    Attributes:
      reliefs: for each mark that costs enough to speak of, what leaving it out does; best first.
      tried: how many groups of marks were left out.
      groups: how many are next to any reshard at all.
    """

    reliefs: tuple[Relief, ...]
    tried: int
    groups: int


def mark_prices(plan: Plan, tries: int) -> MarkPrices:
    """Plans again without the marks next to the most expensive reshards, group by group.

    Args:
      plan: the plan with all of them.
      tries: how often to plan again at most.
    """
    groups = mark_groups(plan)
    least = WORTH * sum(move.seconds for move in plan.moves)
    found = [relief_of(plan, group) for group in groups[:tries]]
    worth = [
        relief for relief in found if relief.price.seconds < 0 and -relief.price.seconds >= least
    ]
    worth.sort(key=lambda relief: relief.price.seconds)
    return MarkPrices(tuple(worth), len(found), len(groups))


def relief_of(plan: Plan, group: MarkGroup) -> Relief:
    """What the program would cost without a group of marks."""
    return Relief(group, price_of(plan, replanned(plan, drop=group.values)))


def price_of(plan: Plan, other: Plan) -> Price:
    """What another plan costs more than a plan."""
    return Price(
        other.seconds - plan.seconds,
        sum(m.bytes for m in other.moves) - sum(m.bytes for m in plan.moves),
        argument_bytes(other) - argument_bytes(plan),
    )


def argument_bytes(plan: Plan) -> int:
    """Bytes of all arguments on one device."""
    types = plan.program.types
    return sum(
        local_type(types[v], s, plan.mesh).bytes
        for v, s in zip(plan.program.body.args, plan.arguments, strict=True)
    )


# ---------------------------------------------------------------------------------------------
# Which marks are next to which reshards.


def mark_groups(plan: Plan, every: bool = False) -> tuple[MarkGroup, ...]:
    """The marks that are next to reshards, those next to the most time first.

    Args:
      plan: the plan.
      every: whether marks that are next to no reshard are among them, too.
    """
    marks = plan.propagated.marks
    names = _names(plan)
    seconds: dict[str, float] = dict.fromkeys(names.values(), 0.0) if every else {}
    for move in plan.moves:
        for name in dict.fromkeys(names[value] for value in _marks_around(plan, move)):
            seconds[name] = seconds.get(name, 0.0) + move.seconds
    members: dict[str, list[Value]] = {}
    for value in marks:
        members.setdefault(names[value], []).append(value)
    groups = [
        MarkGroup(name, tuple(members[name]), Sharding(marks[members[name][0]].dims), time)
        for name, time in seconds.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


def _names(plan: Plan) -> dict[Value, str]:
    """Each mark's group. Arguments that are marked like another one belong to that one's."""
    return {
        value: numberless(mark.reason.removeprefix("like "))
        for value, mark in plan.propagated.marks.items()
    }


def _marks_around(plan: Plan, move: Move) -> Iterator[Value]:
    """The marked values that a reshard comes from or goes to: itself, its user, or origins."""
    marks = plan.propagated.marks
    if move.value in marks:
        yield move.value
    if move.user is not None:
        yield from (v for v in move.user.results if v in marks)
    elif move.value in plan.program.body.results:
        index = plan.program.body.results.index(move.value)
        argument = plan.problem.links.get(index)
        if argument is not None and plan.program.body.args[argument] in marks:
            yield plan.program.body.args[argument]
    around = (move.value, *(move.user.operands + move.user.results if move.user else ()))
    changed = {(d, a) for d, axes in enumerate(move.have.dims) for a in axes} ^ {
        (d, a) for d, axes in enumerate(move.wanted.dims) for a in axes
    }
    atoms = {a for _, a in changed}.union(move.have.partial)
    for value in around:
        yield from _roots(plan.propagated, value, atoms)


def _roots(propagated: Propagated, value: Value, atoms: Collection[int]) -> Iterator[Value]:
    """The marks that some atoms of a value's proposal come from."""
    for dim, axes in enumerate(propagated.proposals[value]):
        for atom in axes:
            if atom in atoms:
                root = propagated.root(value, dim, atom)
                if root is not None:
                    yield root


# ---------------------------------------------------------------------------------------------
# The same program under other marks.


def replanned(
    plan: Plan,
    drop: Collection[Value] = (),
    change: Mapping[Value, Sharding] | None = None,
) -> Plan:
    """The exact plan of the same program under other marks.

    Args:
      plan: the plan whose program, mesh and machine it is.
      drop: marked values that are no longer marked.
      change: arguments that are marked so from now on.
    """
    old = plan.propagated
    links = tuple(plan.problem.links.items())
    program = _without_mark_ops(old.program, drop)
    marks = {value: mark for value, mark in old.marks.items() if value not in drop}
    for value, sharding in (change or {}).items():
        reason = f"argument {old.program.arg_names[old.program.body.args.index(value)]}"
        marks[value] = Mark(sharding.dims, (False,) * len(sharding.dims), reason)
    body = program.body
    pairs = [(body.results[result], body.args[argument]) for result, argument in links]
    propagated = propagate(program, old.mesh, marks, cheap_values(program), pairs)
    wanted: list[Sharding | None] = [
        None if value in drop else mark
        for value, mark in zip(old.program.body.results, plan.problem.results, strict=True)
    ]
    return plan_problem(problem_of(propagated, plan.topology, wanted, links), Options()).plan


def _without_mark_ops(program: Program, drop: Collection[Value]) -> Program:
    """The program whose mark ops with these results are gone: uses read what was marked."""

    def edit(_: Builder, op: Op, __: Now) -> Sequence[Value] | None:
        return op.operands if op.is_mark and op.results[0] in drop else None

    return edit_ops(program, edit) if drop else program
