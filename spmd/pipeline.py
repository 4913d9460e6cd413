"""The compiler, top to bottom: every stage in order, timed, checked, printable.

    import -> canonicalize -> separate -> unroll -> sink -> propagate
    plan -> partition -> optimize -> time -> layouts -> expand -> emit

The planner proposes a few plans. Each is partitioned, optimized and timed, and the fastest goes on,
in halves where the options ask for that.
Each stage is a pure function from a frozen value to a frozen value.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from spmd.errors import PlanError
from spmd.frontend.canonicalize.run import canonicalize
from spmd.frontend.importer.module import Imported, import_module
from spmd.frontend.marks import Entries, collect_marks, result_mark
from spmd.frontend.separate import separate
from spmd.frontend.unflatten import unflatten
from spmd.frontend.unroll import unroll
from spmd.ir.callbacks import Callback
from spmd.ir.dialect.composites import PLATFORM, whole_composites
from spmd.ir.legality import check_program
from spmd.ir.program import Program, Value
from spmd.ir.types import Order
from spmd.lowering.emitted import Emitted, emit_local
from spmd.lowering.expand import expand
from spmd.lowering.halves.seeds import Seed, seeds_of
from spmd.lowering.halves.write import in_halves
from spmd.lowering.layouts import lay_out
from spmd.lowering.legality import check_local
from spmd.lowering.partition import Partitioned, partition
from spmd.lowering.recompute.recompute import recompute
from spmd.lowering.rewrites.optimize import schedule, simplify
from spmd.lowering.rewrites.room import Room
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.planning.exact import plan_exactly
from spmd.planning.greedy import plan_greedily
from spmd.planning.legality import check_plan
from spmd.planning.plan import Halved, Plan, Recomputed
from spmd.planning.problem import Problem, opened, problem_of
from spmd.predict.backends import backend_of
from spmd.predict.memory import MemoryUse, peak_memory
from spmd.predict.timeline import Timeline, predict_timeline
from spmd.progress import doing
from spmd.propagation.cheap import cheap_values
from spmd.propagation.propagate import propagate
from spmd.propagation.propagated import Propagated
from spmd.propagation.sink import sink_invariants

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Stages make many small tuples that all live on: looking for cycles only costs time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Request:
    """What is to be compiled.

    Attributes:
      module: a StableHLO module in memory.
      mesh: the mesh.
      topology: the machine to plan for.
      arg_names: paths of the arguments in the user's pytrees.
      result_names: paths of the results.
      arg_entries: for each argument its spelled-out spec, or None for an open argument.
      result_entries: the same for results.
      arg_reasons: for each argument, why it has the spec it has, where the user did not give it.
      links: (result index, argument index) of donated arguments and their updates.
      donated: flat indices of all donated arguments.
      arg_orders: in which order the dims of each argument lie in memory, where not as numbered.
      platform: what it is compiled for, `cpu`, `cuda` or `tpu`: composites get its kernels.
      function: file and qualified name of the function that was traced, if known.
      callbacks: the Python functions that the module calls, by number.
    """

    module: Any
    mesh: Mesh
    topology: Topology
    arg_names: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()
    arg_entries: tuple[Entries | None, ...] = ()
    result_entries: tuple[Entries | None, ...] = ()
    arg_reasons: tuple[str | None, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    arg_orders: tuple[Order | None, ...] = ()
    platform: str = ""
    function: tuple[str, str] | None = None
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class Stages:
    """What the stages made, and how long each took.

    Attributes:
      program: the whole program, imported, canonicalized, separated, unrolled and sunk.
      propagated: its proposals.
      plan: its plan.
      partitioned: the local program.
      optimized: the local program after its rewrites, and how its arguments lie in memory.
      timeline: its predicted schedule.
      emitted: the local program as text, to be compiled.
      seconds: stage -> seconds, in order.
    """

    program: Program
    propagated: Propagated
    plan: Plan
    partitioned: Partitioned
    optimized: Partitioned
    timeline: Timeline
    emitted: Emitted
    seconds: Mapping[str, float] = field(default_factory=dict)


def compile_module(request: Request, options: Options) -> Stages:
    """Runs all stages.

    Raises:
      SpmdError: whatever a stage cannot do, named with its op and source line.
    """
    clock = _Clock(options.verbose)
    with _no_garbage_collection():
        imported = _front(request, clock)
        made = _plan(request, imported, options, options.unroll or 0, clock)
        if options.unroll is None:
            made = _perhaps_written_out(request, imported, made, options, clock)
        imported, propagated, trial = made
        platform, links, orders = request.platform, request.links, request.arg_orders
        laid_out = clock(
            "layouts", lay_out, trial.optimized, links, orders, platform, options.layouts
        )
        emitted = _emit(laid_out, request.donated, clock)
        stages = Stages(
            imported.program,
            propagated,
            trial.plan,
            trial.partitioned,
            laid_out,
            trial.timeline,
            emitted,
            clock.seconds,
        )
        if options.check:
            check_stages(stages)
    return stages


_Planned = tuple[Imported, Propagated, "Trial"]


def _plan(
    request: Request, imported: Imported, options: Options, most: int, clock: _Clock
) -> _Planned:
    """The stages from a module to a plan that was brought down to one device."""
    imported, propagated = _propagated(request, imported, most, clock)
    problem = _problem(request, imported, propagated)
    return imported, propagated, plan_problem(problem, options, request.donated, clock)


MOST_TRIPS = 64
"""Loops that run more often stay loops, if nobody says otherwise."""

RUNS = 1000
"""How often a program is taken to run, where time to compile is weighed against time to run."""

GAIN = 0.02
"""Share of a run's time that another form of the program has to win."""

MOST_GAIN = 0.2
"""The most that is hoped for: a larger share of the time is not waited for."""

XLA_SECONDS = 2e-3
"""What one more op takes XLA to compile, measured: 32 layers of a Llama took 20 s more on GPUs."""


def _perhaps_written_out(
    request: Request, imported: Imported, looped: _Planned, options: Options, clock: _Clock
) -> _Planned:
    """A program with loops, or the same with its loops written out where that pays."""
    before = looped[2]
    waits = backend_of(request.platform).waits_at_loops
    if not waits or before.seconds * MOST_GAIN * RUNS < XLA_SECONDS:
        return looped
    written = clock("unroll", unroll, imported.program, MOST_TRIPS)
    seconds = (_size(written) - _size(imported.program)) * XLA_SECONDS
    if not 0 < seconds <= before.seconds * MOST_GAIN * RUNS:
        return looped
    try:
        made = _plan(request, imported, options, MOST_TRIPS, clock)
    except PlanError:  # it does not fit in memory
        return looped
    after = made[2]
    limit = after.plan.topology.memory(options.memory_limit)
    gain = before.seconds - after.seconds
    if after.bytes > max(before.bytes, limit) or gain < max(seconds / RUNS, before.seconds * GAIN):
        return looped
    note = (
        f"loops of at most {MOST_TRIPS} trips are written out: {after.seconds * 1e3:.3g} ms "
        f"predicted instead of {before.seconds * 1e3:.3g} ms"
    )
    after.plan = after.plan._replace(notes=(*after.plan.notes, note))
    return made


def _size(program: Program) -> int:
    return sum(1 for _ in program.walk())


def propagated_of(request: Request) -> Propagated:
    """The stages in front of the plan alone."""
    with _no_garbage_collection():
        clock = _Clock()
        return _propagated(request, _front(request, clock), 0, clock)[1]


def _front(request: Request, clock: _Clock) -> Imported:
    """What a module says."""
    imported = clock("import", _import, request)
    canonical = clock("canonicalize", _canonicalize, imported.program)
    return imported._replace(program=clock("separate", separate, canonical))


def _propagated(
    request: Request, imported: Imported, most: int, clock: _Clock
) -> tuple[Imported, Propagated]:
    """What follows from marks, once loops of at most `most` trips are written out."""
    unrolled = clock("unroll", unroll, imported.program, most)
    imported = imported._replace(program=clock("sink", sink_invariants, unrolled))
    return imported, clock("propagate", _propagate, request, imported)


class Trial:
    """A plan brought down to one device, and what its program is predicted to take.

    Attributes:
      plan: the plan.
      partitioned: the local program.
      simplified: the local program before its collectives are scheduled.
      optimized: the local program after its rewrites.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        donated: tuple[int, ...],
        clock: _Clock,
        unpriced: Trial | None = None,
    ) -> None:
        if plan.byte_price and unpriced is None:
            unpriced = Trial(plan._replace(byte_price=0.0), options, donated, clock)
        self._options, self._donated, self._clock = options, donated, clock
        self._unpriced, self.plan = unpriced or self, plan
        self.partitioned: Partitioned = (
            unpriced.partitioned if unpriced else clock("partition", partition, plan)
        )
        program = self._simple
        if plan.byte_price:
            program, again = clock("recompute", self._recompute, program)
            self.plan = plan._replace(recomputed=again)
        self.simplified = program
        program = clock("optimize", self._schedule, program)
        self.optimized = self.partitioned._replace(program=program)

    @cached_property
    def _simple(self) -> Program:
        """The local program after those rewrites that come before recomputation."""
        if self._unpriced is not self:
            return self._unpriced._simple
        program, mesh = self.partitioned.program, self.plan.mesh
        return self._clock("optimize", simplify, program, mesh, self._room)

    @property
    def _room(self) -> Room:
        memory = self.plan.topology.memory(self._options.memory_limit)
        return Room(memory, tuple(self.plan.problem.links.values()))

    def _recompute(self, program: Program) -> tuple[Program, tuple[Recomputed, ...]]:
        # Links are shared by all devices: what fits as it is sends no more than it has to.
        plan, limit = self.plan, self._room.bytes
        price, donated, is_short = plan.byte_price, self._donated, self._unpriced.bytes > limit
        return recompute(program, plan.mesh, plan.topology, price, limit, donated, is_short)

    def _schedule(self, program: Program, half_of: Mapping[Value, int] | None = None) -> Program:
        plan, options, room = self.plan, self._options, self._room
        most, ahead = options.combine_bytes, options.prefetch
        return schedule(program, plan.mesh, plan.topology, most, ahead, room, half_of)

    def in_halves(self, seed: Seed) -> Trial:
        """The same with some arguments in halves."""
        other = copy.copy(self)
        for name in ("timeline", "_memory"):
            vars(other).pop(name, None)
        arguments = self.simplified.body.args
        cuts = {arguments[number]: cut for number, cut in seed.cuts}
        program, half_of = self._clock("halves", in_halves, self.simplified, cuts)
        program = self._clock("optimize", self._schedule, program, half_of)
        other.optimized = self.partitioned._replace(program=program)
        names = self.plan.program.arg_names
        dims = tuple((names[number], cut.dim) for number, cut in seed.cuts)
        other.plan = self.plan._replace(halved=Halved(dims, self.seconds))
        return other

    def seeds(self) -> list[Seed]:
        """What could be in halves, the most promising first."""
        program, timeline = self.optimized.program, self.timeline
        return self._clock("halves", seeds_of, program, timeline, self._donated)

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted schedule of one run."""
        plan, program = self.plan, self.optimized.program
        return self._clock("time", predict_timeline, program, plan.mesh, plan.topology)

    @property
    def seconds(self) -> float:
        """Predicted time of one run, communication hidden behind independent arithmetic."""
        return self.timeline.seconds

    @cached_property
    def _memory(self) -> MemoryUse:
        program, platform = self.optimized.program, self.plan.topology.platform
        return self._clock("memory", peak_memory, program, self._donated, platform)

    @property
    def bytes(self) -> int:
        """Predicted memory of one device."""
        return self._memory.peak

    @property
    def largest(self) -> list[tuple[str, int]]:
        """Names and bytes of arguments, of results, and of the largest values at the peak."""
        memory = self._memory
        values = [(buffer.name, buffer.bytes) for buffer in memory.at_peak()[:3]]
        results = memory.results - memory.aliased
        return [("arguments", memory.arguments), ("results", results), *values]


@_no_garbage_collection()
def plan_problem(
    problem: Problem,
    options: Options,
    donated: tuple[int, ...] = (),
    clock: _Clock | None = None,
) -> Trial:
    """Plans: what is proposed is partitioned, optimized and timed, and the fastest is taken.

    Args:
      problem: what is to be planned.
      options: the planner, the memory limit, and what rewrites do.
      donated: flat indices of the donated arguments.
      clock: times the stages.

    Raises:
      PlanError: no plan was found that keeps to the memory limit.
    """
    clock = clock or _Clock()
    tried: list[Trial] = []

    def try_out(plan: Plan) -> Trial:
        same = [trial for trial in tried if trial.plan.states is plan.states]
        tried.append(Trial(plan, options, donated, clock, same[0] if same else None))
        return tried[-1]

    if options.planner == "greedy":
        plan = clock("plan", plan_greedily, problem)
        try_out(plan)
    else:
        limit, again = options.memory_limit, options.recompute
        plan = clock("plan", plan_exactly, problem, try_out, limit, again)
    key = id(plan.states), plan.byte_price
    trial = next(t for t in tried if (id(t.plan.states), t.plan.byte_price) == key)
    trial.plan = plan
    trial = _perhaps_in_halves(trial, options)
    trial.plan = trial.plan._replace(run_seconds=trial.seconds)
    return trial


HALVES_GAIN = 0.07
"""Share of its time that a program must win by running in halves.

Not priced: twice the kernels, and products that slow down beside communication. On two H200s a
tensor-parallel step that waits and idles 11 ms instead of 26 takes as long as before, 190 ms, where
6% less was predicted; for v5e:4x4 the TPU compiler makes 143 ms with halves and 142 without.
"""


def _perhaps_in_halves(trial: Trial, options: Options) -> Trial:
    """A trial, or the fastest of those in halves if that is faster and fits in memory."""
    plan, wanted = trial.plan, options.halves
    gain = trial.seconds * HALVES_GAIN
    overlap = plan.topology.chip.overlap
    waits = trial.timeline.scheduled_seconds - trial.timeline.compute_seconds
    if wanted is False or (wanted is None and waits * overlap < gain):
        return trial
    limit = plan.topology.memory(options.memory_limit)
    seeds = [seed for seed in trial.seeds() if wanted or seed.seconds * overlap >= gain]
    found: list[Trial] = []
    for seed in seeds:
        other = trial.in_halves(seed)
        wins = other.seconds <= trial.seconds - gain
        if (wins or wanted) and other.bytes <= limit:
            found.append(other)
        if wins and found:
            break
    if found:
        return min(found, key=lambda other: other.seconds)
    if wanted:
        why = "do not fit in memory" if seeds else "exchange nothing that arguments lead to"
        trial.plan = plan._replace(notes=(*plan.notes, f"not run in halves: they {why}"))
    return trial


def timed(plan: Plan, options: Options) -> Plan:
    """A plan with the time that its program is predicted to take."""
    donated = tuple(plan.problem.links.values())
    trial = _perhaps_in_halves(Trial(plan, options, donated, _Clock()), options)
    return plan._replace(run_seconds=trial.seconds)


def emit_plan(plan: Plan, options: Options) -> Emitted:
    """The stages behind a plan that is given."""
    clock = _Clock()
    return _emit(Trial(plan, options, (), clock).optimized, (), clock)


def _emit(optimized: Partitioned, donated: tuple[int, ...], clock: _Clock) -> Emitted:
    return clock("emit", emit_local, clock("expand", _expand, optimized), donated)


def check_stages(stages: Stages) -> None:
    """Holds every stage's result against its legality table.

    Raises:
      LegalityError: a stage broke its contract.
    """
    check_program(stages.program)
    check_plan(stages.plan)
    check_local(stages.partitioned, "local")
    check_local(stages.optimized, "optimized")


# ---------------------------------------------------------------------------------------------
# Stages that take more than the result of the one before.


def _import(request: Request) -> Imported:
    platform = request.platform
    composites = {name: {PLATFORM: platform} for name in whole_composites(platform)}
    imported = import_module(
        request.module,
        request.arg_names,
        composites,
        request.function,
        request.callbacks,
        request.mesh,
    )
    if request.result_names:
        program = imported.program._replace(result_names=request.result_names)
        imported = imported._replace(program=program)
    return imported


def _canonicalize(program: Program) -> Program:
    return unflatten(canonicalize(program))


def _propagate(request: Request, imported: Imported) -> Propagated:
    program = imported.program
    arg_entries = request.arg_entries or (None,) * len(program.body.args)
    result_entries = request.result_entries or (None,) * len(program.body.results)
    reasons = request.arg_reasons or (None,) * len(arg_entries)
    marks = collect_marks(imported, request.mesh, arg_entries, result_entries, reasons)
    links: list[tuple[Value, Value]] = [
        (program.body.results[result], program.body.args[arg]) for result, arg in request.links
    ]
    return propagate(program, request.mesh, marks, cheap_values(program), links)


def _problem(request: Request, imported: Imported, propagated: Propagated) -> Problem:
    results = _result_shardings(request, imported)
    problem = problem_of(propagated, request.topology, results, request.links)
    return opened(problem, [v not in propagated.marks for v in imported.program.body.args])


def _result_shardings(request: Request, imported: Imported) -> Sequence[Sharding | None]:
    """What each result must look like, where it is marked; a mark with open dims only wishes."""
    count = len(imported.program.body.results)
    entries = request.result_entries or (None,) * count
    marks = [result_mark(imported, request.mesh, entries, i) for i in range(count)]
    return [None if mark is None or any(mark.open) else Sharding(mark.dims) for mark in marks]


def _expand(optimized: Partitioned) -> Partitioned:
    return optimized._replace(program=expand(optimized.program, optimized.mesh))


# ---------------------------------------------------------------------------------------------


class _Clock:
    """Times stages, each without those that it calls; prints them when verbose."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.seconds: dict[str, float] = {}
        self._inside = 0.0

    def __call__(self, stage: str, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        doing(stage)
        self.seconds.setdefault(stage, 0.0)  # in the order in which they begin
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        result = run(*args, **kwargs)
        whole = time.perf_counter() - start
        own, self._inside = whole - self._inside, outside + whole
        self.seconds[stage] += own
        if self.verbose:
            print(f"spmd: {stage:<12} {own * 1e3:9.1f} ms", file=sys.stderr)
        return result
