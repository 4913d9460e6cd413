"""What a plan decided against, and its prices: asked of the planner when needed, and kept.

A decision is a variable of the planner's network. With another choice alone left to it the network
that the plan was taken from is solved again; what it says is a plan, which is brought down to a
local program and timed like the plan itself. So a price counts everything that follows, and is in
seconds of the same kind as all that a report shows. The planner's sum only finds the plan.

    price of a choice  =  time of the best plan that makes it  -  time of the plan
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from spmd.compiler import Stages, timed
from spmd.explain.marks import (
    LEAST_SECONDS,
    LEAST_SHARE,
    OBVIOUS_SHARE,
    MarkPrices,
    Price,
    Relief,
    costly_mark,
    mark_prices,
    price_of,
    replanned,
)
from spmd.explain.words import axes_text, type_text, value_name
from spmd.ir.program import Op, Value, numberless
from spmd.mesh.sharding import Axes, Sharding, is_legal
from spmd.mesh.spec import has_parts
from spmd.options import Options
from spmd.planning.exact import weighed
from spmd.planning.network import CostNetwork, decoded
from spmd.planning.plan import Plan
from spmd.planning.solver import FORBIDDEN, Reduced
from spmd.planning.units import CARRY, OP
from spmd.propagation.projection import Assignment
from spmd.propagation.propagate import Conflict

T = TypeVar("T")

MOST_TRIES = 5  # marks without which a program is planned again for a report

MOST_CONFLICTS = 24  # kinds of conflicts whose losing claims are priced, the largest values first
MOST_OTHERS = 5  # other shardings of one argument for which a program is planned again

MOST_OPS = 28_000
"""Ops of the programs that are timed for one part of a report: of large programs, each of which
takes long to time, fewer decisions are priced."""

# Programs that are timed while one is planned again; and those of a conflict's losing claims.
TIMED_FOR_MARK, TIMED_FOR_CONFLICT = 6, 2

NO_AXIS = "no axis"

Losers = tuple[tuple[str, Price | None], ...]

UNPRICED = "no plan that was weighed does so"  # said of a claim that lost, and has no price


class Prices:
    """Prices what a plan decided against: what each other decision would cost more."""

    def __init__(self, plan: Plan, options: Options | None = None) -> None:
        self.plan = plan
        self.options = options or Options()
        self._prices: dict[tuple[int, tuple[int, ...]], Price | None] = {}
        self._reduced: dict[tuple[int, ...], Reduced] = {}
        self._timed: dict[object, Plan] = {}

    @cached_property
    def marks(self) -> MarkPrices:
        """Prices of the marks next to the most expensive reshards."""
        return mark_prices(self.plan, self._most(MOST_TRIES, TIMED_FOR_MARK), self.options)

    @property
    def most_conflicts(self) -> int:
        """How many rows of conflicts get prices in a report."""
        again = 2 if self.plan.byte_price else 1  # timed whole, and with what is made again
        return self._most(MOST_CONFLICTS, TIMED_FOR_CONFLICT * again)

    def _most(self, most: int, timed: int) -> int:
        """Returns how many decisions to price, if each takes `timed` programs to be timed."""
        ops = sum(1 for _ in self.plan.program.walk())
        return max(1, min(most, MOST_OPS // max(1, timed * ops)))

    @cached_property
    def obvious_mark(self) -> Relief | None:
        """The mark that costs most, if much and quickly found; None if a run takes no time."""
        if self.plan.run_seconds < LEAST_SECONDS:
            return None
        return costly_mark(self.plan, self.options, OBVIOUS_SHARE)

    @cached_property
    def costly_mark(self) -> Relief | None:
        """The mark that costs the most, if that is a large share of a run; else None."""
        return self.obvious_mark or costly_mark(self.plan, self.options, LEAST_SHARE)

    def others(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Returns other shardings of a value with their prices, the cheapest first.

        For an argument these are those that its uses want, one dim over one axis, and whole: the
        program is planned again for each. For other values they are those that the planner weighed.
        """
        plan = self.plan
        if value not in plan.program.body.args:
            return self.of_value(value)
        type_ = plan.program.types[value]
        have = plan.arguments[plan.program.body.args.index(value)]
        wanted = [move.wanted.full() for move in plan.moves if move.value == value]
        # One dim over one axis of the mesh, larger axes first; then whole.
        for atoms in sorted(plan.mesh.axis_atoms.values(), key=plan.mesh.extent, reverse=True):
            dims = range(type_.rank if atoms else 0)
            each = (tuple(atoms if d == dim else () for d in range(type_.rank)) for dim in dims)
            wanted += map(Sharding, each)
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
        """The network of costs that the plan was solved from."""
        costs = weighed(self.plan.problem)[1]
        exposed, by_slack = self.plan.exposed, self.plan.by_slack
        return costs if exposed == costs.exposed else costs.with_exposed(exposed, by_slack)

    def of_value(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Returns every other sharding that was weighed for a value, with prices, cheapest first.

        Arguments, and values made anew for every use, have none: the network does not choose
        theirs.
        """
        number, index = self._built.units.of[value]
        if number < 0 or self._built.units.units[number].role not in (OP, CARRY):
            return ()
        left = self._built.domains.left[number][index]
        return self._priced(number, left, self.plan.states[value], (number,))

    def of_conflicts(
        self, conflicts: Sequence[Conflict]
    ) -> tuple[tuple[tuple[Axes, Price], ...], ...]:
        """Prices, for each conflict, the axes that lost (and no axis at all), the cheapest first.

        A claim that no plan can honour (an axis that the factor cannot take) has no price.
        """
        places = [self._factor(conflict) for conflict in conflicts]
        together = tuple(sorted({place[0] for place in places if place is not None}))
        found: list[tuple[tuple[Axes, Price], ...]] = []
        for conflict, place in zip(conflicts, places, strict=True):
            if place is None:
                found.append(())
                continue
            number, given = place
            claims = {(), *(axes for axes, _, _ in conflict.claims)}
            wanted = [axes if axes in claims else None for axes in given]
            found.append(self._priced(number, wanted, taken_axes(self.plan, conflict), together))
        return tuple(found)

    def of_ring(self, op: Op, factor: int) -> Price | None:
        """Prices a ring factor's other way: to gather its pieces, or to pass them round a ring."""
        number = self._built.units.of[op.results[0]][0]
        if number < 0:
            return None
        taken = self.plan.choice(op).assignment

        def rest(assignment: Assignment) -> Assignment:
            return (*assignment[:factor], *assignment[factor + 1 :])

        choices = [choice.assignment for choice in self._built.domains.choices[number]]
        labels = [bool(a[factor]) if rest(a) == rest(taken) else None for a in choices]
        found = self._priced(number, labels, bool(taken[factor]), (number,))
        return found[0][1] if found else None

    def _factor(self, conflict: Conflict) -> tuple[int, tuple[Axes, ...]] | None:
        """Returns the network's variable that a conflict is about, and the factor's axes by choice.

        None where the network does not choose: around values made anew for every use.
        """
        op, units = conflict.op, self._built.units
        if op.results:
            number = units.of[op.results[0]][0]
            if number < 0:
                return None
            options = self._built.domains.choices[number]
            if options and conflict.factor < len(options[0].assignment):
                return number, tuple(c.assignment[conflict.factor] for c in options)
        for _, value, dim in conflict.claims:
            number, index = units.of[value]
            if number >= 0 and units.units[number].role == CARRY:
                return number, tuple(s.dims[dim] for s in self._built.domains.left[number][index])
        return None

    def _priced(
        self, number: int, labels: Sequence[T | None], taken: T | None, together: tuple[int, ...]
    ) -> tuple[tuple[T, Price], ...]:
        """Returns each label but the one taken with its price, the cheapest first.

        `labels` say what each choice of variable `number` amounts to, None where nobody asks.
        `together` are the variables that are asked about, this one included.
        """
        groups: dict[T, list[int]] = {}
        for state, (choice, _) in enumerate(self._built.variables[number].rows):
            label = labels[choice]
            if label is not None and label != taken:
                groups.setdefault(label, []).append(state)
        found = [
            (label, price)
            for label, states in groups.items()
            if (price := self._price(number, tuple(states), together)) is not None
        ]
        return tuple(sorted(found, key=lambda pair: pair[1].seconds))

    def _price(
        self, number: int, states: tuple[int, ...], together: tuple[int, ...]
    ) -> Price | None:
        """Prices the best plan with a variable in one of some states; None if it is forbidden."""
        if (number, states) in self._prices:
            return self._prices[number, states]
        variables = self._built.variables
        if together not in self._reduced:
            kept = frozenset(variables[n].number for n in together)
            self._reduced[together] = Reduced(self._built.network, kept)
        solution = self._reduced[together].solve({variables[number].number: states})
        price = None
        if solution.cost < FORBIDDEN / 2:
            if solution.states not in self._timed:  # many questions have the same answer
                other = decoded(self._built, solution)._replace(byte_price=self.plan.byte_price)
                self._timed[solution.states] = timed(other, self.options)
            price = price_of(self.plan, self._timed[solution.states])
        self._prices[number, states] = price
        return price


def taken_axes(plan: Plan, conflict: Conflict) -> Axes:
    """Returns the axes that the plan gave to a conflict's factor, or to the last claimant's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()


class ConflictRow(NamedTuple):
    """Holds values around an op that want different axes, and what the planner made of it."""

    op: str
    source: str
    # (value's name, its type, dim, axes that it wants there)
    claims: tuple[tuple[str, str, int, str], ...]
    taken: str  # the axes that the plan took
    ops: int  # how many ops are like this
    # the axes of the claims that lost, or `no axis`, with the price of taking them, None if no plan
    # that was weighed does so. None where prices were not asked for
    losers: Losers | None = None


def conflict_rows(stages: Stages, prices: Prices | None = None) -> tuple[ConflictRow, ...]:
    """Returns every conflict of the propagation and how it was settled, equal ones in one row.

    The conflicts about the most bytes come first; with `prices`, the first few get prices.
    """
    plan, types = stages.plan, stages.plan.program.types
    groups: dict[object, list[Conflict]] = {}
    for conflict in stages.propagated.conflicts:
        row = _conflict_row(plan, conflict)
        wishes = tuple(claim[1:] for claim in row.claims)
        groups.setdefault((row.op, row.source, wishes, row.taken), []).append(conflict)
    ordered = sorted(
        groups.values(),
        key=lambda alike: -len(alike) * max(types[v].bytes for _, v, _ in alike[0].claims),
    )
    rows = [_conflict_row(plan, alike[0])._replace(ops=len(alike)) for alike in ordered]
    if prices is not None:
        first = [alike[0] for alike in ordered[: prices.most_conflicts]]
        for i, priced in enumerate(prices.of_conflicts(first)):
            # The losing claims, the cheapest first; those without a price last.
            found = {axes_text(axes, plan.mesh) or NO_AXIS: price for axes, price in priced}
            claims = (*(axes for *_, axes in rows[i].claims), NO_AXIS)
            every = found | {axes: None for axes in claims if axes not in found}
            losers = tuple((axes, price) for axes, price in every.items() if axes != rows[i].taken)
            rows[i] = rows[i]._replace(losers=losers)
    return tuple(rows)


def _conflict_row(plan: Plan, conflict: Conflict) -> ConflictRow:
    program, mesh = plan.program, plan.mesh
    claims = []
    for axes, value, dim in conflict.claims:
        name = numberless(value_name(program, value))
        claims.append((name, type_text(program.types[value]), dim, axes_text(axes, mesh)))
    taken = axes_text(taken_axes(plan, conflict), mesh) or NO_AXIS
    return ConflictRow(conflict.op.label, conflict.op.loc.trail, tuple(claims), taken, 1)


def marks_title(found: MarkPrices) -> str:
    """Says how many kinds of marks were tried, of how many."""
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"
