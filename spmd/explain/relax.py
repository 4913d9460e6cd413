"""What marks cost: the program is propagated and planned again without them, one after another.

Only those next to the most expensive reshards are tried.

    price of a mark  =  cost of the plan with it  -  cost of the plan without it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.compiler import plan_problem
from spmd.explain.price import Price, price_of
from spmd.explain.words import value_name
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value, numberless
from spmd.ir.rewrite import Now, edit_ops
from spmd.mesh.sharding import Mark, Sharding
from spmd.options import Options
from spmd.planning.plan import Move, Plan
from spmd.planning.problem import posed

WORTH = 0.01
"""The part of the time of all reshards that a mark must cost to be mentioned."""


class MarkGroup(NamedTuple):
    """Marks that are one to a person: made at one line, or of arguments that differ in numbers.

    Attributes:
      name: `mark_sharding at model.py:12 (f)`, `argument layers/*/w`.
      values: the marked values.
      sharding: what the first of them says; in a `Relief`, the first that would lie otherwise.
      seconds: time of the reshards that are next to them.
    """

    name: str
    values: tuple[Value, ...]
    sharding: Sharding
    seconds: float


class Relief(NamedTuple):
    """Some marks, and what the program would cost without them.

    Attributes:
      marks: the marks.
      price: of leaving them out.
      instead: how the marked value would lie; None if it would be made anew for every use.
      elsewhere: where the marked values would lie as they are marked, the value that lies as
        `instead` says: `argument w`, `multiply at model.py:12 (f)`. Empty if it is a marked one.
    """

    marks: MarkGroup
    price: Price
    instead: Sharding | None
    elsewhere: str = ""


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


def mark_prices(plan: Plan, tries: int, options: Options | None = None) -> MarkPrices:
    """Plans again without the marks next to the most expensive reshards, group by group.

    Args:
      plan: the plan with all of them.
      tries: how often to plan again at most.
      options: what the plan was made with.
    """
    groups = mark_groups(plan)
    least = WORTH * sum(move.seconds for move in plan.moves)
    found = [relief_of(plan, group, options) for group in groups[:tries]]
    worth = [relief for relief in found if 0 < -relief.price.seconds >= least]
    worth.sort(key=lambda relief: relief.price.seconds)
    return MarkPrices(tuple(worth), len(found), len(groups))


def relief_of(plan: Plan, group: MarkGroup, options: Options | None = None) -> Relief:
    """What the program would cost without a group of marks."""
    other, marks = replanned(plan, drop=group.values, options=options), plan.propagated.marks
    lies = {value: _lies(plan, other, group.values, value) for value in group.values}
    other_ones = (v for v in group.values if lies[v] != Sharding(marks[v].dims))
    first, price = next(other_ones, None), price_of(plan, other)
    if first is not None:
        return Relief(group._replace(sharding=Sharding(marks[first].dims)), price, lies[first])
    value = _elsewhere(plan, other)
    if value is None:
        return Relief(group, price, lies[group.values[0]])
    state = other.states[value]
    return Relief(group, price, state and state.full(), _described(plan, value))


def _elsewhere(plan: Plan, other: Plan) -> Value | None:
    """The largest value that lies in another way in another plan of nearly the same program."""
    # What follows from it differs, too; of equally large ones the first is closest to the cause.
    values = [*plan.program.body.args, *(v for op in plan.program.walk() for v in op.results)]
    moved = [
        value
        for value in values
        if (have := plan.states[value]) is not None
        and (state := other.states[value]) is not None
        and have.full() != state.full()
    ]
    return max(moved, key=lambda value: plan.program.types[value].bytes, default=None)


def _described(plan: Plan, value: Value) -> str:
    """An argument's name, else the op that makes the value, and its line."""
    op = plan.problem.index.producers.get(value)
    if value in plan.program.body.args:
        return f"argument {value_name(plan.program, value)}"
    if op is None:
        return f"the loop's carry {value_name(plan.program, value)}"
    return f"{op.label} at {op.loc.trail}" if op.loc.frames else op.label


def _lies(plan: Plan, other: Plan, dropped: Collection[Value], value: Value) -> Sharding | None:
    """How one of some values lies in a plan of the program without their marks."""
    body, producers = other.program.body, plan.problem.index.producers
    while value in dropped and (op := producers.get(value)) is not None and op.is_mark:
        value = op.operands[0]  # what is marked keeps its number, the mark's own is gone
    if value in body.args:
        return other.arguments[body.args.index(value)]
    if value in body.results:
        return other.results[body.results.index(value)]
    state = other.states[value]
    return None if state is None else state.full()


# ---------------------------------------------------------------------------------------------
# Which marks are next to which reshards.


def mark_groups(plan: Plan, every: bool = False) -> tuple[MarkGroup, ...]:
    """The marks that are next to reshards, those next to the most time first.

    Args:
      plan: the plan.
      every: whether marks that are next to no reshard are among them, too.
    """
    members, names = _members(plan)
    seconds = dict.fromkeys(members, 0.0) if every else {}
    for move in plan.moves:
        around = (*_marks_at(plan, move), *_roots(plan, move))
        for name in dict.fromkeys(names[value] for value in around if value in names):
            seconds[name] = seconds.get(name, 0.0) + move.seconds
    return _groups(plan, members, seconds)


def blamed_groups(plan: Plan) -> tuple[MarkGroup, ...]:
    """All marks, with the reshards that each is to blame for, as far as one can tell.

    Arguments that a reshard's axes come from share the blame: without one of their marks it would
    most likely be there still.
    """
    members, names = _members(plan)
    arguments = {names[v] for v in plan.program.body.args if v in names}
    seconds = dict.fromkeys(members, 0.0)
    for move in plan.moves:
        ends = {names[value] for value in _marks_at(plan, move)}
        # What a manual region makes comes from no mark.
        roots = {names[value] for value in _roots(plan, move) if value in names} - ends
        for name in ends | roots - arguments:
            seconds[name] += move.seconds
        for name in roots & arguments:
            seconds[name] += move.seconds / len(roots | ends)
    return _groups(plan, members, seconds)


def _members(plan: Plan) -> tuple[dict[str, list[Value]], dict[Value, str]]:
    """The marked values of each group, and the group of each."""
    members: dict[str, list[Value]] = {}
    for value, mark in plan.propagated.marks.items():
        # Arguments that are marked like another one belong to that one's group.
        members.setdefault(numberless(mark.reason.removeprefix("like ")), []).append(value)
    return members, {value: name for name, values in members.items() for value in values}


def _groups(
    plan: Plan, members: Mapping[str, Sequence[Value]], seconds: Mapping[str, float]
) -> tuple[MarkGroup, ...]:
    marks = plan.propagated.marks
    groups = [
        MarkGroup(name, tuple(members[name]), Sharding(marks[members[name][0]].dims), time)
        for name, time in seconds.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


def _marks_at(plan: Plan, move: Move) -> Iterator[Value]:
    """The marked values that a reshard comes from or goes to."""
    propagated, body = plan.propagated, plan.program.body
    ends = [move.value, *(move.user.results if move.user else ())]
    if move.user is None and move.value in body.results:
        # It became the result that updates an argument, and had to look like that.
        argument = plan.problem.links.get(body.results.index(move.value))
        ends += [] if argument is None else [body.args[argument]]
    yield from (value for value in ends if value in propagated.marks)


def _roots(plan: Plan, move: Move) -> Iterator[Value]:
    """The marked values that the axes come from which a reshard moves."""
    propagated = plan.propagated
    reads = (*move.user.operands, *move.user.results) if move.user else ()
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
    options: Options | None = None,
) -> Plan:
    """The plan of the same program under other marks.

    Args:
      plan: the plan whose program, mesh and machine it is.
      drop: marked values that are no longer marked.
      change: arguments that are marked so from now on.
      options: what the plan was made with.
    """
    old = plan.propagated
    links = tuple(plan.problem.links.items())
    program = _without_mark_ops(old.program, drop)
    marks = {value: mark for value, mark in old.marks.items() if value not in drop}
    for value, sharding in (change or {}).items():
        reason = f"argument {old.program.arg_names[old.program.body.args.index(value)]}"
        marks[value] = Mark(sharding.dims, (False,) * len(sharding.dims), reason)
    wanted: list[Sharding | None] = [
        None if value in drop else mark
        for value, mark in zip(old.program.body.results, plan.problem.results, strict=True)
    ]
    problem = posed(program, old.mesh, marks, plan.topology, wanted, links)
    donated = tuple(plan.problem.links.values())
    return plan_problem(problem, options or Options(), donated).plan


def _without_mark_ops(program: Program, drop: Collection[Value]) -> Program:
    """The program whose mark ops with these results are gone: uses read what was marked."""

    def edit(_: Builder, op: Op, __: Now) -> Sequence[Value] | None:
        return op.operands if op.is_mark and op.results[0] in drop else None

    return edit_ops(program, edit) if drop else program
