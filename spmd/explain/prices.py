"""What other decisions would have cost: asked of the planner when a report needs it, and kept."""

from __future__ import annotations

from functools import cached_property

from spmd.explain.alternatives import Alternatives
from spmd.explain.price import Price
from spmd.explain.relax import (
    MarkPrices,
    Relief,
    mark_groups,
    mark_prices,
    price_of,
    relief_of,
    replanned,
)
from spmd.ir.program import Value
from spmd.mesh.sharding import Sharding, is_legal
from spmd.planning.plan import Plan
from spmd.planning.problem import is_whole

MOST_TRIES = 5
"""Marks without which a program is planned again for a report."""

MOST_CONFLICTS = 24
"""Kinds of conflicts whose losing claims are priced for a report, the largest values first."""

MOST_OTHERS = 5
"""Other shardings of one argument for which a program is planned again."""


class Prices:
    """Prices of what a plan decided against."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def alternatives(self) -> Alternatives:
        """Prices of choices."""
        return Alternatives(self.plan)

    @cached_property
    def marks(self) -> MarkPrices:
        """Prices of the marks next to the most expensive reshards."""
        return mark_prices(self.plan, MOST_TRIES)

    def without_mark(self, value: Value) -> Relief:
        """What the program would cost without the mark of a value and those that belong to it."""
        groups = mark_groups(self.plan, every=True)
        return relief_of(self.plan, next(group for group in groups if value in group.values))

    def others(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Other shardings of a value, the cheapest first.

        Those of an argument are the ones in which its uses take it, open, and whole: the program is
        planned again for each. Those of other values are the ones that the planner weighed.
        """
        if value in self.plan.program.body.args:
            return self._other_arguments(value)
        return self.alternatives.of_value(value)

    def _other_arguments(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        plan = self.plan
        type_ = plan.program.types[value]
        have = plan.arguments[plan.program.body.args.index(value)]
        wanted = [m.wanted.full() for m in plan.moves if m.value == value]
        whole = Sharding(((),) * type_.rank)
        wanted += [Sharding(dims) for dims in _single_axes(plan, value)]
        found = []
        legal = [s for s in dict.fromkeys([*wanted, whole]) if is_legal(s, type_.shape, plan.mesh)]
        for sharding in [s for s in legal if s != have and is_whole(s, plan.mesh)][:MOST_OTHERS]:
            other = replanned(plan, change={value: sharding})
            found.append((sharding, price_of(plan, other)))
        return tuple(sorted(found, key=lambda pair: pair[1].seconds))


def _single_axes(plan: Plan, value: Value) -> list[tuple[tuple[int, ...], ...]]:
    """Dims of a value split over one axis of the mesh each, larger axes first."""
    rank = plan.program.types[value].rank
    axes = sorted(plan.mesh.axis_atoms.values(), key=plan.mesh.extent, reverse=True)
    return [
        tuple(atoms if d == dim else () for d in range(rank))
        for atoms in axes
        if atoms
        for dim in range(rank)
    ]
