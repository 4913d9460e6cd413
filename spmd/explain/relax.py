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
    worth = [relief for relief in found if 0 < -relief.price.seconds >= least]
    worth.sort(key=lambda relief: relief.price.seconds)
    return MarkPrices(tuple(worth), len(found), len(groups))


def relief_of(plan: Plan, group: MarkGroup) -> Relief:
    """What the program would cost without a group of marks."""
    return Relief(group, price_of(plan, replanned(plan, drop=group.values)))


def price_of(plan: Plan, other: Plan) -> Price:
    """What another plan costs more than a plan, by the predicted times of their programs."""

    def sent(of: Plan) -> int:
        return sum(move.bytes for move in of.moves)

    def held(of: Plan) -> int:
        leaves = zip(of.program.body.args, of.arguments, strict=True)
        return sum(local_type(of.program.types[v], s, of.mesh).bytes for v, s in leaves)

    seconds = other.run_seconds - plan.run_seconds
    return Price(seconds, sent(other) - sent(plan), held(other) - held(plan))


# ---------------------------------------------------------------------------------------------
# Which marks are next to which reshards.


def mark_groups(plan: Plan, every: bool = False) -> tuple[MarkGroup, ...]:
    """The marks that are next to reshards, those next to the most time first.

    Args:
      plan: the plan.
      every: whether marks that are next to no reshard are among them, too.
    """
    marks = plan.propagated.marks
    members: dict[str, list[Value]] = {}
    for value, mark in marks.items():
        # Arguments that are marked like another one belong to that one's group.
        members.setdefault(numberless(mark.reason.removeprefix("like ")), []).append(value)
    names = {value: name for name, values in members.items() for value in values}
    seconds = dict.fromkeys(members, 0.0) if every else {}
    for move in plan.moves:
        for name in dict.fromkeys(names[value] for value in _marks_around(plan, move)):
            seconds[name] = seconds.get(name, 0.0) + move.seconds
    groups = [
        MarkGroup(name, tuple(members[name]), Sharding(marks[members[name][0]].dims), time)
        for name, time in seconds.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


def _marks_around(plan: Plan, move: Move) -> Iterator[Value]:
    """The marked values that a reshard comes from or goes to: itself, its user, or origins."""
    propagated, body = plan.propagated, plan.program.body
    reads = (*move.user.operands, *move.user.results) if move.user else ()
    ends = [move.value, *(move.user.results if move.user else ())]
    if move.user is None and move.value in body.results:
        # It became the result that updates an argument, and had to look like that.
        argument = plan.problem.links.get(body.results.index(move.value))
        ends += [] if argument is None else [body.args[argument]]
    yield from (value for value in ends if value in propagated.marks)
    changed = {(d, a) for d, axes in enumerate(move.have.dims) for a in axes} ^ {
        (d, a) for d, axes in enumerate(move.wanted.dims) for a in axes
    }
    atoms = {a for _, a in changed}.union(move.have.partial)
    for value in (move.value, *reads):
        for dim, axes in enumerate(propagated.proposals[value]):
            roots = (propagated.root(value, dim, atom) for atom in axes if atom in atoms)
            yield from (root for root in roots if root is not None)


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
