"""Schedules of pipelines: their names, what they need, and which is taken where nobody says.

How long a schedule takes depends on all that is around it, so a program is traced and planned with
each, and the one with the shortest predicted run is taken, as with other forms of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from spmd.api.tracing import Traced
from spmd.compiler import Stages
from spmd.errors import ArgumentError, MeshError, PlanError
from spmd.ir.pipelines import Pipeline
from spmd.mesh.mesh import Mesh
from spmd.planning.plan import Weighed
from spmd.predict.memory import peak_memory

SCHEDULES = MappingProxyType(
    {
        "gpipe": (False, False),
        "1f1b": (False, True),
        "interleaved": (True, False),
        "interleaved 1f1b": (True, True),
    }
)
"""Name -> whether stages have several chunks, and whether steps are computed again."""

DEFAULT = "gpipe"


@dataclass
class _Choice:
    """Of one trace: what calls without a schedule take, and whether there are some.

    Attributes:
      schedule: the name of what they take where they can.
      open: names of the schedules that some call could have taken.
    """

    schedule: str
    open: tuple[str, ...] = ()


_CHOICE: ContextVar[_Choice | None] = ContextVar("schedule of pipelines", default=None)


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

    Args:
      asked: what the call says.
      layers, batch: sizes of the stack and of the batch.
      mesh: where the axis is, if that is known.
      source: the user's line.

    Raises:
      ArgumentError, MeshError: as for `pipeline`.
    """
    _check_counts(asked, batch, mesh, source)
    if asked.schedule is not None:
        if asked.schedule not in SCHEDULES:
            raise ArgumentError(
                f"pipeline: schedule={asked.schedule!r} is none",
                source=source,
                required=f"one of {', '.join(map(repr, SCHEDULES))}, or None",
            )
        return _checked(asked.as_pipeline(asked.schedule), asked, layers, source)
    possible = [name for name in SCHEDULES if _refusal(asked, name, layers) is None]
    choice = _CHOICE.get() or _Choice(DEFAULT)
    choice.open = tuple(name for name in SCHEDULES if name in {*choice.open, *possible})
    name = choice.schedule if choice.schedule in possible else next(iter(possible), None)
    if name is None:
        name = "interleaved" if asked.chunks else DEFAULT
    return _checked(asked.as_pipeline(name), asked, layers, source)


def in_fastest_schedule(
    plan: Callable[[], tuple[Traced, Stages]], memory_limit: int | None
) -> tuple[Traced, Stages]:
    """A program with its pipelines in the schedule that is predicted to be the fastest.

    Of schedules that do not fit in memory the smallest is taken.

    Args:
      plan: traces and plans it; called once for each schedule that its pipelines leave open.
      memory_limit: bytes that one device may use; the topology's memory when left out.

    Raises:
      PlanError: it keeps to the memory limit in no schedule.
    """
    first, names = _planned(plan, DEFAULT)
    default = DEFAULT if DEFAULT in names else next(iter(names), "")
    tried = {default: first}
    # To compute steps again takes longer: it is weighed where memory is short without.
    for is_lean in (False, True):
        if not is_lean or all(_excess(each, memory_limit) for each in tried.values()):
            others = (name for name in names if SCHEDULES[name][1] == is_lean)
            tried |= {name: _planned(plan, name)[0] for name in others if name != default}
    fit = {name: each for name, each in tried.items() if not isinstance(each, PlanError)}
    if not fit:
        raise min((e for e in tried.values() if isinstance(e, PlanError)), key=_least_bytes)

    def rank(name: str) -> tuple[float, float]:
        return _excess(fit[name], memory_limit), fit[name][1].timeline.seconds

    best = min(fit, key=rank)
    traced, stages = fit[best]
    before = (fit.get(default) or fit[best])[1].timeline.seconds
    forms = [
        _weighed(name, tried[name], before, name == best, memory_limit)
        for name in tried
        if name != default
    ]
    plan_ = stages.plan._replace(forms=(*stages.plan.forms, *forms))
    return traced, replace(stages, plan=plan_)


_Planned = tuple[Traced, Stages]


def _planned(
    plan: Callable[[], _Planned], name: str
) -> tuple[_Planned | PlanError, tuple[str, ...]]:
    """A program whose pipelines take a schedule if they may, and the schedules that they leave."""
    choice = _Choice(name)
    token = _CHOICE.set(choice)
    try:
        return plan(), choice.open
    except PlanError as error:
        return error, choice.open
    finally:
        _CHOICE.reset(token)


def _excess(planned: _Planned | PlanError, memory_limit: int | None) -> float:
    """Bytes of one device that a program needs beyond those there are."""
    if isinstance(planned, PlanError):
        return math.inf
    traced, stages = planned
    topology, donated = stages.plan.topology, traced.request.donated
    use = peak_memory(stages.optimized.program, donated, topology.platform)
    return max(0, use.peak - topology.memory(memory_limit))


def _least_bytes(error: PlanError) -> int:
    return error.least_bytes


def _weighed(
    name: str, planned: _Planned | PlanError, before: float, is_best: bool, limit: int | None
) -> Weighed:
    """What the report says of a schedule."""
    seconds = None if isinstance(planned, PlanError) else planned[1].timeline.seconds
    refusal = "" if is_best else "another one is faster"
    if not is_best and _excess(planned, limit):
        refusal = "it does not fit in memory"
    return Weighed(f"pipelines {name}", seconds, before, refusal)


# ---------------------------------------------------------------------------------------------
# What is wrong.


def _check_counts(asked: Asked, batch: int, mesh: Mesh | None, source: str | None) -> None:
    """Holds that there are stages and microbatches, that the batch has the latter and the axis the
    former."""
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


def _checked(of: Pipeline, asked: Asked, layers: int, source: str | None) -> Pipeline:
    """A pipeline in a schedule that its counts allow."""
    refusal = _refusal(asked, of.schedule, layers)
    if refusal is not None:
        raise ArgumentError(f"pipeline: {refusal.what}", source=source, required=refusal.required)
    return of


class _Refusal(NamedTuple):
    """Why a pipeline has no such schedule."""

    what: str
    required: str


def _refusal(asked: Asked, schedule: str, layers: int) -> _Refusal | None:
    """Why a call cannot take a schedule; None if it can."""
    is_chunked, is_lean = SCHEDULES[schedule]
    of = asked.as_pipeline(schedule)
    if asked.chunks and not is_chunked:
        return _Refusal(
            f"chunks={asked.chunks} with schedule={schedule!r}, in which a stage has one",
            "schedule='interleaved', or no chunks",
        )
    if layers % of.window:
        parts = f"{of.stages} stages" + (f" of {of.chunks} chunks" if of.chunks > 1 else "")
        return _Refusal(
            f"{layers} layers are not split evenly over {parts}",
            f"a number of layers that {of.window} divides",
        )
    if (is_chunked or is_lean) and of.microbatches % of.stages:
        return _Refusal(
            f"{of.microbatches} microbatches are not groups of {of.stages} stages, as "
            f"schedule={schedule!r} takes them",
            f"microbatches= a multiple of {of.stages}; 'gpipe' takes any number",
        )
    return None
