"""What marks cost: the program is propagated and planned again without them, one after another.

Only those next to the most expensive reshards are tried. A mark that makes a program much slower
than it would be without is said without being asked. Planning again takes as long as planning did:
that is done for few marks, for those around which the planner's sum has many seconds, and not at
all where a program is fast anyway.

    price of a mark  =  cost of the plan with it  -  cost of the plan without it
    share of a mark  =  1  -  time of the program planned without it  /  time of the program
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.compiler import plan_problem
from spmd.errors import PlanError
from spmd.explain.costs import with_runs
from spmd.explain.words import (
    bytes_text,
    seconds_text,
    share_text,
    source_text,
    spec_text,
    value_name,
)
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Value, numberless
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Mark, Sharding
from spmd.options import Options
from spmd.planning.plan import Move, Plan
from spmd.planning.problem import posed
from spmd.predict.ops import arithmetic_seconds
from spmd.predict.timeline import least_seconds

LEAST_SHARE = 0.2  # the part of a run that a mark costs if it is spoken of

OBVIOUS_SHARE = 0.5  # of the planner's sum around a mark, from which on nobody has to ask about it

LEAST_SECONDS = 1e-4
"""Predicted time of a run from which on marks are looked at without being asked. What takes less
mostly starts kernels and waits for links; to plan it again would take longer than a mark costs in a
thousand runs."""

# How much larger a device's arguments may be without a mark: else it is there to save memory.
MOST_MORE = 0.1
MOST_TRIES = 2  # marks without which a program is planned again
WORTH = 0.01  # the part of the time of all reshards that a mark must cost to be mentioned


class Price(NamedTuple):
    """Holds what a run with another decision costs more; negative numbers are savings."""

    seconds: float  # predicted time of one run
    bytes: int  # what each device sends, reshards only
    argument_bytes: int = 0  # what each device holds of the arguments: open ones may be held whole

    @property
    def run_text(self) -> str:
        """Its figures: `1.2 ms more, 30 MiB more sent`, `1.2 ms less, but 3 MiB more sent`."""
        sent = f"{bytes_text(abs(self.bytes))} {'more' if self.bytes > 0 else 'less'} sent"
        if abs(self.seconds) < 1e-9:
            return f"the same time, {sent}" if self.bytes else "costs the same"
        time = f"{seconds_text(abs(self.seconds))} {'more' if self.seconds > 0 else 'less'}"
        if not self.bytes:
            return f"{time}, the same bytes sent"
        return f"{time}, {'' if (self.seconds > 0) == (self.bytes > 0) else 'but '}{sent}"

    @property
    def text(self) -> str:
        """`run_text`, and how many bytes of the arguments each device holds more."""
        held = self.argument_bytes
        more = f"{bytes_text(abs(held))} {'more' if held > 0 else 'less'} per device"
        return f"{self.run_text}; arguments take {more}" if held else self.run_text


def price_of(plan: Plan, other: Plan) -> Price:
    """Returns what `other` costs more than `plan`, by the predicted times of their programs."""

    def sent(of: Plan) -> int:
        return sum(move.bytes for move in of.moves)

    seconds = other.run_seconds - plan.run_seconds
    return Price(seconds, sent(other) - sent(plan), held_bytes(other) - held_bytes(plan))


def held_bytes(plan: Plan) -> int:
    """Returns the bytes of the arguments that each device holds."""
    leaves = zip(plan.program.body.args, plan.arguments, strict=True)
    return sum(local_type(plan.program.types[v], s, plan.mesh).bytes for v, s in leaves)


class MarkGroup(NamedTuple):
    """Groups marks that a person made as one: at one line, or of arguments like `layers/*/w`."""

    name: str  # `mark_sharding at model.py:12 (f)`, `argument layers/*/w`
    values: tuple[Value, ...]
    # what the first of them says; in a `Relief`, the first that would lie otherwise
    sharding: Sharding
    seconds: float  # time of the reshards that are next to them

    def text(self, mesh: Mesh) -> str:
        """Names them, with the first one's sharding: `argument x ("data", None) and 2 more`."""
        more = f" and {len(self.values) - 1} more" if len(self.values) > 1 else ""
        return f"{source_text(self.name)} {spec_text(self.sharding, mesh)}{more}"


class Relief(NamedTuple):
    """Holds some marks, and what the program would cost without them."""

    marks: MarkGroup
    price: Price
    seconds: float  # predicted time of one run with them
    # how the marked value would lie; None if it would be made anew for every use
    instead: Sharding | None
    # where the marked values would lie as they are marked, the value that lies as `instead` says:
    # `argument w`, `multiply at model.py:12 (f)`. Empty if it is a marked one
    elsewhere: str = ""

    @property
    def without(self) -> float:
        """Predicted time of one run without the marks."""
        return self.seconds + self.price.seconds

    @property
    def share(self) -> float:
        """The share of a run's time that the marks cost."""
        return 1 - self.without / self.seconds


class MarkPrices(NamedTuple):
    """Holds the marks that cost enough to mention, those first without which most is saved."""

    reliefs: tuple[Relief, ...]
    tried: int  # how many groups of marks were left out, one after the other
    groups: int  # of so many that are next to any reshard


def mark_prices(plan: Plan, tries: int, options: Options | None = None) -> MarkPrices:
    """Plans again without each of `tries` groups of marks, those next to the costliest reshards."""
    groups = mark_groups(plan)
    least = WORTH * sum(move.seconds for move in plan.moves)
    found = [relief_of(plan, group, options) for group in groups[:tries]]
    worth = [relief for relief in found if 0 < -relief.price.seconds >= least]
    worth.sort(key=lambda relief: relief.price.seconds)
    return MarkPrices(tuple(worth), len(found), len(groups))


def relief_of(plan: Plan, group: MarkGroup, options: Options | None = None) -> Relief:
    """Plans again without a group of marks, and returns what that would save."""
    other, marks = replanned(plan, drop=group.values, options=options), plan.propagated.marks
    lies = {value: _lies(plan, other, group.values, value) for value in group.values}
    other_ones = (v for v in group.values if lies[v] != Sharding(marks[v].dims))
    first, price = next(other_ones, None), price_of(plan, other)
    if first is not None:
        group = group._replace(sharding=Sharding(marks[first].dims))
        return Relief(group, price, plan.run_seconds, lies[first])
    # They would lie as they are marked: the largest value that lies otherwise. What follows from it
    # differs, too; of equally large ones the first is closest to the cause.
    values = [*plan.program.body.args, *(v for op in plan.program.walk() for v in op.results)]
    moved = [
        (plan.program.types[value].bytes, value, state.full())
        for value in values
        if (have := plan.states[value]) is not None
        and (state := other.states[value]) is not None
        and have.full() != state.full()
    ]
    if not moved:
        return Relief(group, price, plan.run_seconds, lies[group.values[0]])
    _, value, instead = max(moved, key=lambda sized: sized[0])
    op, name = plan.problem.index.producers.get(value), value_name(plan.program, value)
    if value in plan.program.body.args:
        elsewhere = f"argument {name}"
    elif op is None:
        elsewhere = f"the loop's carry {name}"
    else:
        elsewhere = f"{op.label} at {op.loc.trail}" if op.loc.frames else op.label
    return Relief(group, price, plan.run_seconds, instead, elsewhere)


def _lies(plan: Plan, other: Plan, dropped: Collection[Value], value: Value) -> Sharding | None:
    """Returns a value's sharding in `other`, planned without marks; None if it is made per use."""
    body, producers = other.program.body, plan.problem.index.producers
    while value in dropped and (op := producers.get(value)) is not None and op.is_mark:
        value = op.operands[0]  # what is marked keeps its number, the mark's own is gone
    if value in body.args:
        return other.arguments[body.args.index(value)]
    if value in body.results:
        return other.results[body.results.index(value)]
    state = other.states[value]
    return None if state is None else state.full()


def costly_mark(plan: Plan, options: Options, suspicion: float) -> Relief | None:
    """Returns the mark that costs the most, if that is more than `LEAST_SHARE` of a run.

    A mark that keeps arguments small does not count: its time pays for the memory. Only marks
    are tried around which the planner's sum of costs has a share of `suspicion` or more.
    """
    most = (1 - LEAST_SHARE) * plan.run_seconds
    if least_seconds(plan.problem.index, plan.mesh, plan.topology) >= most:
        return None
    # Arithmetic that several devices repeat, by its first result.
    again: dict[Value, float] = {}
    for op, times in with_runs(plan.program.body, plan.problem.index):
        choice = plan.choices.get(op.results[0]) if op.results else None
        if op.kind.about.flops is not None and choice is not None:
            split = plan.mesh.extent({a for axes in choice.assignment for a in axes})
            whole = arithmetic_seconds(op.kind, plan.topology)
            seconds = times * whole * (1 / split - 1 / plan.mesh.size)
            if seconds > 0:
                again[op.results[0]] = seconds
    blamed = blamed_groups(plan)
    pairs = zip(blamed, _seconds_behind(plan, blamed, again), strict=True)
    groups = [group._replace(seconds=group.seconds + more) for group, more in pairs]
    groups.sort(key=lambda group: -group.seconds)
    suspects = [group for group in groups if group.seconds > suspicion * plan.seconds]
    found = []
    for group in suspects[:MOST_TRIES]:
        try:
            relief = relief_of(plan, group, options)
        except PlanError:  # without the mark nothing fits into the memory
            continue
        more = relief.price.argument_bytes
        if relief.without < most and more <= MOST_MORE * held_bytes(plan):
            found.append(relief)
    return max(found, key=lambda relief: relief.share, default=None)


def _seconds_behind(
    plan: Plan, groups: Sequence[MarkGroup], seconds: Mapping[Value, float]
) -> list[float]:
    """Sums up, for each group, the seconds of what it marks and of all that is computed from it."""
    # One pass with a bit for each group: on Explicit axes there are marks on most lines.
    behind: defaultdict[Value, int] = defaultdict(int)
    for bit, group in enumerate(groups):
        for value in group.values:
            behind[value] |= 1 << bit
    for op in plan.program.walk():
        bits = functools.reduce(operator.or_, [behind.get(v, 0) for v in op.operands], 0)
        if bits:
            for value in op.results:
                behind[value] |= bits
    return [
        sum(spent for value, spent in seconds.items() if behind.get(value, 0) >> bit & 1)
        for bit in range(len(groups))
    ]


def costly_text(relief: Relief, mesh: Mesh) -> str:
    """Says what marks cost, and how values would lie without them."""
    instead, held = relief.instead, relief.price.argument_bytes
    where = "computed anew for each use" if instead is None else spec_text(instead, mesh)
    where = f"{source_text(relief.elsewhere)} as {where}" if relief.elsewhere else where
    more = f"; arguments take {bytes_text(held)} more per device" if held > 0 else ""
    return (
        f"{relief.marks.text(mesh)} costs {share_text(relief.share, 1.0)} of a predicted run: "
        f"{seconds_text(relief.seconds)}, without it {seconds_text(relief.without)}, "
        f"with {where} instead{more}"
    )


def mark_groups(plan: Plan, every: bool = False) -> tuple[MarkGroup, ...]:
    """Groups the marks next to reshards, or every mark; those next to the most time first."""
    members, names = _members(plan)
    seconds = dict.fromkeys(members, 0.0) if every else {}
    for move in plan.moves:
        around = (*_marks_at(plan, move), *_roots(plan, move))
        for name in dict.fromkeys(names[value] for value in around if value in names):
            seconds[name] = seconds.get(name, 0.0) + move.seconds
    return _groups(plan, members, seconds)


def blamed_groups(plan: Plan) -> tuple[MarkGroup, ...]:
    """Groups all marks, each with the seconds of the reshards that it most likely causes.

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
    """Returns the marked values of each group, and each marked value's group."""
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
    propagated, body = plan.propagated, plan.program.body
    ends = [move.value, *(move.user.results if move.user else ())]
    if move.user is None and move.value in body.results:
        # It became the result that updates an argument, and had to look like that.
        argument = plan.problem.links.get(body.results.index(move.value))
        ends += [] if argument is None else [body.args[argument]]
    yield from (value for value in ends if value in propagated.marks)


def _roots(plan: Plan, move: Move) -> Iterator[Value]:
    """Yields the marked values from which the axes that a reshard moves were propagated."""
    propagated = plan.propagated
    reads = (*move.user.operands, *move.user.results) if move.user else ()
    before, after = (
        {(dim, atom) for dim, axes in enumerate(sharding.dims) for atom in axes}
        for sharding in (move.have, move.wanted)
    )
    atoms = {atom for _, atom in before ^ after}.union(move.have.partial)
    for value in (move.value, *reads):
        for dim, axes in enumerate(propagated.proposals[value]):
            roots = (propagated.root(value, dim, atom) for atom in axes if atom in atoms)
            yield from (root for root in roots if root is not None)


def replanned(
    plan: Plan,
    drop: Collection[Value] = (),
    change: Mapping[Value, Sharding] | None = None,
    options: Options | None = None,
) -> Plan:
    """Plans the program again without the marks of `drop`, with arguments split as in `change`."""
    old = plan.propagated
    links = tuple(plan.problem.links.items())

    def edit(_: Builder, op: Op, __: Now) -> Sequence[Value] | None:
        return op.operands if op.is_mark and op.results[0] in drop else None

    program = edit_ops(old.program, edit) if drop else old.program
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
