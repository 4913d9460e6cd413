"""The compiler, top to bottom: every stage in order, timed, checked, printable.

    import -> canonicalize -> separate -> dedupe -> lift -> unroll -> sink -> propagate -> shift
    plan -> partition -> optimize -> time -> stack -> layouts -> expand -> emit

The planner proposes a few plans. Each is partitioned, optimized and timed (`spmd.trial`), and the
fastest goes on; so does the fastest of the program's forms (`spmd.forms`), which are planned like
it: `stack` looks for equal work in its plan.
Each stage is a pure function from a frozen value to a frozen value.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax

from spmd.forms import MOST_TRIPS, STACKED_GAIN, forms_written_out, stacked_form
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.module import Imported, import_module, module_text
from spmd.frontend.lanes import Stack
from spmd.frontend.lift import lift_constants
from spmd.frontend.marks import Entries, collect_marks, result_mark
from spmd.frontend.separate import separate
from spmd.frontend.shift import shift_heads
from spmd.frontend.stack import stacked
from spmd.frontend.sums import accumulate, unflatten
from spmd.frontend.unroll import unroll
from spmd.ir.dialect.composites import PLATFORM, whole_composites
from spmd.ir.dialect.registry import TAUGHT
from spmd.ir.legality import check_program
from spmd.ir.program import Callback, Program
from spmd.ir.rewrite import dedupe
from spmd.ir.types import Order
from spmd.lowering.emitted import Emitted, emit_local
from spmd.lowering.expand import expand
from spmd.lowering.layouts import lay_out
from spmd.lowering.legality import check_local
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.planning.exact import plan_exactly
from spmd.planning.greedy import plan_greedily
from spmd.planning.legality import check_plan
from spmd.planning.plan import Plan, recorded, replayed
from spmd.planning.problem import Problem, posed
from spmd.planning.search import Search
from spmd.planning.stacks import stacks_of
from spmd.predict.backends import memory_for
from spmd.predict.timeline import Timeline
from spmd.progress import Stopwatch
from spmd.propagation.propagate import Propagated
from spmd.propagation.sink import sink_invariants
from spmd.store import key_of, store_in
from spmd.trial import Trial

T = TypeVar("T")

PLANNED = "planned"
"""The kind of what is kept of a compilation: the form, and the plan."""


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
      is_read: whether the plan was kept by an earlier start.
    """

    program: Program
    propagated: Propagated
    plan: Plan
    partitioned: Partitioned
    optimized: Partitioned
    timeline: Timeline
    emitted: Emitted
    seconds: Mapping[str, float] = field(default_factory=dict)
    is_read: bool = False


def compile_module(request: Request, options: Options) -> Stages:
    """Runs all stages.

    Raises:
      SpmdError: whatever a stage cannot do, named with its op and source line.
    """
    clock = Stopwatch(options.verbose)
    with _no_garbage_collection():
        store = store_in(options.cache_dir, PLANNED)
        key = clock("keep", _key, request, options) if store else ""
        kept = clock("keep", store.get, key) if store and key else None
        imported = _front(request, clock)
        if kept is not None:
            trial = _replayed(kept, request, options, imported, clock)
        else:
            trial, stacks, is_written_out = _chosen(request, options, imported, clock)
            if store and key:
                record = _record(trial, stacks, is_written_out)
                clock("keep", lambda: store.put(key, record))
        platform, links, orders = request.platform, request.links, request.arg_orders
        args = trial.optimized, links, orders, platform, options.layouts
        laid_out = clock("layouts", lay_out, *args)
        emitted = _emit(laid_out, request.donated, clock)
        plan, parts, timeline = trial.plan, trial.partitioned, trial.timeline
        made = plan.program, plan.propagated, plan, parts, laid_out, timeline, emitted
        stages = Stages(*made, clock.seconds, kept is not None)
        if options.check:
            check_stages(stages)
    return stages


def _chosen(
    request: Request, options: Options, imported: Imported, clock: Stopwatch
) -> tuple[Trial, tuple[Stack, ...], bool]:
    """The fastest plan of the fastest form: what is stacked, and whether loops are written out."""

    def planned(program: Program, like: Plan | None = None) -> Trial:
        problem = _problem(request, imported, program, clock)
        return plan_problem(problem, options, request.donated, clock, like)

    limit = memory_for(request.topology, options.memory_limit)
    program = clock("unroll", unroll, imported.program, options.unroll or 0)
    plain = planned(program)
    search = Search(limit, [plain])
    found = clock("stack", stacks_of, plain.plan, plain.seconds * STACKED_GAIN)
    if found.stacks:
        made = clock("stack", stacked, plain.plan.program, found.stacks)
        search.weigh(stacked_form(plain, found, partial(planned, made)))
        program = program if search.best is plain else made
    whole, forms = search.best, search.weighed
    search = Search(limit, [whole])
    if options.unroll is None:
        for form in forms_written_out(whole, program, planned, request.platform):
            search.weigh(form)
    best = search.best
    best.plan = best.plan._replace(forms=(*forms, *search.weighed))
    return best, () if whole is plain else found.stacks, best is not whole


def _record(trial: Trial, stacks: tuple[Stack, ...], is_written_out: bool) -> bytes:
    """What was chosen, to be kept."""
    record = {
        "plan": recorded(trial.plan), "stacks": stacks, "is_written_out": is_written_out
    }  # fmt: skip
    return json.dumps(record).encode()


def _replayed(
    kept: bytes, request: Request, options: Options, imported: Imported, clock: Stopwatch
) -> Trial:
    """What an earlier start chose, brought down to one device.

    Planning finds the same in every process, so one that reads a plan and one that makes it agree.
    """
    record = json.loads(kept)
    program = clock("unroll", unroll, imported.program, options.unroll or 0)
    if record["stacks"]:
        program = _problem(request, imported, program, clock).program
        stacks = [Stack(*stack) for stack in record["stacks"]]
        program = clock("stack", stacked, program, stacks)
    if record["is_written_out"]:
        program = clock("unroll", unroll, program, MOST_TRIPS)
    problem = _problem(request, imported, program, clock)
    plan = clock("read", replayed, record["plan"], problem)
    return Trial(plan, options, request.donated, clock)


def _key(request: Request, options: Options) -> str:
    """The name of what is kept of a compilation: all that decides it. Empty: nothing is kept.

    Where ops come from decides nothing. What users' own rules and lowerings do no name can tell, so
    programs that have such ops are planned anew.
    """
    text, platform = module_text(request.module), request.platform
    if any(name in text for name in TAUGHT):
        return ""
    # Of options, all but those that only say how the compiler and XLA go about it.
    deciding = replace(
        options, topology=None, check=False, verbose=False, progress=False, cache_dir=None,
        compiler_options={},
    )  # fmt: skip
    return key_of(
        text,
        replace(request, module=None, function=None, callbacks=()),
        deciding,
        request.mesh.dcn_sizes,
        [(call.label, call.is_debug, call.has_effect) for call in request.callbacks],
        [name for name in sorted(whole_composites(platform)) if name in text],
        jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )


def propagated_of(request: Request) -> Propagated:
    """The stages in front of the plan alone."""
    with _no_garbage_collection():
        clock = Stopwatch()
        imported = _front(request, clock)
        return _problem(request, imported, unroll(imported.program, 0), clock).propagated


def _front(request: Request, clock: Stopwatch) -> Imported:
    """What a module says."""
    imported = clock("import", _import, request)
    canonical = clock("canonicalize", _canonical, imported.program)
    separated = clock("separate", separate, canonical)
    deduped = imported._replace(program=clock("dedupe", dedupe, separated))
    return clock("lift", lift_constants, deduped)


def _problem(request: Request, imported: Imported, program: Program, clock: Stopwatch) -> Problem:
    """What there is to plan, in a form of the program."""
    sunk = clock("sink", sink_invariants, program)
    problem = clock("propagate", _posed, request, imported, sunk)
    shifted = clock("shift", shift_heads, sunk, problem.propagated.proposals)
    return problem if shifted is sunk else clock("propagate", _posed, request, imported, shifted)


@_no_garbage_collection()
def plan_problem(
    problem: Problem,
    options: Options,
    donated: tuple[int, ...] = (),
    clock: Stopwatch | None = None,
    like: Plan | None = None,
) -> Trial:
    """Plans: what is proposed is partitioned, optimized and timed, and the fastest is taken.

    Args:
      problem: what is to be planned.
      options: the planner, the memory limit, and what rewrites do.
      donated: flat indices of the donated arguments.
      clock: times the stages.
      like: a plan of another form of the program, whose choices are taken over.

    Raises:
      PlanError: no plan was found that keeps to the memory limit.
    """
    clock = clock or Stopwatch()
    tried: list[Trial] = []

    def try_out(plan: Plan) -> Trial:
        same = [trial for trial in tried if trial.plan.states is plan.states]
        tried.append(Trial(plan, options, donated, clock, same[0] if same else None))
        return tried[-1]

    if options.planner == "greedy":
        return _timed(try_out(clock("plan", plan_greedily, problem)))
    limit, again = options.memory_limit, options.recompute
    return _timed(clock("plan", plan_exactly, problem, try_out, limit, again, like))


def timed(plan: Plan, options: Options) -> Plan:
    """A plan with the time that its program is predicted to take."""
    donated = tuple(plan.problem.links.values())
    return _timed(Trial(plan, options, donated, Stopwatch())).plan


def _timed(trial: Trial) -> Trial:
    trial.plan = trial.plan._replace(run_seconds=trial.seconds)
    return trial


def emit_plan(plan: Plan, options: Options) -> Emitted:
    """The stages behind a plan that is given."""
    clock = Stopwatch()
    return _emit(Trial(plan, options, (), clock).optimized, (), clock)


def _emit(optimized: Partitioned, donated: tuple[int, ...], clock: Stopwatch) -> Emitted:
    program = clock("expand", expand, optimized.program, optimized.mesh)
    return clock("emit", emit_local, optimized._replace(program=program), donated)


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
# Stages of several parts, and those that take more than the result of the one before.


def _canonical(program: Program) -> Program:
    return accumulate(unflatten(canonicalize(program)))


def _import(request: Request) -> Imported:
    platform = request.platform
    composites = {name: {PLATFORM: platform} for name in whole_composites(platform)}
    names, callbacks, mesh = request.arg_names, request.callbacks, request.mesh
    function = request.function
    imported = import_module(request.module, names, composites, function, callbacks, mesh)
    if request.result_names:
        program = imported.program._replace(result_names=request.result_names)
        imported = imported._replace(program=program)
    return imported


def _posed(request: Request, imported: Imported, program: Program) -> Problem:
    imported, body = imported._replace(program=program), program.body
    arg_entries = filled(request.arg_entries, len(body.args))
    result_entries = request.result_entries or (None,) * len(body.results)
    reasons = filled(request.arg_reasons, len(body.args))
    marks = collect_marks(imported, request.mesh, arg_entries, result_entries, reasons)
    results = _result_shardings(request, imported)
    return posed(program, request.mesh, marks, request.topology, results, request.links)


def filled(given: Sequence[T | None], count: int) -> tuple[T | None, ...]:
    """What was said of the user's arguments, and None for others: constants, or all of them."""
    return (*given, *[None] * (count - len(given)))


def _result_shardings(request: Request, imported: Imported) -> Sequence[Sharding | None]:
    """What each result must look like, where it is marked; a mark with open dims only wishes."""
    count = len(imported.program.body.results)
    entries = request.result_entries or (None,) * count
    marks = [result_mark(imported, request.mesh, entries, i) for i in range(count)]
    return [None if mark is None or any(mark.open) else Sharding(mark.dims) for mark in marks]
