"""Schedules of pipelines: their names, what they need, and which is taken where nobody says.

How long a schedule takes depends on all that is around it, so a program is traced and planned with
each, and the one with the shortest predicted run is taken, as with other forms of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from spmd.api.tracing import Interface
from spmd.compiler import Stages
from spmd.errors import ArgumentError, MeshError, PlanError
from spmd.ir.pipelines import SCHEDULES, Pipeline, pipeline_of
from spmd.mesh.mesh import Mesh
from spmd.planning.search import Candidate, Search
from spmd.predict.backends import memory_for
from spmd.predict.memory import peak_memory

DEFAULT = "gpipe"

SHORT = 0.5  # memory is short where a program takes more than this share of it

_TAKEN: ContextVar[str] = ContextVar("schedule of pipelines", default=DEFAULT)
"""Of this trace: what calls without a schedule take where they can."""


class Asked(NamedTuple):
    """What a call of `pipeline` says, by the names of its arguments."""

    schedule: str | None
    chunks: int | None
    axis: str
    stages: int
    microbatches: int

    def as_pipeline(self, schedule: str) -> Pipeline:
        """The pipeline in a schedule."""
        is_chunked, is_lean = SCHEDULES[schedule]
        chunks = (self.chunks or 2) if is_chunked else 1
        return Pipeline(self.axis, self.stages, self.microbatches, chunks, is_lean)


def chosen_pipeline(
    asked: Asked, *, layers: int, batch: int, mesh: Mesh | None, source: str | None
) -> Pipeline:
    """The pipeline of a call, in the schedule that it names or that is weighed now.

    `layers` and `batch` are sizes of the stack and the batch; errors are as for `pipeline`.
    """
    _check_counts(asked, batch, mesh, source)
    name = asked.schedule
    if name is None:
        possible = [each for each in SCHEDULES if not _refusal(asked, each, layers, source)]
        if possible:
            taken = _TAKEN.get()
            of = asked.as_pipeline(taken if taken in possible else possible[0])
            is_open = sum(1 << i for i, each in enumerate(SCHEDULES) if each in possible)
            return of._replace(open=is_open)
        name = "interleaved" if asked.chunks else DEFAULT
    elif name not in SCHEDULES:
        raise ArgumentError(
            f"pipeline: schedule={name!r} is none",
            source=source,
            required=f"one of {', '.join(map(repr, SCHEDULES))}, or None",
        )
    of = asked.as_pipeline(name)
    if refusal := _refusal(asked, of.schedule, layers, source):
        raise refusal
    return of


@dataclass(frozen=True)
class Tried:
    """A program that was traced and planned with its pipelines in one schedule."""

    interface: Interface
    stages: Stages

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""
        return self.stages.timeline.seconds

    @cached_property
    def bytes(self) -> int:
        """Predicted memory of one device."""
        platform, donated = self.stages.plan.topology.platform, self.interface.request.donated
        return peak_memory(self.stages.optimized.program, donated, platform).peak

    def fits(self, limit: float) -> bool:
        """Whether it keeps to so many bytes."""
        return self.bytes <= limit


def in_fastest_schedule(attempt: Callable[[bool], Tried], memory_limit: int | None) -> Tried:
    """A program with its pipelines in the schedule that is predicted to be the fastest.

    `attempt` traces and plans it in each schedule that its pipelines leave open, told whether jax
    may take a trace that it has made before. Of schedules that do not fit in memory
    (`memory_limit`, or what the topology has room for) the one that misses the least is taken;
    PlanError if there is a limit and none keeps to it.
    """
    names, default = dict.fromkeys(SCHEDULES), DEFAULT
    try:
        first = attempt(True)
    except PlanError as error:
        if memory_limit is None:
            raise
        search, refused = Search[Tried](memory_limit), error
    else:
        program, topology = first.stages.plan.program, first.stages.plan.topology
        pipelines = {of for op in program.walk() if (of := pipeline_of(op.loc.scope)) and of.open}
        if not pipelines:
            return first
        names = {name: None for of in pipelines for name in of.open_schedules}
        default = min(of.schedule for of in pipelines)
        search = Search(memory_for(topology, memory_limit), [first])

    def in_schedule(name: str) -> Tried:
        token = _TAKEN.set(name)
        try:
            return attempt(False)
        finally:
            _TAKEN.reset(token)

    # To compute steps again takes longer, but where memory is short so does what else saves it.
    for is_lean in (False, True):
        if is_lean and any(each.fits(SHORT * search.limit) for each in search.tried):
            break
        for name in names:
            if SCHEDULES[name][1] == is_lean and name != default:
                search.weigh(Candidate(f"pipelines {name}", partial(in_schedule, name)))
    if not search.tried:
        raise refused
    best = search.best
    forms = (*best.stages.plan.forms, *search.weighed)
    stages = replace(best.stages, plan=best.stages.plan._replace(forms=forms))
    return Tried(best.interface, stages)


# ---------------------------------------------------------------------------------------------
# What is wrong.


def _check_counts(asked: Asked, batch: int, mesh: Mesh | None, source: str | None) -> None:
    """Holds that counts are positive, and divide what they cut."""
    for name in ("stages", "microbatches"):
        if (count := getattr(asked, name)) < 1:
            raise ArgumentError(
                f"pipeline: {name}={count}", source=source, required="a number of at least 1"
            )
    if batch % asked.microbatches:
        raise ArgumentError(
            f"pipeline: a batch of {batch} rows is not {asked.microbatches} microbatches",
            source=source,
            actual=f"{batch} = {batch // asked.microbatches} * {asked.microbatches} + "
            f"{batch % asked.microbatches}",
            required="microbatches= that divides the batch",
        )
    if mesh is None:
        return
    if asked.axis not in mesh.shape:
        raise MeshError(
            f"pipeline: the mesh has no axis {asked.axis!r}",
            source=source,
            actual=f"({mesh})",
            fix=f"make the mesh with {asked.axis}={asked.stages}, or name another axis=",
        )
    if asked.stages % (size := mesh.shape[asked.axis]):
        raise ArgumentError(
            f"pipeline: {asked.stages} stages are not split evenly over {asked.axis}={size}",
            source=source,
            required=f"stages= a multiple of {size}; as many, for one stage on each device",
        )


def _refusal(asked: Asked, schedule: str, layers: int, source: str | None) -> ArgumentError | None:
    """Why a call cannot take a schedule; None if it can."""
    is_chunked, is_lean = SCHEDULES[schedule]
    of = asked.as_pipeline(schedule)
    if asked.chunks and not is_chunked:
        what = f"chunks={asked.chunks} with schedule={schedule!r}, in which a stage has one"
        required = "schedule='interleaved', or no chunks"
    elif layers % of.window:
        parts = f"{of.stages} stages" + (f" of {of.chunks} chunks" if of.chunks > 1 else "")
        what = f"{layers} layers are not split evenly over {parts}"
        required = f"a number of layers that {of.window} divides"
    elif (is_chunked or is_lean) and of.microbatches % of.stages:
        groups = f"{of.microbatches} microbatches are not groups of {of.stages} stages"
        what = f"{groups}, as schedule={schedule!r} takes them"
        required = f"microbatches= a multiple of {of.stages}; 'gpipe' takes any number"
    else:
        return None
    return ArgumentError(f"pipeline: {what}", source=source, required=required)
