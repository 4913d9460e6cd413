"""The predicted run as a timeline: ops and reshards one after another, loops as one iteration.

That is the planner's own model: nothing overlaps, so the lanes' times add up to the plan's cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Axes, Sharding, axis_refs, local_shape
from spmd.planning.comm import collective_seconds
from spmd.planning.cost import op_seconds
from spmd.planning.plan import Choice, Plan
from spmd.planning.replay import Replay
from spmd.planning.reshard import Path, Step, mask_seconds
from spmd.propagation.registry import rule_of

COMPUTE = "compute"


class Segment(NamedTuple):
    """Something that takes time.

    Attributes:
      lanes: `compute`, or the names of the mesh axes whose links are busy.
      kind: `compute`, or the collective's kind.
      label: what it is: an op, or a collective and what it moves.
      group: the user's source line and its caller's; `in f` for several lines of one function.
      start: when it begins, seconds after the run, or the loop's iteration, began.
      seconds: how long it takes.
      ops: how many ops are drawn as this one.
    """

    lanes: tuple[str, ...]
    kind: str
    label: str
    group: str
    start: float
    seconds: float
    ops: int = 1

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.seconds


class Loop(NamedTuple):
    """A loop: its iterations are all alike, so that one is shown.

    Attributes:
      label: where it is.
      start: when its first iteration begins.
      trips: how often it runs, None where that is not known (16 are counted).
      body: one iteration, times from its own beginning.
    """

    label: str
    start: float
    trips: int | None
    body: Timeline

    @property
    def seconds(self) -> float:
        """All iterations together."""
        return self.body.seconds * (UNKNOWN_TRIPS if self.trips is None else self.trips)


class Timeline(NamedTuple):
    """What happens in a region, in order.

    Attributes:
      segments: ops and collectives outside of inner loops.
      loops: the loops.
      seconds: all of it.
    """

    segments: tuple[Segment, ...]
    loops: tuple[Loop, ...]
    seconds: float

    def lane_seconds(self, lane: str) -> float:
        """How long a lane is busy, loops included."""
        own = sum(s.seconds for s in self.segments if lane in s.lanes)
        return own + sum(
            loop.body.lane_seconds(lane) * loop.seconds / loop.body.seconds
            for loop in self.loops
            if loop.body.seconds
        )

    def flat(self) -> Iterator[Segment]:
        """Every segment, those of a loop stretched from one iteration to all."""
        yield from self.segments
        for loop in self.loops:
            if loop.body.seconds:
                scale = loop.seconds / loop.body.seconds
                for s in loop.body.flat():
                    start = loop.start + s.start * scale
                    yield s._replace(start=start, seconds=s.seconds * scale)


def timeline_of(plan: Plan) -> Timeline:
    """The predicted run of a plan."""
    recorder = _Recorder(plan)
    recorder.run(plan.arguments, plan.result_marks, dict(plan.links))
    (level,) = recorder.open
    return level.closed()


def merged(segments: Sequence[Segment], least: float) -> list[Segment]:
    """Fewer segments, to draw: neighbours of one kind and function are one, and all that are short.

    Args:
      segments: any.
      least: seconds below which a segment is joined to the one before it in its lane, if that is
        of the same kind and not further away.
    """
    last: dict[tuple[str, ...], int] = {}
    made: list[Segment] = []
    for s in sorted(segments, key=lambda s: s.start):
        before = made[last[s.lanes]] if s.lanes in last else None
        joint = _joint(before, s, least) if before is not None else None
        if joint is None:
            last[s.lanes] = len(made)
            made.append(s)
        else:
            made[last[s.lanes]] = joint
    return made


def _joint(before: Segment, after: Segment, least: float) -> Segment | None:
    """Two neighbours of one lane as one segment, if they belong together."""
    if before.kind != after.kind or after.start - before.end > least / 4:
        return None
    group = before.group if before.group == after.group else ""
    if not group and before.kind == COMPUTE:
        names = functions_of(after.group)
        common = next((name for name in functions_of(before.group) if name in names), None)
        group = f"in ({common})" if common is not None else ""
    if not group and min(before.seconds, after.seconds) >= least:
        return None
    return before._replace(
        label=before.label if before.label == after.label else "",
        group=group,
        seconds=after.end - before.start,
        ops=before.ops + after.ops,
    )


def functions_of(group: str) -> tuple[str, ...]:
    """The functions of a source line and its caller, the caller first, without `<locals>`."""
    names = re.findall(r"\(([^()]*)\)", group)
    return tuple(name.rpartition(".")[2] for name in reversed(names))


class _Level:
    """A region while it is being recorded."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.loops: list[Loop] = []
        self.now = 0.0

    def add(self, lanes: tuple[str, ...], kind: str, label: str, group: str, sec: float) -> None:
        if sec > 0:
            self.segments.append(Segment(lanes, kind, label, group, self.now, sec))
            self.now += sec

    def closed(self) -> Timeline:
        return Timeline(tuple(self.segments), tuple(self.loops), self.now)


class _Recorder(Replay):
    """The plan's walk, which writes down when what happens."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.open = [_Level()]
        self.inside: list[_Level] = []
        self.pending: Op | None = None

    # What takes time.

    def choose(self, op: Op) -> tuple[Choice, float]:
        self.pending = op
        return super().choose(op)

    def define(self, value: Value, state: Sharding) -> None:
        """Called for an op's results once its operands are there: now it runs."""
        super().define(value, state)
        op, self.pending = self.pending, None
        if op is not None and op.name != "spmd.mark":
            assignment = self.plan.choice(op).assignment
            rule = rule_of(op.kind, op.loc)
            seconds = op_seconds(op.kind, rule, assignment, self.mesh, self.topology)
            self.open[-1].add((COMPUTE,), COMPUTE, op.label, op.loc.trail, seconds)

    def moved(self, value: Value, have: Sharding, wanted: Sharding, path: Path) -> None:
        group = self.user.loc.trail if self.user is not None else "carries and results"
        weights = [self._step_seconds(value, step) for step in path.steps]
        scale = path.seconds / (sum(weights) or 1.0)
        for step, weight in zip(path.steps, weights, strict=True):
            axes = ", ".join(str(ref) for ref in axis_refs(step.axes, self.mesh))
            label, kind = f"{step.kind} over {axes}", step.kind
            lanes = self._lanes(step.axes)
            if kind in ("mask", "slice"):
                label, kind, lanes = step.kind, COMPUTE, (COMPUTE,)
            self.open[-1].add(lanes, kind, label, group, weight * scale)

    def _step_seconds(self, value: Value, step: Step) -> float:
        if step.kind == "mask":
            return mask_seconds(step.before, self.types[value], self.mesh, self.topology)
        before, after = (
            self.types[value].with_shape(local_shape(self.types[value].shape, s, self.mesh)).bytes
            for s in (step.before, step.after)
        )
        return collective_seconds(step.kind, step.axes, before, after, self.mesh, self.topology)

    def _lanes(self, axes: Axes) -> tuple[str, ...]:
        mesh = self.mesh
        return tuple(dict.fromkeys(mesh.axis_names[mesh.atoms[a].axis] for a in axes))

    # Loops.

    def enter(self) -> None:
        super().enter()
        self.open.append(_Level())

    def leave(self) -> None:
        super().leave()
        self.inside.append(self.open.pop())

    def control_flow(self, op: Op, trips: int) -> None:
        outer, self.inside = self.inside, []
        super().control_flow(op, trips)
        body = _one_after_another([level.closed() for level in self.inside])
        self.inside = outer
        is_loop = op.name == "stablehlo.while"
        loop = Loop(
            f"{'loop' if is_loop else 'branches'} at {op.loc.trail or 'an unknown place'}",
            self.open[-1].now,
            self.trips[op.results[0]] if is_loop else 1,
            body,
        )
        self.open[-1].loops.append(loop)
        self.open[-1].now += loop.seconds


def _one_after_another(parts: Sequence[Timeline]) -> Timeline:
    """Regions that run in turn; all branches of a conditional count, as for the planner."""
    start = 0.0
    segments: list[Segment] = []
    loops: list[Loop] = []
    for part in parts:
        segments += [s._replace(start=s.start + start) for s in part.segments]
        loops += [loop._replace(start=loop.start + start) for loop in part.loops]
        start += part.seconds
    return Timeline(tuple(segments), tuple(loops), start)
