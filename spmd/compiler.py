"""Compiles a module to one device's program: all stages in order, each of them timed.

    import -> canonicalize -> separate -> dedupe -> lift -> unroll -> sink -> propagate -> shift
    plan -> partition -> optimize -> time -> memory -> stack -> layouts -> expand -> emit

The planner proposes a few plans. Each is partitioned, optimized and timed (`Trial`), and the
fastest is kept. The compiler then tries other *forms* of the program, which compute the same:

    stacked       equal ops are one op with a new dim to split (`spmd.planning.stacks`)
    written out   loops of few trips are written out, so that trips overlap (`spmd.frontend.unroll`)

A form must save at least some seconds of each run, to pay for what predictions leave out: time to
compile it, more kernels. The plan records which forms were compared, and reports show it.
"""

import copy
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.module import Imported, import_module, module_text, signature
from spmd.frontend.lanes import Stack, described, stacked
from spmd.frontend.marks import Entries, collect_marks, result_mark
from spmd.frontend.normalize import accumulate, lift_constants, separate, start_neutral, unflatten
from spmd.frontend.shift import shift_heads
from spmd.frontend.unroll import unroll
from spmd.ir.dialect.composites import PLATFORM, whole_composites
from spmd.ir.dialect.host import with_moves
from spmd.ir.dialect.registry import TAUGHT
from spmd.ir.legality import check_program
from spmd.ir.program import Callback, Program
from spmd.ir.rewrite import dedupe
from spmd.ir.types import Order, local_type
from spmd.launch.agree import Texts, check_same_program, digest, made_by_first
from spmd.lowering.emit import Emitted, emit_local
from spmd.lowering.expand import expand
from spmd.lowering.layouts import lay_out
from spmd.lowering.partition import Partitioned, partition
from spmd.lowering.recompute import recompute
from spmd.lowering.rewrites.arrivals import in_turn
from spmd.lowering.rewrites.ring import ring
from spmd.lowering.rewrites.schedule import Room, schedule
from spmd.lowering.rewrites.simplify import simplify
from spmd.lowering.rewrites.slices import slice_collectives
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import processes_of
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.planning.exact import RUNS, plan_exactly
from spmd.planning.greedy import plan_greedily
from spmd.planning.plan import Plan, recorded, replayed
from spmd.planning.problem import Problem, posed
from spmd.planning.search import Candidate, Search
from spmd.planning.stacks import stacks_of
from spmd.predict.backends import backend_of, memory_for
from spmd.predict.memory import MemoryUse, peak_memory
from spmd.predict.timeline import Timeline, predict_timeline
from spmd.progress import Stopwatch
from spmd.propagation.propagate import Propagated
from spmd.propagation.sink import sink_invariants
from spmd.store import key_of, store_in

T = TypeVar("T")

PLANNED = "planned"  # the store's name for the records of compilations: form and plan

MOST_TRIPS = 64  # loops that run more often stay loops, if nobody says otherwise

WRITTEN_OUT_GAIN, MOST_GAIN = 0.02, 0.2
"""Shares of a run's predicted time: the least that writing out loops must save, and the most that
it is expected to save. Where it must save more (to pay for compiling), it is not tried."""

STACKED_GAIN = 0.05
"""Share of a run's predicted time that stacking equal ops must save, since it may need copies which
predictions leave out."""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collector off inside: its search for cycles takes long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Request:
    """Holds what is to be compiled: a module, its mesh and topology, arguments and results.

    What decides the plan is in its repr, of which the store's keys are made.
    """

    module: Any = field(repr=False)  # a StableHLO module in memory
    mesh: Mesh
    topology: Topology  # the machine to plan for
    arg_names: tuple[str, ...] = ()  # paths in the user's pytrees
    result_names: tuple[str, ...] = ()
    arg_entries: tuple[Entries | None, ...] = ()  # spelled-out specs; None for what is open
    result_entries: tuple[Entries | None, ...] = ()
    # why each argument has the spec that it has, where the user did not give it
    arg_reasons: tuple[str | None, ...] = ()
    links: tuple[tuple[int, int], ...] = ()  # (result, argument) of donated ones and their updates
    donated: tuple[int, ...] = ()  # flat indices of all donated arguments
    # arg_hosts, result_hosts: flat indices of those that lie in the host's memory
    arg_hosts: tuple[int, ...] = ()
    result_hosts: tuple[int, ...] = ()
    arg_orders: tuple[Order | None, ...] = ()  # of dims in memory, where not major to minor
    platform: str = ""  # `cpu`, `cuda` or `tpu`: composites get its kernels
    function: tuple[str, str] | None = field(default=None, repr=False)  # its file, qualified name
    # the Python functions that the module calls, by number
    callbacks: tuple[Callback, ...] = field(default=(), repr=False)
    name: str = field(default="", repr=False)
    # args, out: pytrees of `ShapeDtypeStruct`s of ((positional, ...), {name: ...}), static
    # arguments left out, and of the result
    args: Any = field(default=None, repr=False)
    out: Any = field(default=None, repr=False)
    # jax's types of the mesh's axes, where they are not all Auto
    axis_types: tuple[Any, ...] | None = field(default=None, repr=False)
    # for each flat result its spec as the user or jax's types have it, or None; they may name axes
    # of size 1, which split nothing. None are known if empty
    out_specs: tuple[PartitionSpec | None, ...] = field(default=(), repr=False)
    # the `jax.Ref`s that the function closes over: arguments behind those of the caller
    closed_refs: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Stages:
    """Holds the results of a compilation's stages, and how many seconds each stage took."""

    program: Program  # the whole one, imported, canonicalized, separated, unrolled and sunk
    propagated: Propagated
    plan: Plan
    partitioned: Partitioned  # the local program
    optimized: Partitioned  # after its rewrites, and how its arguments lie in memory
    timeline: Timeline  # its predicted schedule
    emitted: Emitted  # as text, to be compiled
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each stage, in order
    is_read: bool = False  # whether the plan was kept by an earlier start


class Trial:
    """Holds a plan's program for one device, optimized, with its predicted time and memory."""

    def __init__(
        self, plan: Plan, options: Options, donated: tuple[int, ...], clock: Stopwatch,
        unpriced: "Trial | None" = None,
    ) -> None:  # fmt: skip
        if plan.byte_price and unpriced is None:
            unpriced = Trial(plan._replace(byte_price=0.0), options, donated, clock)
        memory = memory_for(plan.topology, options.memory_limit)
        self._room = Room(memory, tuple(plan.problem.links.values()))
        self._options, self._donated, self.clock = options, donated, clock
        self._unpriced, self.plan = unpriced or self, plan
        self.partitioned: Partitioned = (
            unpriced.partitioned if unpriced else clock("partition", partition, plan)
        )
        if unpriced is None:
            local, platform = self.partitioned.program, plan.topology.platform
            simple = clock("optimize", simplify, local, platform)
            sliced = clock("optimize", slice_collectives, simple, plan.mesh)
            # What comes before remat and scheduling.
            self._simple = self._schedule(sliced, *([] if sliced is simple else [simple]))
        else:
            self._simple = simple = unpriced._simple
            args = plan.mesh, plan.topology, plan.byte_price, memory, donated
            # Links are shared by all devices: what fits as it is sends no more than it has to.
            program, again = clock("recompute", lambda: recompute(simple, *args, self.is_short))
            self.plan = plan._replace(recomputed=again)
            if again:
                self._schedule(program)
            else:  # the same program, which was scheduled and timed before
                own = ("optimized", "timeline", "memory")
                vars(self).update((k, v) for k, v in vars(unpriced).items() if k in own)
        self.plan = self.plan._replace(run_seconds=self.seconds)

    @property
    def is_short(self) -> bool:
        """Returns whether the program without remat needs more memory than a device may use."""
        return self._unpriced.bytes > self._room.bytes

    def _schedule(self, first: Program, *others: Program) -> Program:
        """Sets `optimized` to the fastest of the programs, scheduled; returns it unscheduled.

        One that does not fit in memory is no choice if it takes more than those before it. The
        reduce-scatters in `optimized` are sent round as permutes if that is faster still.
        """
        mesh, topology, room = self.plan.mesh, self.plan.topology, self._room
        most, ahead = self._options.combine_bytes, self._options.prefetch

        def take(program: Program) -> None:
            args = program, mesh, topology, most, ahead, room
            scheduled = self.clock("optimize", schedule, *args)
            self.optimized = self.partitioned._replace(program=scheduled)
            for name in ("timeline", "memory"):
                vars(self).pop(name, None)

        def is_better(program: Program) -> bool:
            whole = copy.copy(self)
            take(program)
            if self.seconds < whole.seconds and self.bytes <= max(whole.bytes, room.bytes):
                return True
            vars(self).update(vars(whole))
            return False

        take(first)
        chosen = first
        for other in others:
            chosen = other if is_better(other) else chosen
        travelling = self.clock("optimize", ring, chosen, mesh, topology)
        if travelling is not chosen:
            is_better(travelling)
        return chosen

    @cached_property
    def timeline(self) -> Timeline:
        """Returns the predicted schedule of one run."""
        plan, program = self.plan, self.optimized.program
        return self.clock("time", predict_timeline, program, plan.mesh, plan.topology)

    @property
    def seconds(self) -> float:
        """Returns the predicted seconds of a run, with collectives overlapping other arithmetic."""
        return self.timeline.seconds

    @cached_property
    def memory(self) -> MemoryUse:
        """Returns the predicted memory of one device."""
        program, platform = self.optimized.program, self.plan.topology.platform
        return self.clock("memory", peak_memory, program, self._donated, platform)

    @property
    def bytes(self) -> int:
        """Returns the predicted peak memory of one device in bytes."""
        return self.memory.peak


@_no_garbage_collection()
def compile_module(request: Request, options: Options, together: str = "") -> Stages:
    """Runs all stages; `SpmdError` says what one cannot do, with the op and its source line.

    `together` names the program if all processes of its mesh compile it now: they compare it, and
    the first one plans it for all.
    """
    clock = Stopwatch(options.verbose)
    processes = processes_of(request.mesh) if together else []
    is_shared = len(processes) > 1
    if is_shared:
        _check_same_request(request, options, together, processes)
    store = store_in(options.cache_dir, PLANNED)
    key = clock("keep", _key, request, options) if store else ""
    store = store if key else None
    imported = _front(request, clock)
    planned: list[Trial] = []

    def record() -> str:
        """Returns `kept <plan as JSON>` if an earlier start has it, else `made <JSON or empty>`."""
        kept = clock("keep", store.get, key) if store else None
        if kept is not None:
            return f"kept {kept.decode()}"
        trial, *form = _chosen(request, options, imported, clock)
        planned.append(trial)
        return f"made {json.dumps([recorded(trial.plan), *form]) if is_shared or store else ''}"

    label = f"planning {together}"
    told = made_by_first(record, label=label, processes=processes) if is_shared else record()
    how, _, text = told.partition(" ")
    if store and how == "made":
        clock("keep", store.put, key, text.encode())
    trial = planned[0] if planned else _replayed(text, request, options, imported, clock)
    orders, platform = request.arg_orders, request.platform
    args = trial.optimized, request.links, orders, platform, options.layouts
    laid_out = clock("layouts", lay_out, *args)
    emitted = _emit(laid_out, request.donated, platform, clock)
    plan, parts = trial.plan, trial.partitioned
    if options.check:
        body, types = plan.program.body, plan.program.types
        check_program(plan.program)
        for stage, local in (("local", parts), ("optimized", laid_out)):
            ends = (body.args, local.arguments), (body.results, local.results)
            pairs = [zip(values, shardings, strict=True) for values, shardings in ends]
            pieces = [[local_type(types[v], s, local.mesh) for v, s in end] for end in pairs]
            check_program(local.program, stage, pieces)
    made = plan.program, plan.propagated, plan, parts, laid_out, trial.timeline, emitted
    return Stages(*made, clock.seconds, how == "kept")


def _check_same_request(
    request: Request, options: Options, together: str, processes: Sequence[int]
) -> None:
    """Raises LaunchError unless all `processes` compile the same program; else they would hang."""
    module, types = request.module, signature(request.module)[0]
    arguments = zip_longest(request.arg_names, types, request.arg_entries, request.arg_orders)
    results = zip_longest(request.result_names, request.result_entries)
    lines = [f"argument {' '.join(map(str, each))}" for each in arguments]
    lines += [f"result {name} {entries}" for name, entries in results]
    marks = "\n".join([*lines, f"donated {request.donated}, {request.topology.name}"])
    texts: Texts = {
        "arguments, results and their marks": (digest(marks), lambda: marks),
        "the program": (
            digest(module_text(module)),
            partial(module_text, module, has_locations=True),
        ),
    }
    own = {f"option {name}": str(value) for name, value in vars(_deciding(options)).items()}
    check_same_program(f"compiling {together}", texts, request.mesh, processes, own)


def _chosen(
    request: Request, options: Options, imported: Imported, clock: Stopwatch
) -> tuple[Trial, tuple[Stack, ...], bool]:
    """Plans the program as it is, with equal ops stacked, and with loops written out.

    Returns the fastest of these, its stacks, and whether its loops are written out.
    """

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
        names = ", ".join(described(plain.plan.program, stack) for stack in found.stacks)
        price, make = plain.seconds * STACKED_GAIN, partial(planned, made)
        search.weigh(Candidate(f"stacked: {names}", make, price, found.seconds))
        program = program if search.best is plain else made
    whole, forms = search.best, search.weighed
    search = Search(limit, [whole])
    if options.unroll is None and (form := _written_out(whole, program, planned, request.platform)):
        search.weigh(form)
    best = search.best
    best.plan = best.plan._replace(forms=(*forms, *search.weighed))
    return best, () if whole is plain else found.stacks, best is not whole


def _written_out(
    trial: Trial, program: Program, planned: Callable[[Program, Plan], Trial], platform: str
) -> Candidate[Trial] | None:
    """Returns the program with loops written out as a candidate; None if it cannot pay off.

    Each copy of an op may choose what the plan of `trial` chose for the op, or what marks suggest.
    """
    backend, hope = backend_of(platform), trial.seconds * MOST_GAIN
    if not backend.waits_at_loops or hope * RUNS < backend.compile_seconds:
        return None
    written = trial.clock("unroll", unroll, program, MOST_TRIPS)
    if written is program:
        return None
    more = sum(1 for _ in written.walk()) - sum(1 for _ in program.walk())
    price = max(more * backend.compile_seconds / RUNS, trial.seconds * WRITTEN_OUT_GAIN)
    # Trips that overlap take more memory, and where there is none a plan is long looked for.
    make = None if trial.is_short else partial(planned, written, trial.plan)
    return Candidate(f"loops of at most {MOST_TRIPS} trips written out", make, price, hope)


def _replayed(
    kept: str, request: Request, options: Options, imported: Imported, clock: Stopwatch
) -> Trial:
    """Returns the Trial of a plan, JSON here, that an earlier start or the first process made."""
    plan, stacks, is_written_out = json.loads(kept)
    program = clock("unroll", unroll, imported.program, options.unroll or 0)
    if stacks:
        program = _problem(request, imported, program, clock).program
        program = clock("stack", stacked, program, stacks)
    if is_written_out:
        program = clock("unroll", unroll, program, MOST_TRIPS)
    problem = _problem(request, imported, program, clock)
    return Trial(clock("read", replayed, plan, problem), options, request.donated, clock)


def _key(request: Request, options: Options) -> str:
    """Returns a compilation's cache key, a hash of all that its plan depends on; "" if not stored.

    Source lines are left out. A program with ops whose rules or lowerings users wrote is not
    stored, since a key cannot tell what these do.
    """
    text, platform = module_text(request.module), request.platform
    if any(name in text for name in TAUGHT):
        return ""
    return key_of(
        text,
        request,
        _deciding(options),
        request.mesh.dcn_sizes,
        [(call.label, call.is_debug, call.has_effect) for call in request.callbacks],
        [name for name in sorted(whole_composites(platform)) if name in text],
        jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )


def _deciding(options: Options) -> Options:
    """Returns options, with defaults for those that do not decide the plan and for the topology."""
    return replace(
        options, topology=None, check=False, verbose=False, progress=False, cache_dir=None,
        compiler_options={},
    )  # fmt: skip


@_no_garbage_collection()
def problem_for(request: Request) -> Problem:
    """Runs the stages before planning, and returns the problem that the planner is given."""
    imported = _front(request, clock := Stopwatch())
    return _problem(request, imported, unroll(imported.program, 0), clock)


def _front(request: Request, clock: Stopwatch) -> Imported:
    """Runs the stages from `import` to `lift`; returns the program and the module's marks."""
    platform, names, callbacks = request.platform, request.arg_names, request.callbacks
    composites = {name: {PLATFORM: platform} for name in whole_composites(platform)}
    told = names, composites, request.function, callbacks, request.mesh
    imported = clock("import", import_module, request.module, *told)
    if request.result_names:
        named = imported.program._replace(result_names=request.result_names)
        imported = imported._replace(program=named)
    moved = with_moves(imported.program, request.arg_hosts, request.result_hosts)
    canonical = clock("canonicalize", lambda: accumulate(unflatten(canonicalize(moved))))
    separated = clock("separate", lambda: start_neutral(separate(canonical)))
    deduped = imported._replace(program=clock("dedupe", dedupe, separated))
    return clock("lift", lift_constants, deduped)


def _problem(request: Request, imported: Imported, program: Program, clock: Stopwatch) -> Problem:
    """Runs stages `sink`, `propagate`, `shift` on `program`; returns the problem of planning it."""
    mesh = request.mesh

    def pose(program: Program) -> Problem:
        form, body = imported._replace(program=program), program.body
        arg_entries, reasons = (  # lifted constants are behind the user's arguments
            (*given, *[None] * (len(body.args) - len(given)))
            for given in (request.arg_entries, request.arg_reasons)
        )
        entries = request.result_entries or (None,) * len(body.results)
        marks = collect_marks(form, mesh, arg_entries, entries, reasons)
        # What each result must look like, where it is marked; a mark with open dims only wishes.
        told = [result_mark(form, mesh, entries, i) for i in range(len(body.results))]
        results = [None if m is None or any(m.open) else Sharding(m.dims) for m in told]
        return posed(program, mesh, marks, request.topology, results, request.links)

    sunk = clock("sink", sink_invariants, program)
    problem = clock("propagate", pose, sunk)
    shifted = clock("shift", shift_heads, sunk, problem.propagated.proposals)
    return problem if shifted is sunk else clock("propagate", pose, shifted)


@_no_garbage_collection()
def plan_problem(
    problem: Problem,
    options: Options,
    donated: tuple[int, ...] = (),
    clock: Stopwatch | None = None,
    like: Plan | None = None,
) -> Trial:
    """Partitions, optimizes and times the plans that the planner proposes; returns the fastest.

    With `like`, a plan of the same program with loops, ops choose only what it chose or what marks
    suggest. PlanError: no plan was found that keeps to the memory limit.
    """
    clock = clock or Stopwatch()
    tried: list[Trial] = []

    def try_out(plan: Plan) -> Trial:
        same = [trial for trial in tried if trial.plan.states is plan.states]
        tried.append(Trial(plan, options, donated, clock, same[0] if same else None))
        return tried[-1]

    if options.planner == "greedy":
        return try_out(clock("plan", plan_greedily, problem))
    limit, again = options.memory_limit, options.recompute
    return clock("plan", plan_exactly, problem, try_out, limit, again, like)


def timed(plan: Plan, options: Options) -> Plan:
    """Returns a plan with `run_seconds` set to the predicted time of one run of its program."""
    return Trial(plan, options, tuple(plan.problem.links.values()), Stopwatch()).plan


def emit_plan(plan: Plan, options: Options) -> Emitted:
    """Returns a plan's program for one device as StableHLO: partitioned, optimized, emitted."""
    clock = Stopwatch()
    return _emit(Trial(plan, options, (), clock).optimized, (), plan.topology.platform, clock)


def _emit(
    optimized: Partitioned, donated: tuple[int, ...], platform: str | None, clock: Stopwatch
) -> Emitted:
    program = clock("expand", expand, optimized.program, optimized.mesh)
    if platform == "cuda":  # compilers for TPUs put moves where they belong
        program = clock("expand", in_turn, program)
    return clock("emit", emit_local, optimized._replace(program=program), donated)
