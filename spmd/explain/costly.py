"""A mark that makes a program much slower than it would be without: said without being asked.

Planning again takes as long as planning did. So it is done for few marks, for those around which
the planner's sum has many seconds, and not at all where a program is fast anyway.

    share of a mark  =  1  -  time of the program planned without it  /  time of the program
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmd.errors import PlanError
from spmd.explain.price import held_bytes
from spmd.explain.relax import MarkGroup, blamed_groups, relief_of
from spmd.explain.words import bytes_text, seconds_text, share_text, source_text, spec_text
from spmd.ir.program import Op, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.options import Options
from spmd.planning.plan import Plan
from spmd.predict.ops import arithmetic_seconds
from spmd.predict.timeline import least_seconds

LEAST_SHARE = 0.2
"""The part of a run that a mark costs if it is spoken of."""

OBVIOUS_SHARE = 0.5
"""The part of the planner's sum around a mark from which on it is looked at without being asked."""

LEAST_SECONDS = 1e-4
"""Predicted time of a run from which on marks are looked at without being asked.

What takes less mostly starts kernels and waits for links. Planning it again would take longer than
a mark costs in a thousand runs.
"""

MOST_MORE = 0.1
"""How much larger a device's arguments may be without a mark: else it is there to save memory."""

MOST_TRIES = 2
"""Marks without which a program is planned again."""


class CostlyMark(NamedTuple):
    """A mark without which a program would be much faster.

    Attributes:
      marks: the mark, and those that are one with it.
      instead: how the marked value would lie; None if it would be made anew for every use.
      elsewhere: another value that this is said of, as in a `Relief`.
      seconds, without: predicted time of one run, as it is and without the mark.
      argument_bytes: what each device would hold more of the arguments.
    """

    marks: MarkGroup
    instead: Sharding | None
    seconds: float
    without: float
    argument_bytes: int
    elsewhere: str = ""

    @property
    def share(self) -> float:
        """The part of a run that the mark costs."""
        return 1 - self.without / self.seconds


def costly_mark(plan: Plan, options: Options, suspicion: float) -> CostlyMark | None:
    """The mark that costs the most, if it costs more than `LEAST_SHARE` of a run.

    A mark that keeps arguments small is none: its time is the price of the memory.

    Args:
      plan: the plan with all marks.
      options: what it was made with.
      suspicion: the part of the planner's sum around a mark from which on it is looked at.
    """
    most = (1 - LEAST_SHARE) * plan.run_seconds
    if least_seconds(plan.problem.index, plan.mesh, plan.topology) >= most:
        return None
    found = []
    for group in _suspects(plan, suspicion * plan.seconds)[:MOST_TRIES]:
        try:
            relief = relief_of(plan, group, options)
        except PlanError:  # without the mark nothing fits into the memory
            continue
        without = plan.run_seconds + relief.price.seconds
        more = relief.price.argument_bytes
        if without < most and more <= MOST_MORE * held_bytes(plan):
            times = plan.run_seconds, without
            found.append(CostlyMark(relief.marks, relief.instead, *times, more, relief.elsewhere))
    return max(found, key=lambda mark: mark.share, default=None)


def _suspects(plan: Plan, least: float) -> list[MarkGroup]:
    """Marks around which the planner's sum has so many seconds, those with the most first."""
    blamed = list(blamed_groups(plan))
    repeated = _seconds_behind(plan, blamed, _repeated_seconds(plan))
    groups = [
        group._replace(seconds=group.seconds + more)
        for group, more in zip(blamed, repeated, strict=True)
    ]
    groups.sort(key=lambda group: -group.seconds)
    return [group for group in groups if group.seconds > least]


def _repeated_seconds(plan: Plan) -> dict[Value, float]:
    """Time of arithmetic that several devices repeat, by its first result."""
    mesh, topology, index = plan.mesh, plan.topology, plan.problem.index
    found: dict[Value, float] = {}

    def visit(ops: Iterable[Op], times: int) -> None:
        for op in ops:
            for region in op.regions:
                visit(region.ops, times * index.runs(op))
            choice = plan.choices.get(op.results[0]) if op.results else None
            if op.kind.about.flops is None or choice is None:
                continue
            split = mesh.extent({a for axes in choice.assignment for a in axes})
            whole = arithmetic_seconds(op.kind, topology)
            seconds = times * whole * (1 / split - 1 / mesh.size)
            if seconds > 0:
                found[op.results[0]] = seconds

    visit(plan.program.body.ops, 1)
    return found


def _seconds_behind(
    plan: Plan, groups: Sequence[MarkGroup], seconds: Mapping[Value, float]
) -> list[float]:
    """For each group of marks, the seconds of what they mark and of all that is computed from it.

    Args:
      plan: the plan.
      groups: the marks.
      seconds: of some values.
    """
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


def costly_text(mark: CostlyMark, mesh: Mesh) -> str:
    """What to say of a mark that costs much."""
    marks, instead = mark.marks, mark.instead
    more = f" and {len(marks.values) - 1} more" if len(marks.values) > 1 else ""
    where = "computed anew for each use" if instead is None else spec_text(instead, mesh)
    where = f"{source_text(mark.elsewhere)} as {where}" if mark.elsewhere else where
    held = bytes_text(mark.argument_bytes)
    held = f"; arguments take {held} more per device" if mark.argument_bytes > 0 else ""
    return (
        f"{source_text(marks.name)} {spec_text(marks.sharding, mesh)}{more} costs "
        f"{share_text(mark.share, 1.0)} of a predicted run: {seconds_text(mark.seconds)}, without "
        f"it {seconds_text(mark.without)}, with {where} instead{held}"
    )
