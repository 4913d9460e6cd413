"""What the plan decided against: claims that lost a conflict, and what marks forbid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.explain.price import Price
from spmd.explain.prices import MOST_CONFLICTS, Prices
from spmd.explain.words import (
    axes_text,
    type_text,
    value_name,
)
from spmd.ir.program import numberless
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.pipeline import Stages
from spmd.planning.plan import Plan
from spmd.propagation.propagated import Conflict

NO_AXIS = "no axis"

Losers = tuple[tuple[str, Price | None], ...]


class ConflictRow(NamedTuple):
    """Values around an op that want different axes, and what the planner made of it.

    Attributes:
      op: the op.
      source: the user's source line, and its caller's.
      claims: (value's name, its type, dim, axes that it wants there).
      taken: the axes that the plan took.
      ops: how many ops are like this.
      losers: the axes of the claims that lost, or `no axis`, with the price of taking them, None if
        no plan that was weighed does so. None where prices were not asked for.
    """

    op: str
    source: str
    claims: tuple[tuple[str, str, int, str], ...]
    taken: str
    ops: int
    losers: Losers | None = None


def conflict_rows(stages: Stages, prices: Prices | None = None) -> tuple[ConflictRow, ...]:
    """Every conflict of the propagation and how it was settled, equal ones in one row.

    The conflicts about the most bytes come first; with `prices`, the first few get prices.
    """
    rows: dict[object, list[Conflict]] = {}
    for conflict in stages.propagated.conflicts:
        row = _conflict_row(stages.plan, conflict)
        wishes = tuple(claim[1:] for claim in row.claims)
        rows.setdefault((row.op, row.source, wishes, row.taken), []).append(conflict)
    types = stages.plan.program.types
    ordered = sorted(
        rows.values(),
        key=lambda found: -len(found) * max(types[v].bytes for _, v, _ in found[0].claims),
    )
    first = [found[0] for found in ordered][: MOST_CONFLICTS if prices else 0]
    losers = prices.alternatives.of_conflicts(first) if prices and first else ()
    made = []
    for k, found in enumerate(ordered):
        row = _conflict_row(stages.plan, found[0])._replace(ops=len(found))
        if k < len(losers):
            row = row._replace(losers=_losers(row, losers[k], stages.plan.mesh))
        made.append(row)
    return tuple(made)


def _conflict_row(plan: Plan, conflict: Conflict) -> ConflictRow:
    claims = tuple(
        (
            numberless(value_name(plan.program, value)),
            type_text(plan.program.types[value]),
            dim,
            axes_text(axes, plan.mesh),
        )
        for axes, value, dim in conflict.claims
    )
    taken = axes_text(taken_axes(plan, conflict), plan.mesh) or NO_AXIS
    return ConflictRow(conflict.op.label, conflict.op.loc.trail, claims, taken, 1)


def _losers(row: ConflictRow, priced: Iterable[tuple[Axes, Price]], mesh: Mesh) -> Losers:
    """The losing claims, the cheapest first; those without a price last."""
    found: dict[str, Price | None] = {
        axes_text(axes, mesh) or NO_AXIS: price for axes, price in priced
    }
    claims = dict.fromkeys((*(claim[3] for claim in row.claims), NO_AXIS))
    found |= {axes: None for axes in claims if axes not in found}
    return tuple(pair for pair in found.items() if pair[0] != row.taken)


def loser_text(price: Price | None) -> str:
    """What taking a claim that lost would cost."""
    if price is None:
        return "no plan that was weighed does so"
    return price.text if price.exact else f"at most {price.text}"


def taken_axes(plan: Plan, conflict: Conflict) -> Axes:
    """The axes that the plan gave to the factor; of tied values, to the last claimant's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()


def marks_title(prices: Prices) -> str:
    """How many marks were looked at, of how many."""
    found = prices.marks
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"
