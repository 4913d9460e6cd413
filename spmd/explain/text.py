"""The reports as text."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spmd.errors import ArgumentError
from spmd.explain.collectives import Collective, collective_rows, traffic
from spmd.explain.decisions import conflict_rows, mark_rows, marks_title
from spmd.explain.largest import largest_values
from spmd.explain.leaves import (
    Group,
    Leaf,
    argument_leaves,
    group_leaves,
    local_type,
    result_leaves,
)
from spmd.explain.memory import Memory
from spmd.explain.overview import Overview, memory_rows, overview, quality_rows
from spmd.explain.prices import Prices
from spmd.explain.stages import Stages
from spmd.explain.words import (
    arguments_text,
    axes_text,
    bytes_text,
    price_text,
    seconds_text,
    source_text,
    spec_text,
    type_text,
    value_name,
)
from spmd.ir.control_flow import held_atoms
from spmd.ir.program import Op, Program, Region, Value
from spmd.mesh.sharding import Sharding, local_shape
from spmd.planning.comm import wire_bytes
from spmd.planning.plan import Plan
from spmd.planning.reshard import reshard

Lines = Iterator[str]


def explain_program(
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    prices: Prices | None = None,
) -> str:
    """What is sharded how, why, and what it costs.

    Args:
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
      prices: of what the plan decided against; left out if not given.
    """
    figures = overview(stages, collectives, memory)
    sections = (
        _header(stages, figures),
        _boundary("arguments", argument_leaves(stages), stages),
        _boundary("results", result_leaves(stages), stages),
        _largest(stages),
        _collectives(collectives),
        _totals(collectives),
        _marks(stages, prices),
        _conflicts(stages, prices),
        _section("notes", _counted(stages.plan.notes)),
        _section("memory per device", _table(memory_rows(figures))),
    )
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def summarize(stages: Stages, collectives: Sequence[Collective], memory: Memory | None) -> str:
    """The short form, for a terminal; arguments as in `explain_program`."""
    figures = overview(stages, collectives, memory)
    arguments = argument_leaves(stages)
    split = [leaf for leaf in arguments if any(leaf.sharding.dims)]
    inferred = sum(leaf.origin != "marked" for leaf in split)
    lines = [
        f"spmd: {figures.devices} devices ({figures.mesh}) on {figures.topology}",
        f"  arguments    {len(arguments)}, {len(split)} of them split ({inferred} inferred); "
        + memory_rows(figures)[0][1],
    ]
    lines += [f"    {line}" for line in _top_shardings(stages)]
    lines.append(
        f"  collectives  {len(collectives)}, {bytes_text(figures.comm_bytes)} sent by each "
        "device in one run"
    )
    lines += [f"    {line}" for line in _traffic(collectives, n=8)]
    if memory is not None and memory.peak_bytes:
        rows = dict(memory_rows(figures))
        what = "predicted" if memory.is_predicted else "at most"
        lines.append(
            f"  memory       {what} {rows[f'peak, {what}']}, {rows['temporary']} of it temporary"
        )
    lines.append(f"  time         {_time(figures)}")
    return "\n".join(lines) + "\n"


def explain_value(stages: Stages, name: str, prices: Prices | None = None) -> str:
    """All about one value: its sharding, why each dim is split or not, and who reshards it.

    Args:
      stages: the pipeline's results.
      name: an argument's or a result's name or a pattern of names (`params/*/w`), a value's number
        as in `%12`, or a source line (`model.py:12`) for all that is made there.
      prices: of what the plan decided against; left out if not given.

    Raises:
      ArgumentError: no value has this name.
    """
    found = _named(stages, name, prices) or _numbered(stages, name, prices)
    found = found or _at_line(stages, name, prices)
    if not found:
        raise _unknown(name, stages.plan.program)
    return "\n".join(found).rstrip() + "\n"


MOST_VALUES = 8
"""Values that one pattern or source line shows."""


def _named(stages: Stages, name: str, prices: Prices | None) -> list[str]:
    """Arguments and results of this name, or that match it as a pattern."""
    plan = stages.plan
    program = plan.program
    boundary = [
        (label, value, sharding, what)
        for names, values, shardings, what in (
            (program.arg_names, program.body.args, plan.arguments, "argument"),
            (program.result_names, program.body.results, plan.results, "result"),
        )
        for label, value, sharding in zip(names, values, shardings, strict=True)
    ]
    fitting = [b for b in boundary if b[0] == name]
    fitting = fitting or [b for b in boundary if fnmatch.fnmatchcase(b[0], name)]
    found: list[str] = []
    for label, value, sharding, what in fitting[:MOST_VALUES]:
        found += _value(stages, f"{what} {label} (%{value})", value, sharding, prices)
    if len(fitting) > MOST_VALUES:
        found.append(f"{len(fitting) - MOST_VALUES} more match {name!r}")
    return found


def _numbered(stages: Stages, name: str, prices: Prices | None) -> list[str]:
    program = stages.plan.program
    number = _number(name, len(program.types))
    if number is None:
        return []
    title = f"value {name}"
    if number in program.body.args:
        title = f"argument {value_name(program, number)} ({name})"
    return _value(stages, title, number, stages.plan.states[number], prices)


def _at_line(stages: Stages, name: str, prices: Prices | None) -> list[str]:
    """What the ops of a source line make; results that are alike are shown once."""
    if not re.search(r":\d+$", name):
        return []
    plan = stages.plan
    alike: dict[object, list[tuple[Op, Value]]] = {}
    for op in plan.program.walk():
        places = [f"{frame.file}:{frame.line}" for frame in op.loc.user_frames[:2]]
        if any(place == name or place.endswith(f"/{name}") for place in places):
            for value in op.results:
                key = (op.label, plan.program.types[value], plan.states[value])
                alike.setdefault(key, []).append((op, value))
    found: list[str] = []
    for members in list(alike.values())[:MOST_VALUES]:
        op, value = members[0]
        more = f" and {len(members) - 1} alike" if len(members) > 1 else ""
        title = f"value %{value}, {op.label}{more}"
        found += _value(stages, title, value, plan.states[value], prices)
    if len(alike) > MOST_VALUES:
        found.append(f"{len(alike) - MOST_VALUES} more are made at {name}")
    return found


# ---------------------------------------------------------------------------------------------
# Layout.


def _section(title: str, lines: Sequence[str]) -> Lines:
    if lines:
        yield title
        yield from (f"  {line}" for line in lines)
        yield ""


def _counted(texts: Iterable[str]) -> list[str]:
    """Equal texts once, with how often they occur."""
    return [
        f"{source_text(text)}{f' ({n} times)' if n > 1 else ''}"
        for text, n in Counter(texts).items()
    ]


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned columns; those numbered in `right` are flush right."""
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------------------------------------
# The program.


def _header(stages: Stages, figures: Overview) -> Lines:
    times = ", ".join(
        f"{stage} {seconds_text(seconds)}" for stage, seconds in stages.seconds.items()
    )
    rows = [
        ("mesh", f"{figures.mesh} ({figures.devices} devices)"),
        ("topology", figures.topology),
        ("solver", figures.solver),
        ("predicted", _time(figures)),
        *quality_rows(figures),
        ("stages", times),
    ]
    yield from _section(f"program {stages.plan.program.name}", _table([r for r in rows if r[1]]))


def _time(figures: Overview) -> str:
    return (
        f"{seconds_text(figures.seconds)} a run, bound by {figures.bound} "
        f"(compute {seconds_text(figures.compute_seconds)}, "
        f"collectives {seconds_text(figures.comm_seconds)})"
    )


def _boundary(what: str, leaves: Sequence[Leaf], stages: Stages) -> Lines:
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    rows: list[tuple[str, ...]] = [
        ("name", "n", "type", "sharding", "local", "per device", "origin")
    ]
    rows += [_group_row(group, stages) for group in group_leaves(leaves)]
    title = f"{what}: {len(leaves)}, {split} of them split"
    yield from _section(title, _table(rows, right=(1, 5)) if leaves else ["none"])


def _group_row(group: Group, stages: Stages) -> tuple[str, ...]:
    leaf = group.leaves[0]
    return (
        group.pattern,
        str(len(group.leaves)),
        type_text(leaf.type),
        spec_text(leaf.sharding, stages.plan.mesh),
        type_text(leaf.local),
        bytes_text(group.bytes),
        group.origin,
    )


def _largest(stages: Stages) -> Lines:
    rows = [("per device", "n", "type", "sharding", "op", "source")]
    rows += [
        (
            bytes_text(row.local.bytes),
            str(row.values),
            type_text(row.type),
            spec_text(row.sharding, stages.plan.mesh),
            f"copy for {row.op}" if row.copy else row.op,
            source_text(row.source),
        )
        for row in largest_values(stages)
    ]
    yield from _section("largest values inside", _table(rows, right=(0, 1)) if rows[1:] else [])


def _collectives(collectives: Sequence[Collective]) -> Lines:
    rows = collective_rows(collectives)
    table = [("kind", "axes", "bytes", "times", "ops", "total", "ms", "source")]
    table += [
        (
            row.kind,
            ", ".join(row.axes),
            bytes_text(row.bytes),
            str(row.count),
            str(row.ops),
            bytes_text(row.total_bytes),
            f"{row.seconds * 1e3:.4f}",
            source_text(row.source),
        )
        for row in rows
    ]
    lines = _table(table, right=(2, 3, 4, 5, 6))
    reasons = [""] + [f"    {source_text(row.reason)}" for row in rows]
    total = bytes_text(sum(row.total_bytes for row in rows))
    title = f"collectives: {len(collectives)}, {total} sent by each device in one run"
    spread = [x for pair in zip(lines, reasons, strict=True) for x in pair if x.strip()]
    yield from _section(title, spread if rows else ["none"])


def _totals(collectives: Sequence[Collective]) -> Lines:
    yield from _section("totals by kind", _traffic(collectives, by_axes=False))
    yield from _section("totals by kind and axes", _traffic(collectives))


def _traffic(
    collectives: Sequence[Collective], by_axes: bool = True, n: int | None = None
) -> list[str]:
    rows: list[tuple[str, ...]] = [("kind", "axes", "ops", "runs", "bytes", "time")]
    rows += [
        (
            total.kind,
            ", ".join(total.axes),
            str(total.ops),
            str(total.runs),
            bytes_text(total.bytes),
            seconds_text(total.seconds),
        )
        for total in traffic(collectives, by_axes)[:n]
    ]
    if not by_axes:
        rows = [(row[0], *row[2:]) for row in rows]
    width = len(rows[0])
    return _table(rows, right=range(width - 4, width)) if rows[1:] else []


def _marks(stages: Stages, prices: Prices | None) -> Lines:
    """What would have been cheaper, and which mark forbids it."""
    if prices is None or not prices.marks.groups:
        return
    lines = [f"{marks_title(prices)}:"]
    for row in mark_rows(stages, prices):
        more = f" and {row.values - 1} more" if row.values > 1 else ""
        lines.append(f"without {source_text(row.name)} {row.sharding}{more}:")
        lines.append(f"  {row.text}")
    if len(lines) == 1:
        lines.append("none of them costs 1% of the collectives' time or more")
    yield from _section("marks that forbid something cheaper", lines)


def _conflicts(stages: Stages, prices: Prices | None) -> Lines:
    lines: list[str] = []
    rows = conflict_rows(stages, prices)
    for row in rows:
        more = f" ({row.ops} alike)" if row.ops > 1 else ""
        lines.append(f"{row.op} at {source_text(row.source)}{more}: took {row.taken}")
        lines += [
            f"  {name} {type_} dim {dim} wants {axes}" for name, type_, dim, axes in row.claims
        ]
        lines += [f"  {loser.axes} instead: {loser.text}" for loser in row.losers or ()]
    asked = sum(row.losers is not None for row in rows)
    title = f"conflicts: {len(stages.propagated.conflicts)}"
    if asked:
        title += f", of {len(rows)} kinds; what the claims that lost would cost"
        title += "" if asked == len(rows) else f" (the first {asked})"
    yield from _section(title, lines)


def _top_shardings(stages: Stages, n: int = 6) -> list[str]:
    count: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for leaf in argument_leaves(stages):
        spec = spec_text(leaf.sharding, stages.plan.mesh)
        count[spec] += 1
        held[spec] += leaf.local.bytes
    rows = [
        (spec, f"{count[spec]} arguments", f"{bytes_text(size)} per device")
        for spec, size in held.most_common(n)
    ]
    return _table(rows)


# ---------------------------------------------------------------------------------------------
# One value.


def _number(name: str, limit: int) -> int | None:
    digits = name.removeprefix("%")
    if not digits.isdecimal() or int(digits) >= limit:
        return None
    return int(digits)


def _unknown(name: str, program: Program) -> ArgumentError:
    known = list(dict.fromkeys((*program.arg_names, *program.result_names)))
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    close += [k for k in known if name and name in k and k not in close][: 5 - len(close)]
    return ArgumentError(
        f"the program has no value {name!r}",
        actual=f"{len(program.arg_names)} arguments, {len(program.result_names)} results, "
        f"values %0 to %{len(program.types) - 1}",
        required=f"close to it: {', '.join(close or known[:5])}",
        fix='name an argument or a result (patterns as in "params/*" work), a value as '
        'as_text("program") prints it ("%12"), or a source line ("model.py:12")',
    )


def _value(
    stages: Stages, title: str, value: Value, sharding: Sharding | None, prices: Prices | None
) -> list[str]:
    plan = stages.plan
    type_ = plan.program.types[value]
    if sharding is None:
        return [
            f"{title}: {type_text(type_)}",
            "  it costs nothing to make, so that every use makes its own copy as it wants it",
            *_uses(plan, value, None),
            "",
        ]
    local = local_type(type_, sharding, plan.mesh)
    rows = [
        ("sharding", spec_text(sharding, plan.mesh)),
        ("local", type_text(local)),
        ("per device", f"{bytes_text(local.bytes)} of {bytes_text(type_.bytes)}"),
    ]
    if (op := _producer(plan.program, value)) is not None:
        rows.append(("made by", f"{op.label} at {source_text(op.loc.trail)}"))
    if (mark := stages.propagated.marks.get(value)) is not None:
        rows.append(("mark", source_text(mark.reason)))
    if (state := plan.states[value]) is not None and state != sharding:
        rows.append(("as made", spec_text(state, plan.mesh)))
    lines = [f"{title}: {type_text(type_)}", *(f"  {line}" for line in _table(rows))]
    for dim in range(type_.rank):
        lines += [f"  {line}" for line in _dim(stages, value, sharding, dim)]
    lines += _others(plan, value, prices) if prices is not None else []
    return [*lines, *_uses(plan, value, plan.states[value] or sharding), ""]


def _others(plan: Plan, value: Value, prices: Prices) -> list[str]:
    """Why not otherwise: other shardings and what they would cost."""
    is_argument = value in plan.program.body.args
    producer = _producer(plan.program, value)
    if producer is not None and producer.name == "spmd.mark":
        relief = prices.without_mark(value)
        more = len(relief.marks.values) - 1
        alike = f" and the {more} made with it" if more else ""
        return [f"  without this mark{alike}: {price_text(relief.seconds, relief.bytes)}"]
    rows = []
    for other in prices.others(value):
        text = price_text(other.seconds, other.bytes)
        if other.argument_bytes:
            text += f"; {arguments_text(other.argument_bytes)}"
        rows.append((spec_text(other.sharding, plan.mesh), text))
    if not rows:
        return ["  no other state of it was weighed: nothing around it asks for one"]
    how = "planned again with each" if is_argument else "the rest of the plan adapting"
    return [f"  instead ({how}):", *(f"    {line}" for line in _table(rows))]


def _producer(program: Program, value: Value) -> Op | None:
    return next((op for op in program.walk() if value in op.results), None)


def _dim(stages: Stages, value: Value, sharding: Sharding, dim: int) -> Lines:
    """Why one dim is split over the axes that split it, and why not over the others."""
    mesh, size = stages.plan.mesh, stages.plan.program.types[value].shape[dim]
    axes = sharding.dims[dim]
    if not axes:
        yield f"dim {dim} (size {size}) is not split"
        yield from (f"  {reason}" for reason in _why_not(stages, value, sharding, dim))
        return
    yield f"dim {dim} (size {size}) is split over {axes_text(axes, mesh)}"
    seen: dict[tuple[str, ...], tuple[int, ...]] = {}
    for atom in axes:
        chain = tuple(map(source_text, stages.propagated.why(value, dim, atom)))
        seen[chain] = (*seen.get(chain, ()), atom)
    for chain, atoms in seen.items():
        yield f"  {axes_text(atoms, mesh)}:"
        yield from (f"    {reason}" for reason in chain or ("no mark asks for it: the cheapest",))


def _why_not(stages: Stages, value: Value, sharding: Sharding, dim: int) -> Lines:
    mesh, propagated = stages.plan.mesh, stages.propagated
    mark = propagated.marks.get(value)
    if mark is not None and not mark.open[dim]:
        yield f"closed by the mark: {source_text(mark.reason)}"
        return
    for name, atoms in mesh.axis_atoms.items():
        if atoms:
            yield f"{name}: {_why_not_axis(stages, value, sharding, dim, name)}"


def _why_not_axis(stages: Stages, value: Value, sharding: Sharding, dim: int, axis: str) -> str:
    mesh, propagated = stages.plan.mesh, stages.propagated
    atoms, size = mesh.axis_atoms[axis], stages.plan.program.types[value].shape[dim]
    other = next((d for d, axes in enumerate(sharding.dims) if set(axes) & set(atoms)), None)
    if other is not None:
        return f"it already splits dim {other}"
    if set(sharding.partial) & set(atoms):
        return "the value is partial over it: a sum is still owed"
    if size % mesh.shape[axis]:
        return f"its size {mesh.shape[axis]} does not divide {size}"
    if set(propagated.proposals[value][dim]) & set(atoms):
        chain = next(filter(None, (propagated.why(value, dim, atom) for atom in atoms)), ("",))
        cause = source_text(chain[-1]) or "a neighbour"
        return f"{cause} suggests it; the plan found it cheaper without"
    claims = (
        conflict
        for conflict in propagated.conflicts
        if any(v == value and d == dim for _, v, d in conflict.claims)
    )
    if (conflict := next(claims, None)) is not None:
        where = source_text(conflict.op.loc.trail)
        return f"its neighbours disagree around {conflict.op.label} at {where}"
    return "no mark reaches it"


def _uses(plan: Plan, value: Value, state: Sharding | None) -> list[str]:
    lines: list[str] = []
    for label, wanted in _wants(plan, value):
        if wanted is None:
            lines.append(f"    {label}")
            continue
        lines.append(f"    {label} takes it as {spec_text(wanted, plan.mesh)}")
        if state is not None and wanted != state:
            lines += [f"      {line}" for line in _steps(plan, value, state, wanted)]
    return ["  uses", *lines] if lines else ["  no uses"]


def _wants(plan: Plan, value: Value) -> Iterator[tuple[str, Sharding | None]]:
    """(who reads a value, in which sharding), in program order."""

    def visit(region: Region, owner: Op | None) -> Iterator[tuple[str, Sharding | None]]:
        for op in region.ops:
            choice = plan.choices.get(op.results[0]) if op.results else None
            for i, operand in enumerate(op.operands):
                if operand == value:
                    where = f" at {source_text(op.loc.trail)}" if op.loc.frames else ""
                    label = f"operand {i} of {op.label}{where}"
                    yield label, choice.operands[i] if choice else None
            for inner in op.regions:
                yield from visit(inner, op)
        for i, result in enumerate(region.results):
            if result == value:
                yield _returned(plan, owner, region, i)

    yield from visit(plan.program.body, None)


def _returned(
    plan: Plan, owner: Op | None, region: Region, index: int
) -> tuple[str, Sharding | None]:
    if owner is None:
        return f"result {plan.program.result_names[index]}", plan.results[index]
    if len(region.results) != len(owner.results):
        return f"the condition of {owner.name}", None
    choice = plan.choices.get(owner.results[0])
    label = f"result {index} of the body of {owner.name}"
    return label, choice.results[index] if choice else None


def _steps(plan: Plan, value: Value, state: Sharding, wanted: Sharding) -> Lines:
    """The collectives between two shardings; another copy that exists may make them cheaper."""
    type_, mesh = plan.program.types[value], plan.mesh
    held = held_atoms(plan.program).get(value, ())
    if not set(wanted.partial) <= set(state.partial):
        yield "made from another copy"
        return
    for step in reshard(state, wanted, type_, mesh, plan.topology, held).steps:
        before, after = (
            type_.with_shape(local_shape(type_.shape, s, mesh)).bytes
            for s in (step.before, step.after)
        )
        sent = wire_bytes(step.kind, mesh.extent(step.axes), before, after)
        what = f"{bytes_text(sent)} sent" if sent else "free"
        yield f"{step.kind} over {axes_text(step.axes, mesh)}: {what}"
