"""What a program makes again rather than holds, and what that saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.explain.words import bytes_text, plural, seconds_text
from spmd.lowering.recompute.again import AGAIN
from spmd.planning.plan import Plan, Recomputed
from spmd.predict.timeline import COMPUTE, Timeline


class RecomputedRow(NamedTuple):
    """Values that one line of the user's code makes, and that are made again.

    Attributes:
      name: the op.
      source: the line.
      values: how many.
      bytes: what one device would hold of them.
    """

    name: str
    source: str
    values: int
    bytes: int


def recomputed_rows(plan: Plan) -> list[RecomputedRow]:
    """What a plan's program makes again, the largest first."""
    found: dict[tuple[str, str], list[Recomputed]] = {}
    for value in plan.recomputed:
        found.setdefault((value.name, value.loc.trail), []).append(value)
    rows = [
        RecomputedRow(name, source, len(values), sum(value.bytes for value in values))
        for (name, source), values in found.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def recomputed_title(rows: Sequence[RecomputedRow], timeline: Timeline) -> str:
    """`made again rather than held: 12 values of 3.2 GiB, in 4.1 ms of a run`."""
    slots = [slot for slot in timeline.slots if AGAIN in slot.op.loc.note and not slot.op.regions]
    arithmetic = sum(slot.seconds * slot.trips for slot in slots if slot.lane == COMPUTE)
    exchanges = sum(slot.seconds * slot.trips for slot in slots if slot.lane != COMPUTE)
    held = bytes_text(sum(row.bytes for row in rows))
    values = plural(sum(row.values for row in rows), "value")
    sent = f" and {seconds_text(exchanges)} of collectives" if exchanges else ""
    return (
        f"made again rather than held: {values} of {held}, "
        f"in {seconds_text(arithmetic)} of arithmetic{sent}"
    )
