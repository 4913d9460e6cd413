"""Prices of decisions that a plan did not take: other choices, and the program without some marks.

A decision is a variable of the planner's cost network. To price another choice, the network is
solved again with only this choice left to the variable. The solution is a plan, which is lowered to
a local program and timed like the first plan. So a price counts all that follows from the choice.

    price of a choice  =  time of the best plan that makes it  -  time of the plan

To price a mark, the program is propagated and planned again without it, which takes as long as
planning did. So only a few marks are priced, those to which the most time may be due. A mark that
makes a program much slower is warned of even where prices were not asked for.

    share of a mark  =  1  -  time of the program planned without it  /  time of the program
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from spmd.compiler import Stages, plan_problem, timed
from spmd.errors import PlanError
from spmd.explain import words as w
from spmd.explain.costs import with_runs
from spmd.ir.program import Value, numberless
from spmd.ir.rewrite import edit_ops
from spmd.ir.types import local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark, Sharding, is_legal
from spmd.mesh.spec import has_parts
from spmd.options import Options
from spmd.planning.exact import weighed
from spmd.planning.network import CostNetwork, decoded
from spmd.planning.plan import Move, Plan
from spmd.planning.problem import posed
from spmd.planning.solver import FORBIDDEN, Reduced
from spmd.planning.units import CARRY, OP
from spmd.predict.ops import arithmetic_seconds
from spmd.predict.timeline import least_seconds
from spmd.propagation.propagate import Conflict

T = TypeVar("T")

MOST_TRIES = 5  # groups of marks that are priced for a report
MOST_CONFLICTS = 24  # rows of conflicts for which a report says what other axes would cost
MOST_OTHERS = 5  # other shardings of one argument for which a program is planned again
# Ops of all programs that are timed for one part of a report: of large ones fewer are timed.
MOST_OPS = 28_000
# Programs that are timed while one is planned again; and those of a conflict's losing claims.
TIMED_FOR_MARK, TIMED_FOR_CONFLICT = 6, 2
LEAST_SHARE = 0.2  # the share of a run's time from which on a report warns of a mark
OBVIOUS_SHARE = 0.5  # the share of a plan's costs due to a mark from which on it is priced unasked
# Predicted time of a run from which on marks are looked at without being asked. To plan again what
# takes less would take longer than a mark costs in a thousand runs.
LEAST_SECONDS = 1e-4
# How much larger a device's arguments may be without a mark: else it is there to save memory.
MOST_MORE = 0.1
MOST_SUSPECTS = 2  # groups of marks that are priced to find one to warn of
WORTH = 0.01  # the part of the time of all reshards that a mark must cost to be mentioned

NO_AXIS = "no axis"


class Price(NamedTuple):
    """Holds how much more a run costs with another decision; negative numbers are savings."""

    seconds: float  # predicted time of one run
    bytes: int  # that each device sends in one run, in reshards alone
    argument_bytes: int = 0  # what each device holds of the arguments: open ones may be held whole

    @property
    def text(self) -> str:
        """Time, traffic and memory: `2 ms less, but 3 MiB more sent; arguments take 1 MiB ..`."""

        def more(amount: float, text: str) -> str:
            return f"{text} {'more' if amount > 0 else 'less'}"

        time = more(self.seconds, w.seconds_text(abs(self.seconds)))
        sent = more(self.bytes, w.bytes_text(abs(self.bytes))) + " sent"
        if abs(self.seconds) < 1e-9:
            said = f"the same time, {sent}" if self.bytes else "costs the same"
        elif not self.bytes:
            said = f"{time}, the same bytes sent"
        else:
            said = f"{time}, {'' if (self.seconds > 0) == (self.bytes > 0) else 'but '}{sent}"
        if not self.argument_bytes:
            return said
        held = more(self.argument_bytes, w.bytes_text(abs(self.argument_bytes)))
        return f"{said}; arguments take {held} per device"


def price_of(plan: Plan, other: Plan) -> Price:
    """Returns how much more `other` costs than `plan`, by the predicted times in `run_seconds`."""
    seconds = other.run_seconds - plan.run_seconds
    more, less = (sum(move.bytes for move in of.moves) for of in (other, plan))
    return Price(seconds, more - less, held_bytes(other) - held_bytes(plan))


def held_bytes(plan: Plan) -> int:
    """Returns the bytes that each device holds of all arguments and large constants."""
    leaves = zip(plan.program.body.args, plan.arguments, strict=True)
    return sum(local_type(plan.program.types[v], s, plan.mesh).bytes for v, s in leaves)


class Prices:
    """Computes prices of decisions that a plan did not take, each when it is first needed."""

    def __init__(self, plan: Plan, options: Options | None = None) -> None:
        self.plan, self.options = plan, options or Options()
        self._reduced = functools.cache(lambda kept: Reduced(self._built.network, kept))
        self._timed: dict[object, Plan] = {}

    @cached_property
    def marks(self) -> w.Section:
        """What a run would save without the marks that may cost the most, one group at a time."""
        groups = [group for group in mark_groups(self.plan) if group.seconds]
        tried = groups[: self.most(MOST_TRIES, TIMED_FOR_MARK)]
        reliefs = [relief_of(self.plan, group, self.options) for group in tried]
        least = WORTH * sum(move.seconds for move in self.plan.moves)
        worth = [relief for relief in reliefs if 0 < -relief.price.seconds >= least]
        worth.sort(key=lambda relief: relief.price.seconds)
        rows = [(f"without {r.marks.text(self.plan.mesh)}", r.price.text) for r in worth]
        if groups and not rows:
            rows = [("none of them", f"costs {WORTH:.0%} of the collectives' time or more")]
        which = f"the {len(groups)} kinds of marks that time may be due to"
        if len(tried) < len(groups):
            which = f"{len(tried)} of {which}"
        said = f"without {which}, one at a time, the program was planned again"
        title = "marks that forbid something cheaper"
        return w.Section(title, said, [w.Item("", "", rows)] if rows else [])

    def most(self, most: int, timed: int) -> int:
        """Returns how many decisions to price, 1 to `most`, if each times `timed` programs."""
        ops = sum(1 for _ in self.plan.program.walk())
        return max(1, min(most, MOST_OPS // max(1, timed * ops)))

    @cached_property
    def costly_mark(self) -> "Relief | None":
        """The marks that cost most, if that is more than `LEAST_SHARE` of a run; else None.

        Marks that save memory for arguments do not count. A group is tried only if a run takes
        `LEAST_SECONDS`, and what may be due to it is over `OBVIOUS_SHARE` of the plan's costs.
        """
        plan, most = self.plan, (1 - LEAST_SHARE) * self.plan.run_seconds
        if plan.run_seconds < LEAST_SECONDS:
            return None
        if least_seconds(plan.problem.index, plan.mesh, plan.topology) >= most:
            return None
        found = []
        for group in mark_groups(plan)[:MOST_SUSPECTS]:
            if group.seconds <= OBVIOUS_SHARE * plan.seconds:
                break
            try:
                relief = relief_of(plan, group, self.options)
            except PlanError:  # without the mark nothing fits into the memory
                continue
            more = relief.price.argument_bytes
            if relief.without < most and more <= MOST_MORE * held_bytes(plan):
                found.append(relief)
        return max(found, key=lambda relief: relief.share, default=None)

    def others(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Returns other shardings of a value with their prices, the cheapest first.

        For an argument the program is planned again with those that its uses want, each dim over
        each mesh axis, and replicated; `MOST_OTHERS` at most. For other values they are what the
        planner weighed: nothing for cheap ones, of which each use makes its own copy.
        """
        plan = self.plan
        if value not in plan.program.body.args:
            number, index = self._built.units.of[value]
            if number < 0 or self._built.units.units[number].role not in (OP, CARRY):
                return ()
            left = self._built.domains.left[number][index]
            return self._priced(number, left, plan.states[value], (number,))
        type_, have = plan.program.types[value], plan.arguments[plan.program.body.args.index(value)]
        wanted = [move.wanted.full() for move in plan.moves if move.value == value]
        # One dim over one axis of the mesh, larger axes first; then whole.
        dims, axes = range(type_.rank), filter(None, plan.mesh.axis_atoms.values())
        for atoms in sorted(axes, key=plan.mesh.extent, reverse=True):
            wanted += [Sharding(tuple(atoms * (d == dim) for d in dims)) for dim in dims]
        wanted.append(Sharding(((),) * type_.rank))
        legal = [
            sharding
            for sharding in dict.fromkeys(wanted)
            if sharding != have
            and is_legal(sharding, type_.shape, plan.mesh)
            and not has_parts(sharding, plan.mesh)
        ]
        found = [
            (sharding, price_of(plan, replanned(plan, (), {value: sharding}, self.options)))
            for sharding in legal[:MOST_OTHERS]
        ]
        return tuple(sorted(found, key=lambda pair: pair[1].seconds))

    @cached_property
    def _built(self) -> CostNetwork:
        """The planner's cost network, of which the plan is a solution."""
        costs = weighed(self.plan.problem)[1]
        exposed, by_slack = self.plan.exposed, self.plan.by_slack
        return costs if exposed == costs.exposed else costs.with_exposed(exposed, by_slack)

    def of_conflicts(
        self, conflicts: Sequence[Conflict]
    ) -> tuple[tuple[tuple[Axes, Price], ...], ...]:
        """Returns for each conflict the axes that were not taken with prices, the cheapest first.

        They are the claimed axes and `()`, no axis. Those that no plan can take are left out.
        """
        units, domains = self._built.units, self._built.domains

        def place_of(conflict: Conflict) -> tuple[int, tuple[Axes, ...]] | None:
            """Returns (variable of a conflict's op or carry, axes of factor or dim in each choice).

            None where the network has no variable: around values of which each use makes its own.
            """
            if conflict.op.results:
                number = units.of[conflict.op.results[0]][0]
                if number < 0:
                    return None
                options = domains.choices[number]
                if options and conflict.factor < len(options[0].assignment):
                    return number, tuple(c.assignment[conflict.factor] for c in options)
            for _, value, dim in conflict.claims:
                number, index = units.of[value]
                if number >= 0 and units.units[number].role == CARRY:
                    return number, tuple(s.dims[dim] for s in domains.left[number][index])
            return None

        places = [place_of(conflict) for conflict in conflicts]
        together = tuple(sorted({place[0] for place in places if place is not None}))
        found: list[tuple[tuple[Axes, Price], ...]] = [()] * len(conflicts)
        for i, (conflict, place) in enumerate(zip(conflicts, places, strict=True)):
            if place is not None:
                claims = {(), *(axes for axes, _, _ in conflict.claims)}
                wanted = [axes if axes in claims else None for axes in place[1]]
                found[i] = self._priced(place[0], wanted, taken_axes(self.plan, conflict), together)
        return tuple(found)

    def _priced(
        self, number: int, labels: Sequence[T | None], taken: T | None, together: tuple[int, ...]
    ) -> tuple[tuple[T, Price], ...]:
        """Returns each label but `taken` with its price, the cheapest first.

        `labels` has what is priced (a sharding, say) for each choice of variable `number`, None for
        choices not to price. A label's price is that of the best plan with one of its choices;
        without any it is left out. `together` are the variables that are priced with this one.
        """
        asked = {
            state: label
            for state, choice in enumerate(self._built.variables[number].choices.tolist())
            if (label := labels[choice]) is not None and label != taken
        }
        found = []
        for label, states in w.grouped(asked, asked.__getitem__).items():
            solution = self._reduced(frozenset(together)).solve({number: tuple(states)})
            if solution.cost < FORBIDDEN / 2:
                if solution.states not in self._timed:  # many questions have the same answer
                    other = decoded(self._built, solution)._replace(byte_price=self.plan.byte_price)
                    self._timed[solution.states] = timed(other, self.options)
                found.append((label, price_of(self.plan, self._timed[solution.states])))
        return tuple(sorted(found, key=lambda pair: pair[1].seconds))


def taken_axes(plan: Plan, conflict: Conflict) -> Axes:
    """Returns the plan's axes of a conflict's factor; without a choice, of its last claim's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()


def conflicts(stages: Stages, prices: Prices | None = None) -> w.Section:
    """Lists propagation's conflicts and what the plan took, equal ones together.

    Most bytes come first. With `prices`, the first ones say what the axes not taken would cost.
    """
    plan = stages.plan
    program, mesh, types = plan.program, plan.mesh, plan.program.types
    found = []  # ((op, source line, who wants what but for their names, what was taken), conflict)
    for conflict in stages.propagated.conflicts:
        wishes = tuple(
            f"{w.type_text(types[value])} dim {dim} wants {w.axes_text(axes, mesh)}"
            for axes, value, dim in conflict.claims
        )
        taken = w.axes_text(taken_axes(plan, conflict), mesh) or NO_AXIS
        found.append(((conflict.op.label, conflict.op.loc.trail, wishes, taken), conflict))
    groups = sorted(
        w.grouped(found, lambda row: row[0]).items(),
        key=lambda group: (
            -len(group[1]) * max(types[value].bytes for _, value, _ in group[1][0][1].claims)
        ),
    )
    programs = TIMED_FOR_CONFLICT * (2 if plan.byte_price else 1)  # whole, and with remat
    asked = [] if prices is None else groups[: prices.most(MOST_CONFLICTS, programs)]
    priced = prices.of_conflicts([alike[0][1] for _, alike in asked]) if prices is not None else ()
    items, arguments = [], dict(zip(program.body.args, program.arg_names, strict=True))
    for i, ((op, trail, wishes, taken), alike) in enumerate(groups):
        names = [numberless(arguments.get(v, f"%{v}")) for _, v, _ in alike[0][1].claims]
        rows = list(zip(names, wishes, strict=True))
        for axes, price in priced[i] if i < len(asked) else ():
            rows.append((f"{w.axes_text(axes, mesh) or NO_AXIS} instead", price.text))
        more = f" ({len(alike)} alike)" if len(alike) > 1 else ""
        items.append(w.Item(f"{op}{more}: took {taken}", trail, rows))
    said = f"{len(found)}"
    if asked:
        said += f", of {len(items)} kinds; what the claims that lost would cost"
        said += "" if len(asked) == len(items) else f" (the first {len(asked)})"
    return w.Section("conflicts", said, items)


class MarkGroup(NamedTuple):
    """Holds marks that belong together: of one source line, or of arguments like `layers/*/w`."""

    name: str  # `mark_sharding at model.py:12 (f)`, `argument layers/*/w`
    values: tuple[Value, ...]
    sharding: Sharding  # of the first mark
    seconds: float  # predicted, of reshards and repeated arithmetic that may be due to them

    def text(self, mesh: Mesh) -> str:
        """Returns the group in words: `argument x ("data", None) and 2 more`."""
        more = f" and {len(self.values) - 1} more" if len(self.values) > 1 else ""
        return f"{w.source_text(self.name)} {w.spec_text(self.sharding, mesh)}{more}"


class Relief(NamedTuple):
    """Holds a group of marks, and how time, bytes and shardings would change without them."""

    marks: MarkGroup
    price: Price  # of the program without them, so negative seconds if that is faster
    seconds: float  # predicted time of one run with them
    # the first mark's value's sharding without them; None if each use would make its own copy
    instead: Sharding | None

    @property
    def without(self) -> float:
        """Predicted seconds of one run without the marks."""
        return self.seconds + self.price.seconds

    @property
    def share(self) -> float:
        """The share of a run's time that would be saved without the marks: 0.25 is a quarter."""
        return 1 - self.without / self.seconds


def relief_of(plan: Plan, group: MarkGroup, options: Options | None = None) -> Relief:
    """Plans again without a group of marks; returns the price and a sharding that this changes."""
    other, marks = replanned(plan, drop=group.values, options=options), plan.propagated.marks
    body, producers = other.program.body, plan.problem.index.producers

    def lies(value: Value) -> Sharding | None:
        while value in group.values and (op := producers.get(value)) is not None and op.is_mark:
            value = op.operands[0]  # what is marked keeps its number, the mark's own is gone
        if value in body.args:
            return other.arguments[body.args.index(value)]
        if value in body.results:
            return other.results[body.results.index(value)]
        state = other.states[value]
        return None if state is None else state.full()

    # The first that would lie otherwise, if one does.
    shardings = {value: Sharding(marks[value].dims) for value in group.values}
    first = next((v for v in group.values if lies(v) != shardings[v]), group.values[0])
    group = group._replace(sharding=shardings[first])
    return Relief(group, price_of(plan, other), plan.run_seconds, lies(first))


def _seconds_behind(
    plan: Plan, groups: Sequence[MarkGroup], seconds: Mapping[Value, float]
) -> list[float]:
    """Returns for each group the sum of `seconds` of its values and of all computed from them."""
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
    """Returns a sentence on what share of a run marks cost, and the sharding without them."""
    instead, held = relief.instead, relief.price.argument_bytes
    where = "computed anew for each use" if instead is None else w.spec_text(instead, mesh)
    other = f", with {where} instead" if instead != relief.marks.sharding else ""
    more = f"; arguments take {w.bytes_text(held)} more per device" if held > 0 else ""
    return (
        f"{relief.marks.text(mesh)} costs {w.share_text(relief.share, 1.0)} of a predicted run: "
        f"{w.seconds_text(relief.seconds)}, without it {w.seconds_text(relief.without)}"
        f"{other}{more}"
    )


def mark_groups(plan: Plan) -> tuple[MarkGroup, ...]:
    """Returns the marks in groups, those first to which the most predicted seconds may be due.

    A reshard may be due to marks of its value, of its reader's results, and of values from which
    the axes that change were propagated. The group of each gets all seconds of the reshard; a
    group of arguments that is only an origin gets these divided by the number of such groups.
    Arithmetic that devices repeat may be due to every mark on what it is computed from.
    """
    propagated, body = plan.propagated, plan.program.body
    # Arguments that are marked like another one belong to that one's group.
    names = {
        value: numberless(mark.reason.removeprefix("like "))
        for value, mark in propagated.marks.items()
    }
    members = w.grouped(names, names.__getitem__)
    arguments = {names[v] for v in body.args if v in names}
    groups = [
        MarkGroup(name, tuple(values), Sharding(propagated.marks[values[0]].dims), 0.0)
        for name, values in members.items()
    ]
    again: dict[Value, float] = {}  # an op's first result -> seconds that several devices repeat
    for op, times in with_runs(plan.program.body, plan.problem.index):
        choice = plan.choices.get(op.results[0]) if op.results else None
        if op.kind.about.flops is not None and choice is not None:
            split = plan.mesh.extent({a for axes in choice.assignment for a in axes})
            whole = arithmetic_seconds(op.kind, plan.topology)
            if split < plan.mesh.size:
                again[op.results[0]] = times * whole * (1 / split - 1 / plan.mesh.size)
    seconds = dict(zip(members, _seconds_behind(plan, groups, again), strict=True))
    for move in plan.moves:
        at = [move.value, *(move.user.results if move.user else ())]
        if move.user is None and move.value in body.results:
            # It became the result that updates an argument, and had to look like that.
            argument = plan.problem.links.get(body.results.index(move.value))
            at += [] if argument is None else [body.args[argument]]
        ends = {names[v] for v in at if v in names}
        # What a manual region makes comes from no mark.
        roots = {names[v] for v in _roots(plan, move) if v in names}
        for name in ends | roots:
            parts = len(ends | roots) if name in arguments and name not in ends else 1
            seconds[name] += move.seconds / parts
    groups = [group._replace(seconds=seconds[group.name]) for group in groups]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


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
    """Returns a new plan without the marks on `drop`, with arguments sharded as in `change`."""
    old = plan.propagated
    links = tuple(plan.problem.links.items())
    program = edit_ops(
        old.program, lambda _, op, __: op.operands if op.is_mark and op.results[0] in drop else None
    )
    marks = {value: mark for value, mark in old.marks.items() if value not in drop}
    for value, sharding in (change or {}).items():
        reason = f"argument {old.program.arg_names[old.program.body.args.index(value)]}"
        marks[value] = Mark(sharding.dims, (False,) * len(sharding.dims), reason)
    wanted: list[Sharding | None] = [
        None if value in drop else mark
        for value, mark in zip(old.program.body.results, plan.problem.results, strict=True)
    ]
    problem = posed(program, old.mesh, marks, plan.topology, wanted, links)
    return plan_problem(problem, options or Options(), tuple(plan.problem.links.values())).plan
