"""The tables behind the reports: every row is computed here, text and HTML only lay them out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from spmd.explain.collectives import Collective
from spmd.explain.memory import Memory
from spmd.explain.prices import MOST_CONFLICTS, Prices
from spmd.ir.program import Op, Program, Value, numberless
from spmd.ir.types import TensorType
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, axis_refs, local_shape
from spmd.planning.alternatives import Price
from spmd.planning.plan import Plan
from spmd.planning.timeline import Timeline, predict_timeline
from spmd.propagation.propagate import Conflict, Propagated

NO_AXIS = "no axis"

CLOSE = 1e-6
"""Relative gap between a plan and its lower bound at which people call it the best."""


class Stages(Protocol):
    """What a report reads of the pipeline's results."""

    @property
    def propagated(self) -> Propagated:
        """The program with its proposals."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def optimized(self) -> Partitioned:
        """The local program."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each stage took, seconds."""


# ---------------------------------------------------------------------------------------------
# Shardings and sizes as text.


def spec_text(sharding: Sharding, mesh: Mesh) -> str:
    """A sharding as `mark_sharding` takes it: `("data", None)`; or `replicated`, or `scalar`."""
    if not any(sharding.dims):
        text = "replicated" if sharding.dims else "scalar"
    else:
        entries = ", ".join(_entry_text(axes, mesh) for axes in sharding.dims)
        text = f"({entries},)" if len(sharding.dims) == 1 else f"({entries})"
    if sharding.partial:
        text += f" partial {sharding.kind} over {axes_text(sharding.partial, mesh)}"
    return text


def _entry_text(axes: Axes, mesh: Mesh) -> str:
    names = [f'"{ref}"' for ref in axis_refs(axes, mesh)]
    return "None" if not names else names[0] if len(names) == 1 else f"({', '.join(names)})"


def axes_text(axes: Axes, mesh: Mesh) -> str:
    """`data, model`."""
    return ", ".join(str(ref) for ref in axis_refs(axes, mesh))


def bytes_text(count: float) -> str:
    """`1.5 KiB`: three digits or so, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """`1.25 ms`: three digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def price_text(seconds: float, count: int) -> str:
    """A difference: `1.2 ms more, 30 MiB more sent`, `1.2 ms less, but 3 MiB more sent`."""
    time, sent = seconds_text(abs(seconds)), bytes_text(abs(count))
    if abs(seconds) < 1e-9:
        return f"the same time, {sent} {_more(count)} sent" if count else "costs the same"
    if not count:
        return f"{time} {_more(seconds)}, the same bytes sent"
    if (seconds > 0) == (count > 0):
        return f"{time} {_more(seconds)}, {sent} {_more(count)} sent"
    return f"{time} {_more(seconds)}, but {sent} {_more(count)} sent"


def arguments_text(count: int) -> str:
    """A difference in what each device holds of the arguments."""
    return f"arguments take {bytes_text(abs(count))} {_more(count)} per device"


def _more(difference: float) -> str:
    return "more" if difference > 0 else "less"


def type_text(type_: TensorType) -> str:
    """`f32[8,128]`."""
    return f"{type_.dtype}[{','.join(map(str, type_.shape))}]"


def source_text(text: str) -> str:
    """Shortens every source line in a text: `llama/model.py:12 (forward)`.

    Of a path its last two parts stay, of a function's qualified name what is behind `<locals>`.
    """
    text = re.sub(r"[^\s(]*/([^/\s(]+/[^/\s(]+:\d+)", r"\1", text)
    return re.sub(r"\([^\s()]*<locals>\.([^\s()]+)\)", r"(\1)", text)


def local_type(type_: TensorType, sharding: Sharding, mesh: Mesh) -> TensorType:
    """The type of one device's piece."""
    return type_.with_shape(local_shape(type_.shape, sharding, mesh))


# ---------------------------------------------------------------------------------------------
# Arguments and results.


class Leaf(NamedTuple):
    """One argument or result.

    Attributes:
      name: its path in the user's pytree.
      type: its whole type.
      sharding: how it lies on the mesh.
      local: the type of one device's piece.
      origin: `marked`, or the mark that its sharding comes from, or why it has none.
    """

    name: str
    type: TensorType
    sharding: Sharding
    local: TensorType
    origin: str


class Group(NamedTuple):
    """Leaves of one type and sharding whose names differ in numbers, or in one part.

    Attributes:
      pattern: their common name, `layers/*/{mu,nu}/weight`.
      leaves: at least one; all alike but for name and origin.
      origin: the leaves' origins, abbreviated the same way.
    """

    pattern: str
    leaves: tuple[Leaf, ...]
    origin: str

    @property
    def bytes(self) -> int:
        """Bytes per device of all leaves together."""
        return sum(leaf.local.bytes for leaf in self.leaves)


def argument_leaves(stages: Stages) -> tuple[Leaf, ...]:
    """Every argument, in order."""
    program = stages.plan.program
    return _leaves(stages, program.arg_names, program.body.args, stages.plan.arguments)


def result_leaves(stages: Stages) -> tuple[Leaf, ...]:
    """Every result, in order."""
    program = stages.plan.program
    return _leaves(stages, program.result_names, program.body.results, stages.plan.results)


def _leaves(
    stages: Stages, names: Sequence[str], values: Sequence[Value], shardings: Sequence[Sharding]
) -> tuple[Leaf, ...]:
    types, mesh = stages.plan.program.types, stages.plan.mesh
    return tuple(
        Leaf(name, types[v], s, local_type(types[v], s, mesh), _origin(stages.propagated, v, s))
        for name, v, s in zip(names, values, shardings, strict=True)
    )


def _origin(propagated: Propagated, value: Value, sharding: Sharding) -> str:
    if not sharding.dims:
        return "-"
    if value in propagated.marks:
        reason = propagated.marks[value].reason
        return reason if reason.startswith("like ") else "marked"
    causes: dict[str, None] = {}
    for dim, axes in enumerate(sharding.dims):
        for atom in axes:
            chain = propagated.why(value, dim, atom)
            causes[f"from {source_text(chain[-1])}" if chain else "the cheapest"] = None
    return "; ".join(causes) or "no mark reaches it"


def group_leaves(leaves: Iterable[Leaf]) -> tuple[Group, ...]:
    """Collapses leaves of equal type and sharding whose names are alike, in order of the first.

    Names that differ only in numbers go together, then groups whose names differ in one part, as
    long as the result holds every combination: `{mu,nu}/{w,b}` stands for four leaves.
    """
    boxes: dict[object, _Box] = {}
    for leaf in leaves:
        parts = tuple(frozenset((part,)) for part in re.sub(r"\d+", "*", leaf.name).split("/"))
        look = (leaf.type, leaf.sharding, _kind_of(leaf.origin))
        box = boxes.setdefault((parts, look), _Box(parts, look, []))
        box.leaves.append(leaf)
    merged: list[_Box] = []
    for box in boxes.values():
        place = len(merged)
        while (i := next((i for i, b in enumerate(merged) if b.differs_in_one_part(box)), -1)) >= 0:
            box = merged.pop(i).union(box)
            place = min(place, i)
        merged.insert(place, box)
    return tuple(
        Group(pattern(m.name for m in members), tuple(members), pattern(m.origin for m in members))
        for _, _, members in merged
    )


class _Box(NamedTuple):
    """Leaves that look alike, one (or one for each number) for every combination of name parts."""

    parts: tuple[frozenset[str], ...]
    look: object
    leaves: list[Leaf]

    def union(self, other: _Box) -> _Box:
        parts = tuple(a | b for a, b in zip(self.parts, other.parts, strict=True))
        return _Box(parts, self.look, self.leaves + other.leaves)

    def differs_in_one_part(self, other: _Box) -> bool:
        if self.look != other.look or len(self.parts) != len(other.parts):
            return False
        if self.parts[0] != other.parts[0] or self.parts[-1] != other.parts[-1]:
            return False
        return sum(a != b for a, b in zip(self.parts, other.parts, strict=True)) == 1


def _kind_of(origin: str) -> str:
    """Whether an origin is a mark, nothing, or somewhere else."""
    return origin if origin in ("-", "marked", "no mark reaches it") else "inferred"


def pattern(names: Iterable[str]) -> str:
    """What texts have in common, part by part: `a/0/w`, `a/1/w` -> `a/*/w`."""
    given = list(dict.fromkeys(names))
    split = [re.split(r"(/|\d+| )", name) for name in given]
    if len(given) == 1:
        return given[0]
    if len({len(parts) for parts in split}) > 1:
        return f"{given[0]} and {len(given) - 1} more"
    return "".join(_common(list(dict.fromkeys(parts))) for parts in zip(*split, strict=True))


def _common(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    if len(parts) > 3 or all(part.isdigit() for part in parts):
        return "*"
    return "{" + ",".join(parts) + "}"


# ---------------------------------------------------------------------------------------------
# Collectives.


class CollectiveRow(NamedTuple):
    """Equal collectives of the program.

    Attributes:
      kind, axes, bytes, count, source, reason: as in `Collective`, of each of them.
      ops: how many ops of the program are like this.
      total_bytes: bytes that one device sends for all of them in one run.
      seconds: predicted seconds of all of them in one run.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: str
    reason: str
    ops: int
    total_bytes: int
    seconds: float


def collective_rows(collectives: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
    """Equal collectives together; most bytes first, then most time."""
    rows: dict[Collective, int] = {}
    for collective in collectives:
        rows[collective] = rows.get(collective, 0) + 1
    made = [
        CollectiveRow(
            *c[:6], ops=n, total_bytes=c.bytes * c.count * n, seconds=c.seconds * c.count * n
        )
        for c, n in rows.items()
    ]
    return tuple(sorted(made, key=lambda row: (-row.total_bytes, -row.seconds)))


class Traffic(NamedTuple):
    """All collectives of one kind over the same axes: ops, runs of them, bytes and seconds."""

    kind: str
    axes: tuple[str, ...]
    ops: int
    runs: int
    bytes: int
    seconds: float


def traffic(collectives: Iterable[Collective], by_axes: bool = True) -> tuple[Traffic, ...]:
    """Totals per kind and axes (or per kind alone), most bytes first."""
    totals: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for c in collectives:
        key = (c.kind, c.axes if by_axes else ())
        old = totals.get(key, Traffic(*key, 0, 0, 0, 0.0))
        totals[key] = Traffic(
            *key,
            old.ops + 1,
            old.runs + c.count,
            old.bytes + c.bytes * c.count,
            old.seconds + c.seconds * c.count,
        )
    return tuple(sorted(totals.values(), key=lambda t: (-t.bytes, -t.seconds, t.kind)))


# ---------------------------------------------------------------------------------------------
# The largest values.


class LargeValue(NamedTuple):
    """Values made inside the program that are alike.

    Attributes:
      op: the op that makes it, or that reads the copy.
      copy: whether it is a copy that a use wanted in another sharding.
      type: its whole type.
      sharding: how it lies on the mesh.
      local: the type of one device's piece.
      source: the user's source line.
      values: how many are like this.
    """

    op: str
    copy: bool
    type: TensorType
    sharding: Sharding
    local: TensorType
    source: str
    values: int


def largest_values(stages: Stages, n: int = 12) -> tuple[LargeValue, ...]:
    """The largest values per device, most bytes first: what ops make, and copies for their uses."""
    plan = stages.plan
    found: dict[LargeValue, int] = {}

    def note(op: Op, copy: bool, value: Value, sharding: Sharding) -> None:
        type_ = plan.program.types[value]
        local = local_type(type_, sharding, plan.mesh)
        row = LargeValue(op.label, copy, type_, sharding, local, op.loc.trail, 1)
        found[row] = found.get(row, 0) + 1

    copies: set[tuple[Value, Sharding]] = set()
    for op in plan.program.walk():
        for value in op.results:
            if (state := plan.states[value]) is not None:
                note(op, False, value, state)
        for value, wanted in demands(plan, op):
            if wanted != plan.states[value] and (value, wanted) not in copies:
                copies.add((value, wanted))
                note(op, True, value, wanted)
    rows = [row._replace(values=count) for row, count in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.local.bytes)[:n])


def demands(plan: Plan, op: Op) -> Iterator[tuple[Value, Sharding]]:
    """(operand, sharding that the op wants it in), for operands that have a sharding at all."""
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is None:
        return
    for value, wanted in zip(op.operands, choice.operands, strict=False):
        if plan.states[value] is not None:
            yield value, wanted


# ---------------------------------------------------------------------------------------------
# Conflicts.


class LosingClaim(NamedTuple):
    """What a conflict was not settled for.

    Attributes:
      axes: the axes that would have been taken, or `no axis`.
      seconds, bytes: what one run would take, and each device send, more; None if no plan that was
        weighed does so.
      exact: whether the price is exact; else it is an upper bound.
    """

    axes: str
    seconds: float | None
    bytes: int = 0
    exact: bool = True

    @property
    def text(self) -> str:
        """The price as text."""
        if self.seconds is None:
            return "no plan that was weighed does so"
        bound = "" if self.exact else "at most "
        return bound + price_text(self.seconds, self.bytes)


class ConflictRow(NamedTuple):
    """A disagreement that the planner settled.

    Attributes:
      op: the op around which values disagree.
      source: the user's source line, and its caller's.
      claims: (value's name, its type, dim, axes that it wants there).
      taken: the axes that the plan took.
      ops: how many ops are like this.
      losers: the claims that lost, with their prices; None where nobody asked.
    """

    op: str
    source: str
    claims: tuple[tuple[str, str, int, str], ...]
    taken: str
    ops: int
    losers: tuple[LosingClaim, ...] | None = None


def conflict_rows(stages: Stages, prices: Prices | None = None) -> tuple[ConflictRow, ...]:
    """Every conflict of the propagation and what became of it, equal ones together.

    Those about the most bytes come first; with `prices`, the first few are priced.
    """
    rows: dict[object, list[Conflict]] = {}
    for conflict in stages.propagated.conflicts:
        row = _conflict_row(stages.plan, conflict)
        wishes = tuple(claim[1:] for claim in row.claims)
        rows.setdefault((row.op, row.source, wishes, row.taken), []).append(conflict)
    types = stages.plan.program.types
    ordered = sorted(
        rows.values(),
        key=lambda found: -len(found) * max(types[v].bytes for _, v, _ in found[0].claims),
    )
    first = [found[0] for found in ordered][: MOST_CONFLICTS if prices else 0]
    losers = prices.alternatives.of_conflicts(first) if prices and first else ()
    made = []
    for k, found in enumerate(ordered):
        row = _conflict_row(stages.plan, found[0])._replace(ops=len(found))
        if k < len(losers):
            row = row._replace(losers=_losers(row, losers[k], stages.plan.mesh))
        made.append(row)
    return tuple(made)


def _conflict_row(plan: Plan, conflict: Conflict) -> ConflictRow:
    claims = tuple(
        (
            numberless(value_name(plan.program, value)),
            type_text(plan.program.types[value]),
            dim,
            axes_text(axes, plan.mesh),
        )
        for axes, value, dim in conflict.claims
    )
    taken = axes_text(_taken(plan, conflict), plan.mesh) or NO_AXIS
    return ConflictRow(conflict.op.label, conflict.op.loc.trail, claims, taken, 1)


def _losers(
    row: ConflictRow, priced: Iterable[tuple[Axes, Price]], mesh: Mesh
) -> tuple[LosingClaim, ...]:
    """The losing claims, the cheapest first; those without a price last."""
    found = [
        LosingClaim(axes_text(axes, mesh) or NO_AXIS, price.seconds, price.bytes, price.exact)
        for axes, price in priced
    ]
    known = {loser.axes for loser in found}
    claims = dict.fromkeys((*(claim[3] for claim in row.claims), NO_AXIS))
    missing = [c for c in claims if c != row.taken and c not in known]
    kept = [loser for loser in found if loser.axes != row.taken]
    return (*kept, *(LosingClaim(axes, None) for axes in missing))


def _taken(plan: Plan, conflict: Conflict) -> Axes:
    """The axes that the plan gave to the factor; of tied values, to the last claimant's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()


def value_name(program: Program, value: Value) -> str:
    """An argument's name, else the value's number as the printed program has it: `%12`."""
    if value in program.body.args:
        return program.arg_names[program.body.args.index(value)]
    return f"%{value}"


# ---------------------------------------------------------------------------------------------
# Marks.


class MarkRow(NamedTuple):
    """A mark without which the program would be cheaper.

    Attributes:
      name: where it was made, or whose it is.
      sharding: what it says.
      values: how many values have it.
      seconds, bytes: what one run would take, and each device send, more without it.
      argument_bytes: what each device would hold more of the arguments.
    """

    name: str
    sharding: str
    values: int
    seconds: float
    bytes: int
    argument_bytes: int

    @property
    def text(self) -> str:
        """The price as text: what changes without the mark."""
        text = price_text(self.seconds, self.bytes)
        if not self.argument_bytes:
            return text
        return f"{text}; {arguments_text(self.argument_bytes)}"


def mark_rows(stages: Stages, prices: Prices) -> tuple[MarkRow, ...]:
    """Marks that forbid something cheaper, the most expensive first."""
    mesh = stages.plan.mesh
    return tuple(
        MarkRow(
            relief.marks.name,
            spec_text(relief.marks.sharding, mesh),
            len(relief.marks.values),
            relief.seconds,
            relief.bytes,
            relief.argument_bytes,
        )
        for relief in prices.marks.reliefs
    )


def marks_title(prices: Prices) -> str:
    """How many marks were looked at, of how many."""
    found = prices.marks
    kinds = f"the {found.groups} kinds of marks that collectives come from"
    if found.tried == found.groups:
        return f"without each of {kinds} in turn, the program was planned again"
    return f"without {found.tried} of {kinds}, one at a time, the program was planned again"


# ---------------------------------------------------------------------------------------------
# Totals.


class Overview(NamedTuple):
    """The figures of one run.

    Attributes:
      mesh: the mesh as text.
      topology: the machine's name.
      devices: how many.
      solver: which one made the plan.
      timeline: what runs when in one run, communication hidden where it can be.
      greedy_seconds: what the greedy plan costs, nothing hidden.
      lower_seconds: what no plan that was weighed undercuts, nothing hidden; 0 if unknown.
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
        """What takes longer."""
        return "communication" if self.comm_seconds > self.compute_seconds else "compute"


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
        sum(c.bytes * c.count for c in collectives),
        sum(leaf.local.bytes for leaf in arguments),
        sum(leaf.local.bytes for leaf in results),
        sum(leaf.type.bytes for leaf in arguments),
        sum(leaf.type.bytes for leaf in results),
        plan.topology.hbm_bytes,
        memory,
    )


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
