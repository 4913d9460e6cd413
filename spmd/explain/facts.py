"""What reports are made from: a program's stages, and the figures of one run of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from spmd.compiler import Stages, timed
from spmd.explain.costs import Collective, Cost, costs
from spmd.explain.leaves import Leaf, leaves_of
from spmd.explain.measured import Measured
from spmd.explain.memory import Memory
from spmd.explain.prices import Prices
from spmd.explain.words import bytes_text, seconds_text
from spmd.options import Options
from spmd.planning.exact import TOGETHER
from spmd.planning.greedy import plan_greedily
from spmd.planning.plan import Plan
from spmd.predict.backends import room_for
from spmd.predict.memory import MemoryUse
from spmd.predict.timeline import Timeline, least_seconds

CLOSE = 5e-4  # relative difference of two times that a report does not show


@dataclass(frozen=True)
class Facts:
    """A program, and the figures of one run of it; reports leave out what is None."""

    stages: Stages
    collectives: Sequence[Collective]  # what one run of the program exchanges
    use: MemoryUse | None = None  # the memory that one device is predicted to use
    compiled: Memory | None = None  # what XLA reports of memory, once it has compiled the program
    prices: Prices | None = None  # of what the plan decided against
    given_name: str = ""  # what the program is called; the function's name if not given
    file: str = ""  # where its function is written, if known
    measured: Measured | None = None  # what steps of it took
    options: Options = field(default_factory=Options)  # what it was compiled with

    @property
    def name(self) -> str:
        """What the program is called."""
        return self.given_name or self.plan.program.name

    @property
    def title(self) -> str:
        """What the program is called, and where it is written."""
        return f"{self.name} of {self.file}" if self.file else self.name

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.stages.plan

    @property
    def timeline(self) -> Timeline:
        """What runs when, collectives beside arithmetic where neither waits."""
        return self.stages.timeline

    @cached_property
    def greedy_seconds(self) -> float:
        """What a plan takes that settles one op after the other, each as is best for it."""
        return timed(plan_greedily(self.plan.problem), self.options).run_seconds

    @cached_property
    def least_seconds(self) -> float:
        """What no plan undercuts: all arithmetic split evenly, nothing sent."""
        # Rewrites do equal ops once, so a program may have less to do than was written.
        return min(
            least_seconds(self.plan.problem.index, self.plan.mesh, self.plan.topology),
            self.timeline.seconds,
        )

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """What a run's time is spent on, the largest cost first."""
        return costs(self.timeline, self.plan.mesh, self.plan.topology)

    @cached_property
    def _leaves(self) -> list[Leaf]:
        return leaves_of(self.plan)

    @property
    def arguments(self) -> Sequence[Leaf]:
        """Every argument, in order."""
        return self._leaves[: len(self.plan.arguments) - len(self.plan.program.constants)]

    @property
    def constants(self) -> Sequence[Leaf]:
        """The constants that may lie in pieces; smaller ones are whole on every device."""
        return self._leaves[len(self.arguments) : len(self.plan.arguments)]

    @property
    def results(self) -> Sequence[Leaf]:
        """Every result, in order."""
        return self._leaves[len(self.plan.arguments) :]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one run."""
        return sum(c.bytes * c.count for c in self.collectives)

    @property
    def sent_text(self) -> str:
        """`3.2 MiB sent by each device in one run`."""
        return f"{bytes_text(self.sent_bytes)} sent by each device in one run"

    @property
    def compiled_text(self) -> str:
        """What XLA says of the memory, beside the predicted peak; empty where it says nothing."""
        if self.compiled is None or not self.compiled.peak_bytes:
            return ""
        return f"XLA allocates {bytes_text(self.compiled.peak_bytes)}"


def proof_text(plan: Plan) -> str:
    """Which solver made a plan, and how sure it is that there is none with a smaller sum."""
    if plan.solver == "greedy":
        return plan.solver
    axes = sum(map(bool, plan.mesh.axis_atoms.values()))
    over = "every placement" + (" of two axes at a time" if axes > TOGETHER else "")
    if plan.like_loops:
        over = "what the marks suggest and the plan of its loops took"
    if plan.gap < CLOSE:
        return f"{plan.solver}: of {over} none has a smaller sum of costs"
    return f"{plan.solver}: its sum of costs is at most {plan.gap:.1%} above the least of {over}"


def quality_rows(facts: Facts) -> tuple[tuple[str, float, str], ...]:
    """(what, seconds, as text): the greedy plan, and what no plan can undercut, beside this one."""
    seconds, greedy = facts.timeline.seconds, facts.greedy_seconds
    rows = []
    # A greedy plan that is faster is one that takes more memory than there is.
    if greedy > seconds * (1 - CLOSE) and facts.plan.solver != "greedy":
        more = greedy / seconds - 1 if seconds else 0.0
        slower = f"{more:.1%} slower than" if more >= CLOSE else "as fast as"
        text = f"{seconds_text(greedy)}, {slower} this one"
        rows.append(("greedy plan", greedy, text))
    bound = facts.least_seconds
    if bound:
        text = f"{seconds_text(bound)}: arithmetic alone, split evenly over all devices"
        rows.append(("lower bound", bound, text))
    return tuple(rows)


def memory_rows(facts: Facts) -> tuple[tuple[str, str], ...]:
    """(what, bytes as text) per device, as predicted; and the peak that XLA reports."""
    use = facts.use
    rows = [("arguments", _against(facts.arguments)), ("results", _against(facts.results))]
    if use is not None:
        limit = bytes_text(facts.plan.topology.hbm_bytes)
        rows += [
            ("results in donated arguments", bytes_text(use.aliased)),
            ("temporary", bytes_text(use.temporary)),
            ("peak, predicted", f"{bytes_text(use.peak)} of {limit}"),
            ("on the device", room_for(use.peak, facts.plan.topology)),
        ]
        if use.constants:
            rows.insert(2, ("constants", _against(facts.constants, use.constants)))
    if facts.compiled is not None and facts.compiled.peak_bytes:
        rows.append(("peak, as XLA allocates it", bytes_text(facts.compiled.peak_bytes)))
    return tuple(rows)


def _against(leaves: Sequence[Leaf], held: int | None = None) -> str:
    """What one device holds of arguments or results, against all of them.

    It holds the pieces, or `held` bytes where something is always whole beside them.
    """
    pieces = sum(leaf.local.bytes for leaf in leaves)
    part = pieces if held is None else held
    whole = sum(leaf.type.bytes for leaf in leaves) + part - pieces
    ratio = f", {whole / part:.3g}x less" if 0 < part < whole else ""
    return f"{bytes_text(part)} (unpartitioned {bytes_text(whole)}{ratio})"
