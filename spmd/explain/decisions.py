"""What the plan decided against: claims that lost a conflict, and what marks forbid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.explain.alternatives import Price
from spmd.explain.prices import MOST_CONFLICTS, Prices
from spmd.explain.words import (
    arguments_text,
    axes_text,
    price_text,
    spec_text,
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


class LosingClaim(NamedTuple):
    """A claim that lost a conflict, with its price.

    Attributes:
      axes: the axes that would have been taken, or `no axis`.
      seconds: how much longer a run would take with it; None if no plan that was weighed has it.
      bytes: how much more each device would send.
      exact: whether the price is exact; else it is an upper bound.
    """

    axes: str
    seconds: float | None
    bytes: int = 0
    exact: bool = True

    @property
    def text(self) -> str:
        """The price as text."""
        if self.seconds is None:
            return "no plan that was weighed does so"
        bound = "" if self.exact else "at most "
        return bound + price_text(self.seconds, self.bytes)


class ConflictRow(NamedTuple):
    """Values around an op that want different axes, and what the planner made of it.

    Attributes:
      op: the op.
      source: the user's source line, and its caller's.
      claims: (value's name, its type, dim, axes that it wants there).
      taken: the axes that the plan took.
      ops: how many ops are like this.
      losers: the claims that lost, with their prices; None where prices were not asked for.
    """

    op: str
    source: str
    claims: tuple[tuple[str, str, int, str], ...]
    taken: str
    ops: int
    losers: tuple[LosingClaim, ...] | None = None


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
    taken = axes_text(_taken(plan, conflict), plan.mesh) or NO_AXIS
    return ConflictRow(conflict.op.label, conflict.op.loc.trail, claims, taken, 1)


def _losers(
    row: ConflictRow, priced: Iterable[tuple[Axes, Price]], mesh: Mesh
) -> tuple[LosingClaim, ...]:
    """The losing claims, the cheapest first; those without a price last."""
    found = [
        LosingClaim(axes_text(axes, mesh) or NO_AXIS, price.seconds, price.bytes, price.exact)
        for axes, price in priced
    ]
    known = {loser.axes for loser in found}
    claims = dict.fromkeys((*(claim[3] for claim in row.claims), NO_AXIS))
    missing = [c for c in claims if c != row.taken and c not in known]
    kept = [loser for loser in found if loser.axes != row.taken]
    return (*kept, *(LosingClaim(axes, None) for axes in missing))


def _taken(plan: Plan, conflict: Conflict) -> Axes:
    """The axes that the plan gave to the factor; of tied values, to the last claimant's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()


class MarkRow(NamedTuple):
    """A mark without which the program would be cheaper.

    Attributes:
      name: where it was made, or whose it is.
      sharding: what it says.
      values: how many values have it.
      seconds, bytes: what one run would take, and each device send, more without it.
      argument_bytes: what each device would hold more of the arguments.
    """

    name: str
    sharding: str
    values: int
    seconds: float
    bytes: int
    argument_bytes: int

    @property
    def text(self) -> str:
        """The price as text: what changes without the mark."""
        text = price_text(self.seconds, self.bytes)
        if not self.argument_bytes:
            return text
        return f"{text}; {arguments_text(self.argument_bytes)}"


def mark_rows(stages: Stages, prices: Prices) -> tuple[MarkRow, ...]:
    """Marks that forbid something cheaper, the most expensive first."""
    mesh = stages.plan.mesh
    return tuple(
        MarkRow(
            relief.marks.name,
            spec_text(relief.marks.sharding, mesh),
            len(relief.marks.values),
            relief.seconds,
            relief.bytes,
            relief.argument_bytes,
        )
        for relief in prices.marks.reliefs
    )


def marks_title(prices: Prices) -> str:
    """How many marks were looked at, of how many."""
    found = prices.marks
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"
