"""The figures of one run: time against the bounds, bytes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.explain.collectives import Collective
from spmd.explain.leaves import argument_leaves, result_leaves
from spmd.explain.memory import Memory
from spmd.explain.words import bytes_text, seconds_text
from spmd.pipeline import Stages
from spmd.predict.timeline import Timeline, predict_timeline

CLOSE = 1e-6
"""A plan whose relative distance from its lower bound is smaller is called the best."""


class Overview(NamedTuple):
    """The figures of one run.

    Attributes:
      mesh: the mesh as text.
      topology: the machine's name.
      devices: how many.
      solver: which one made the plan: `exact` or `greedy`.
      timeline: what runs when, collectives beside arithmetic where neither waits.
      greedy_seconds: time of the greedy plan if nothing ran side by side.
      lower_seconds: the least time of all plans that were weighed, likewise; 0 if unknown.
      collectives: how many collective ops there are.
      comm_bytes: bytes that one device sends.
      argument_bytes, result_bytes: per device.
      whole_argument_bytes, whole_result_bytes: unpartitioned.
      hbm_bytes: memory of one device.
      memory: what XLA reports, once compiled; our prediction before.
    """

    mesh: str
    topology: str
    devices: int
    solver: str
    timeline: Timeline
    greedy_seconds: float
    lower_seconds: float
    collectives: int
    comm_bytes: int
    argument_bytes: int
    result_bytes: int
    whole_argument_bytes: int
    whole_result_bytes: int
    hbm_bytes: int
    memory: Memory | None

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""
        return self.timeline.seconds

    @property
    def compute_seconds(self) -> float:
        """All ops at their roofline, one after another."""
        return self.timeline.compute_seconds

    @property
    def comm_seconds(self) -> float:
        """All collectives one after another."""
        return self.timeline.comm_seconds

    @property
    def bound(self) -> str:
        """What takes longer: `compute` or `communication`."""
        return "communication" if self.comm_seconds > self.compute_seconds else "compute"


def overview(stages: Stages, collectives: Sequence[Collective], memory: Memory | None) -> Overview:
    """The figures of one run."""
    plan = stages.plan
    arguments, results = argument_leaves(stages), result_leaves(stages)
    return Overview(
        str(plan.mesh),
        str(plan.topology),
        plan.mesh.size,
        plan.solver,
        predict_timeline(stages.optimized.program, plan.mesh, plan.topology),
        plan.greedy_seconds,
        plan.lower_seconds,
        len(collectives),
        sum(c.bytes * c.count for c in collectives),
        sum(leaf.local.bytes for leaf in arguments),
        sum(leaf.local.bytes for leaf in results),
        sum(leaf.type.bytes for leaf in arguments),
        sum(leaf.type.bytes for leaf in results),
        plan.topology.hbm_bytes,
        memory,
    )


def quality_rows(figures: Overview) -> tuple[tuple[str, str], ...]:
    """(what, seconds as text): the greedy plan, and the best there can be, beside this one."""
    rows = []
    if figures.greedy_seconds and figures.solver != "greedy":
        more = figures.greedy_seconds / figures.seconds - 1 if figures.seconds else 0.0
        rows.append(
            (
                "greedy plan",
                f"{seconds_text(figures.greedy_seconds)}, {more:.1%} slower than this one",
            )
        )
    if figures.lower_seconds:
        gap = figures.seconds / figures.lower_seconds - 1
        best = "this plan is the best" if gap < CLOSE else f"at most {gap:.2%} better than this one"
        rows.append(
            ("lower bound", f"{seconds_text(figures.lower_seconds)}: of the plans weighed, {best}")
        )
    return tuple(rows)


def memory_rows(figures: Overview) -> tuple[tuple[str, str], ...]:
    """(what, bytes as text) per device; what XLA reports once it has compiled the program."""
    memory = figures.memory
    rows = [
        ("arguments", _against(figures.argument_bytes, figures.whole_argument_bytes)),
        ("results", _against(figures.result_bytes, figures.whole_result_bytes)),
    ]
    if memory is not None and memory.peak_bytes:
        rows += [
            ("results in donated arguments", bytes_text(memory.aliased)),
            ("temporary", bytes_text(memory.temporary)),
            (
                "peak, predicted" if memory.is_predicted else "peak, at most",
                f"{bytes_text(memory.peak_bytes)} of {bytes_text(figures.hbm_bytes)}",
            ),
        ]
    return tuple(rows)


def _against(part: int, whole: int) -> str:
    ratio = f", {whole / part:.3g}x less" if 0 < part < whole else ""
    return f"{bytes_text(part)} (unpartitioned {bytes_text(whole)}{ratio})"
