"""Gathers what reports show of a program: its stages, figures of one run, and shardings."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd.compiler import Stages
from spmd.explain import words as w
from spmd.explain.costs import (
    MOST,
    Collective,
    Cost,
    code_of,
    collective_section,
    costs,
    traffic_table,
)
from spmd.explain.data import Inside, Leaf, Machine, PlanReport, PlanSlot, PlanTimeline
from spmd.explain.measured import Measured
from spmd.explain.memory import Memory, memory_curve, recomputed
from spmd.explain.prices import Prices, conflicts
from spmd.explain.steps import pipeline_rows, rings
from spmd.ir.dialect.host import hosted
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.measure.labels import label_of
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.planning.exact import TOGETHER
from spmd.planning.plan import Plan
from spmd.predict.backends import room_for
from spmd.predict.memory import MemoryUse
from spmd.predict.timeline import COMPUTE, Timeline, least_seconds

CLOSE = 5e-4  # relative difference of two times that a report does not show
MOST_VALUES = 12  # intermediate values that a report shows, the largest
MOST_STAGES = 4  # stages of the compiler that a report names, those that took longest

Leaves = tuple[Leaf, ...]


@dataclass(frozen=True)
class Facts:
    """Holds all that a report on a program is written from; what is None the report leaves out."""

    stages: Stages
    collectives: Sequence[Collective]  # what one run of the program exchanges
    use: MemoryUse  # the memory that one device is predicted to use
    name: str  # what the program is called
    title: str  # the same and, if known, its file: `train_step of train.py`
    compiled: Memory | None = None  # what XLA reports of memory, once it has compiled the program
    prices: Prices | None = None  # of decisions that the plan did not take
    measured: Measured | None = None  # what steps of it took

    @property
    def plan(self) -> Plan:
        """The plan that the report is about."""
        return self.stages.plan

    @cached_property
    def least_seconds(self) -> float:
        """Lower bound of a run's seconds for any plan: arithmetic split evenly, nothing sent."""
        # Rewrites do equal ops once, so a program may have less to do than was written.
        return min(
            least_seconds(self.plan.problem.index, self.plan.mesh, self.plan.topology),
            self.stages.timeline.seconds,
        )

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """What the run's time is spent on, by source line and kind, most seconds first."""
        return costs(self.stages.timeline, self.plan.mesh, self.plan.topology)

    @cached_property
    def inside(self) -> list[Inside]:
        """Op results, and resharded copies, by op, global type, sharding and source line."""
        plan, types = self.plan, self.plan.program.types
        found: Counter[tuple[str, TensorType, Sharding, str]] = Counter()
        copies: set[tuple[Value, Sharding]] = set()
        for op in plan.program.walk():
            for value in op.results:
                if (state := plan.states[value]) is not None:
                    found[op.label, types[value], state, op.loc.trail] += 1
            choice = plan.choices.get(op.results[0]) if op.results else None
            for value, wanted in zip(op.operands, choice.operands if choice else (), strict=False):
                is_copy = plan.states[value] not in (None, wanted)
                if is_copy and (value, wanted) not in copies:
                    copies.add((value, wanted))
                    found[f"copy for {op.label}", types[value], wanted, op.loc.trail] += 1
        return [
            Inside(op, type_, w.spec_text(s, plan.mesh), local_type(type_, s, plan.mesh), trail, n)
            for (op, type_, s, trail), n in found.items()
        ]

    @cached_property
    def leaves(self) -> tuple[Leaves, Leaves, Leaves]:
        """The leaves of arguments, of large constants, which may be split, and of results."""
        plan, types = self.plan, self.plan.program.types
        moved = hosted(plan.program)
        away = moved.arguments | moved.results
        every = tuple(
            Leaf(
                name,
                types[v],
                w.spec_text(s, plan.mesh) + (" on the host" if v in away else ""),
                s,
                local_type(types[v], s, plan.mesh),
                _origin(plan, v, s),
            )
            for _, name, v, s in boundary(plan)
        )
        taken = len(plan.arguments)
        own = taken - len(plan.program.constants)
        return every[:own], every[own:taken], every[taken:]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one run, in all collectives."""
        return sum(c.bytes * c.count for c in self.collectives)

    @property
    def time_text(self) -> str:
        """The predicted time, in words: `1.2 ms a run, bound by compute (...)`."""
        line = self.stages.timeline
        times = (line.seconds, line.compute_seconds, line.comm_seconds)
        seconds, compute, comm = map(w.seconds_text, times)
        bound = "communication" if line.comm_seconds > line.compute_seconds else "compute"
        return f"{seconds} a run, bound by {bound} (compute {compute}, collectives {comm})"

    @property
    def program(self) -> w.Section:
        """What the program is planned for, how good the plan is, and its predicted time."""
        plan, stages = self.plan, self.stages
        rows = [
            ("mesh", f"{plan.mesh} ({plan.mesh.size} devices)"),
            ("topology", str(plan.topology)),
            ("solver", proof_text(plan) + "; in an earlier start" * stages.is_read),
            ("predicted", self.time_text),
        ]
        if self.measured is not None:
            rows.append(("measured", self.measured.title))
        if bound := self.least_seconds:
            even = "arithmetic alone, split evenly over all devices"
            rows.append(("lower bound", f"{w.seconds_text(bound)}: {even}"))
        if most := sorted(stages.seconds.items(), key=lambda took: -took[1])[:MOST_STAGES]:
            said = ", ".join(f"{stage} {w.seconds_text(own)}" for stage, own in most)
            whole = w.seconds_text(sum(stages.seconds.values()))
            rows.append(("planned in", f"{whole}: {said}"))
        return w.Section("program", self.title, [w.Item("", "", rows)])

    def report(self) -> PlanReport:
        """Returns all that is shown of the program, as data."""
        plan, topology = self.plan, self.plan.topology
        line = self.stages.timeline
        machine = Machine(topology.name, topology.platform, topology.hbm_bytes)
        times = (*line[1:], line.scheduled_seconds)
        return PlanReport(
            self.name,
            self.title,
            plan.mesh,
            machine,
            proof_text(plan),
            PlanTimeline(*times, tuple(plan_slots(line, plan.mesh))),
            self.least_seconds,
            self.use.peak,
            room_for(self.use.peak, topology),
            self.sent_bytes,
            self.measured.seconds if self.measured is not None else None,
            *self.leaves,
            tuple(self.inside),
            tuple(self.collectives),
            self.costs,
            code_of(self.costs[:MOST]),
            self.memory,
            memory_curve(self.use, self.stages.optimized.program),
            tuple(pipeline_rows(self.stages)),
            self.sections(),
        )

    def sections(self) -> tuple[w.Section, ...]:
        """Returns all parts of the report but the largest costs, in order."""
        plan, notes = self.plan, Counter(map(w.source_text, self.plan.notes))
        times = {text: f" ({n} times)" * (n > 1) for text, n in notes.items()}
        inside = [
            (local.bytes, count, w.type_text(type_), spec, w.type_text(local), op, source)
            for op, type_, spec, local, source, count in self.inside
        ]
        heads = ("per device", "n", "type", "sharding", "local", "op", "source")
        largest = w.Table(heads, inside).by("per device")
        arguments, constants, results = self.leaves
        ends = {"arguments": arguments, "results": results}
        ends |= {"constants": constants} if constants else {}
        return (
            self.program,
            *(self.measured.sections() if self.measured is not None else ()),
            *(
                w.Section(what, split_text(leaves), _leaf_table(leaves), "none")
                for what, leaves in ends.items()
            ),
            w.Section("largest values inside", "", largest.first(MOST_VALUES)),
            collective_section(self.collectives),
            w.Section("totals by kind and axes", "", traffic_table(self.collectives)),
            *([self.prices.marks] if self.prices is not None else []),
            conflicts(self.stages, self.prices),
            rings(plan),
            recomputed(self.stages),
            w.Section("pipelines", "", [row.item for row in pipeline_rows(self.stages)]),
            w.Section("forms", "", [w.Item(form.text) for form in plan.forms]),
            w.Section("notes", "", [w.Item(text + n) for text, n in times.items()]),
            w.Section("memory per device", "", [w.Item("", "", self.memory)]),
        )

    @property
    def memory(self) -> tuple[tuple[str, str], ...]:
        """Rows (what for, bytes as text) of a device: as predicted, and XLA's peak if compiled."""
        use, (arguments, constants, results) = self.use, self.leaves
        limit = w.bytes_text(self.plan.topology.hbm_bytes)
        room: str = room_for(use.peak, self.plan.topology)
        if self.compiled is not None and self.compiled.peak_bytes:
            room += f"; XLA allocates {w.bytes_text(self.compiled.peak_bytes)}"
        rows = [
            ("arguments", _against(arguments)),
            ("results", _against(results)),
            ("results in donated arguments", w.bytes_text(use.aliased)),
            ("temporary", w.bytes_text(use.temporary)),
            ("peak, predicted", f"{w.bytes_text(use.peak)} of {limit}"),
            ("on the device", room),
        ]
        if use.constants:
            rows.insert(2, ("constants", _against(constants, use.constants)))
        return tuple(rows)


def plan_slots(timeline: Timeline, mesh: Mesh) -> Iterator[PlanSlot]:
    """Yields the slots of a timeline as data."""
    for slot in timeline.slots:
        op, label = slot.op, label_of(slot.op, mesh)
        yield PlanSlot(
            slot.lane,
            slot.kind,
            op.label if slot.lane == COMPUTE else f"{slot.kind} over {slot.lane}",
            op.loc.trail,
            slot.start,
            slot.seconds,
            slot.depth,
            slot.trips,
            slot.runs,
            ("loop" if op.is_loop else "conditional") if op.regions else "",
            label.layer,
            label.kind,
            op.loc.note if op.collective else "",
        )


def proof_text(plan: Plan) -> str:
    """Names a plan's solver and, unless greedy, how far its costs may be above the least sum."""
    if plan.solver == "greedy":
        return plan.solver
    axes = sum(map(bool, plan.mesh.axis_atoms.values()))
    over = "every placement" + (" of two axes at a time" if axes > TOGETHER else "")
    if plan.like_loops:
        over = "what the marks suggest and the plan of its loops took"
    if plan.gap < CLOSE:
        return f"{plan.solver}: of {over} none has a smaller sum of costs"
    return f"{plan.solver}: its sum of costs is at most {plan.gap:.1%} above the least of {over}"


def _against(leaves: Sequence[Leaf], held: int | None = None) -> str:
    """Returns `2 MiB (unpartitioned 8 MiB, 4x less)`: bytes per device, and of whole leaves.

    `held`, if given, is the bytes a device holds: pieces of `leaves`, and more that is not split.
    """
    pieces = sum(leaf.local.bytes for leaf in leaves)
    part = pieces if held is None else held
    whole = sum(leaf.type.bytes for leaf in leaves) + part - pieces
    ratio = f", {whole / part:.3g}x less" if 0 < part < whole else ""
    return f"{w.bytes_text(part)} (unpartitioned {w.bytes_text(whole)}{ratio})"


# How arguments, results and intermediate values are sharded and why, equal ones together.


def boundary(plan: Plan) -> list[tuple[str, str, Value, Sharding]]:
    """Returns (`argument` or `result`, name, value, sharding): arguments, constants, results."""
    program = plan.program
    arguments = zip(program.arg_names, program.body.args, plan.arguments, strict=True)
    results = zip(program.result_names, program.body.results, plan.results, strict=True)
    return [*(("argument", *end) for end in arguments), *(("result", *end) for end in results)]


def _origin(plan: Plan, value: Value, sharding: Sharding) -> str:
    if not sharding.dims:
        return "-"
    if (mark := plan.propagated.marks.get(value)) is not None:
        return mark.reason if mark.reason.startswith("like ") else "marked"
    places = [(dim, atom) for dim, axes in enumerate(sharding.dims) for atom in axes]
    chains = [plan.propagated.why(value, dim, atom) for dim, atom in places]
    causes = [
        f"from {w.source_text(chain[-1].removeprefix('like '))}"
        if chain
        else "the planner's choice"
        for chain in chains
    ]
    return "; ".join(dict.fromkeys(causes)) or "no mark reaches it"


def split_text(leaves: Sequence[Leaf]) -> str:
    """Says how many leaves there are, and how many of them are split: `8, 6 of them split`."""
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def _leaf_table(leaves: Sequence[Leaf]) -> w.Table:
    rows = []
    for group in group_leaves(leaves):
        leaf, name = group[0], pattern(leaf.name for leaf in group)
        types = w.type_text(leaf.type), leaf.spec, w.type_text(leaf.local)
        held = sum(leaf.local.bytes for leaf in group)
        rows.append((name, len(group), *types, held, pattern(leaf.origin for leaf in group)))
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    return w.Table(heads, rows, search="a name or a sharding" if len(rows) > 6 else "")


def _look(leaf: Leaf) -> object:
    is_mark_or_nothing = leaf.origin in ("-", "marked", "no mark reaches it")
    return leaf.type, leaf.sharding, leaf.origin if is_mark_or_nothing else "inferred"


def group_leaves(
    leaves: Iterable[Leaf], look_of: Callable[[Leaf], object] = _look
) -> list[list[Leaf]]:
    """Groups leaves for which `look_of` is equal and names are similar, in order of the first.

    Leaves whose names differ only in numbers are a group. They are one with others whose names have
    as many parts between `/`, and the same first and last ones, if all together are every
    combination of these parts: `opt/{mu,nu}/*/w`.
    """

    def key_of(leaf: Leaf) -> tuple[object, ...]:
        parts = re.sub(r"\d+", "*", leaf.name).split("/")
        return look_of(leaf), len(parts), parts[0], parts[-1]

    groups: list[list[Leaf]] = []
    for alike in w.grouped(leaves, key_of).values():
        alternatives = zip(*(leaf.name.split("/") for leaf in alike), strict=True)
        if len(alike) == math.prod(len(set(parts)) for parts in alternatives):
            groups.append(alike)
        else:
            groups += w.grouped(alike, lambda leaf: re.sub(r"\d+", "*", leaf.name)).values()
    return groups


def pattern(names: Iterable[str]) -> str:
    """Returns one pattern: `a/0`, `a/1` -> `a/*`; `x/w`, `y/w` -> `{x,y}/w`; or `x and 2 more`."""
    given = list(dict.fromkeys(names))
    split = [re.split(r"(/|\d+| )", name) for name in given]
    if len({len(parts) for parts in split}) > 1:
        return f"{given[0]} and {len(given) - 1} more"

    def common(parts: Sequence[str]) -> str:
        if len(parts) == 1:
            return parts[0]
        is_any = len(parts) > 3 or all(part.isdigit() for part in parts)
        return "*" if is_any else "{" + ",".join(parts) + "}"

    return "".join(common(list(dict.fromkeys(parts))) for parts in zip(*split, strict=True))
