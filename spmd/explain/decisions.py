"""What the plan decided against: claims that lost a conflict, and what marks forbid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain.alternatives import taken_axes
from spmd.explain.price import Price
from spmd.explain.prices import Prices
from spmd.explain.words import axes_text, type_text, value_name
from spmd.ir.program import numberless
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.planning.plan import Plan
from spmd.propagation.propagate import Conflict

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
            rows[i] = rows[i]._replace(losers=_losers(rows[i], priced, plan.mesh))
    return tuple(rows)


def _conflict_row(plan: Plan, conflict: Conflict) -> ConflictRow:
    program, mesh = plan.program, plan.mesh
    claims = []
    for axes, value, dim in conflict.claims:
        name = numberless(value_name(program, value))
        claims.append((name, type_text(program.types[value]), dim, axes_text(axes, mesh)))
    taken = axes_text(taken_axes(plan, conflict), mesh) or NO_AXIS
    return ConflictRow(conflict.op.label, conflict.op.loc.trail, tuple(claims), taken, 1)


def _losers(row: ConflictRow, priced: Iterable[tuple[Axes, Price]], mesh: Mesh) -> Losers:
    """The losing claims, the cheapest first; those without a price last."""
    found = {axes_text(axes, mesh) or NO_AXIS: price for axes, price in priced}
    claims = (*(axes for *_, axes in row.claims), NO_AXIS)
    unpriced = {axes: None for axes in claims if axes not in found}
    return tuple((axes, price) for axes, price in (found | unpriced).items() if axes != row.taken)


def loser_text(price: Price | None) -> str:
    """What taking a claim that lost would cost."""
    if price is None:
        return "no plan that was weighed does so"
    return price.text


def marks_title(prices: Prices) -> str:
    """How many marks were looked at, of how many."""
    found = prices.marks
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"
