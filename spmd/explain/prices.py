"""What a plan decided against, and its prices: asked of the planner when needed, and kept."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain.alternatives import Alternatives, Price, price_of, taken_axes
from spmd.explain.marks import (
    LEAST_SECONDS,
    LEAST_SHARE,
    OBVIOUS_SHARE,
    MarkPrices,
    Relief,
    costly_mark,
    mark_groups,
    mark_prices,
    relief_of,
    replanned,
)
from spmd.explain.words import axes_text, type_text, value_name
from spmd.ir.program import Value, numberless
from spmd.mesh.sharding import Sharding, is_legal
from spmd.mesh.spec import has_parts
from spmd.options import Options
from spmd.planning.plan import Plan
from spmd.propagation.propagate import Conflict

MOST_TRIES = 5  # marks without which a program is planned again for a report

MOST_CONFLICTS = 24
"""Kinds of conflicts whose losing claims are priced for a report, the largest values first."""

MOST_OTHERS = 5  # other shardings of one argument for which a program is planned again

MOST_OPS = 28_000
"""Ops of the programs that are timed for one part of a report: of large programs, each of which
takes long to time, fewer decisions are priced."""

TIMED_FOR_MARK, TIMED_FOR_CONFLICT = 6, 2
"""Programs that are timed while one is planned again; and those of a conflict's losing claims."""


NO_AXIS = "no axis"

Losers = tuple[tuple[str, Price | None], ...]


class Prices:
    """Prices of what a plan, made with some options, decided against."""

    def __init__(self, plan: Plan, options: Options | None = None) -> None:
        self.plan = plan
        self.options = options or Options()

    @cached_property
    def alternatives(self) -> Alternatives:
        """Prices of choices."""
        return Alternatives(self.plan, self.options)

    @cached_property
    def marks(self) -> MarkPrices:
        """Prices of the marks next to the most expensive reshards."""
        return mark_prices(self.plan, self._most(MOST_TRIES, TIMED_FOR_MARK), self.options)

    @property
    def most_conflicts(self) -> int:
        """How many kinds of conflicts get prices in a report."""
        again = 2 if self.plan.byte_price else 1  # timed whole, and with what is made again
        return self._most(MOST_CONFLICTS, TIMED_FOR_CONFLICT * again)

    def _most(self, most: int, timed: int) -> int:
        """How many decisions are priced, each of which takes so many programs' time."""
        ops = sum(1 for _ in self.plan.program.walk())
        return max(1, min(most, MOST_OPS // max(1, timed * ops)))

    @cached_property
    def obvious_mark(self) -> Relief | None:
        """The mark that costs most, if much and easily seen; None where a run takes no time."""
        if self.plan.run_seconds < LEAST_SECONDS:
            return None
        return costly_mark(self.plan, self.options, OBVIOUS_SHARE)

    @cached_property
    def costly_mark(self) -> Relief | None:
        """The mark that costs the most, if it costs much."""
        return self.obvious_mark or costly_mark(self.plan, self.options, LEAST_SHARE)

    def without_mark(self, value: Value) -> Relief:
        """What the program would cost without the mark of a value and those that belong to it."""
        groups = mark_groups(self.plan, every=True)
        group = next(group for group in groups if value in group.values)
        return relief_of(self.plan, group, self.options)

    def others(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Other shardings of a value, the cheapest first.

        Those of an argument are the ones in which its uses take it, open, and whole: the program is
        planned again for each. Those of other values are the ones that the planner weighed.
        """
        plan = self.plan
        if value not in plan.program.body.args:
            return self.alternatives.of_value(value)
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


# ---------------------------------------------------------------------------------------------
# Claims that lost a conflict.


class ConflictRow(NamedTuple):
    """Values around an op that want different axes, and what the planner made of it."""

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
    """Every conflict of the propagation and how it was settled, equal ones in one row.

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
        for i, priced in enumerate(prices.alternatives.of_conflicts(first)):
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


def loser_text(price: Price | None) -> str:
    """What taking a claim that lost would cost."""
    return "no plan that was weighed does so" if price is None else price.text


def marks_title(found: MarkPrices) -> str:
    """How many marks were looked at, of how many."""
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"
