"""Writes reports as text: on a program, long or short, on one value, and on two plans."""

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from spmd.compiler import Stages
from spmd.errors import ArgumentError
from spmd.explain import costs
from spmd.explain import words as w
from spmd.explain.facts import (
    CLOSE,
    Facts,
    Leaf,
    boundary,
    group_leaves,
    largest_table,
    pattern,
    split_text,
    values_inside,
)
from spmd.explain.memory import recomputed
from spmd.explain.prices import (
    Prices,
    Relief,
    conflicts,
    costly_text,
    mark_groups,
    mark_rows,
    relief_of,
)
from spmd.explain.steps import PipelineRow, RingRow, pipeline_rows, ring_rows
from spmd.ir.program import Op, Region, Value
from spmd.ir.types import local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.plan import Plan
from spmd.reshard.comm import wire_bytes

MOST_VALUES = 8  # values that one pattern or source line shows
MOST_CHANGES = 12  # rows of each part of a difference that are shown, the largest


# ---------------------------------------------------------------------------------------------
# A program.


def explain_program(facts: Facts) -> str:
    """Returns the long report on a program: what costs most, shardings and why, traffic, memory."""
    plan, found, stages = facts.plan, facts.collectives, facts.stages
    whole = facts.timeline.seconds
    title, most = costs.largest(facts.costs, whole)
    rows = [
        (w.share_text(cost.seconds, whole), w.seconds_text(cost.seconds), cost.title, cost.remark)
        for cost in most
    ]
    opening: list[str] = []
    for head, cost in zip(w.aligned(rows, right=(0, 1)), most, strict=True):
        why = [w.source_text(cost.reason)] if cost.reason else []
        why += w.aligned([(w.source_text(place), text) for place, text in costs.code_lines(cost)])
        opening += [head, *(f"    {line}" for line in why)]
    notes = [
        w.source_text(text) + (f" ({n} times)" if n > 1 else "")
        for text, n in Counter(plan.notes).items()
    ]
    tried, priced = mark_rows(facts.prices)
    marks = [f"{tried}:"] if tried else []
    for which, price in priced:
        marks += [f"{which}:", f"  {price}"] if price else [which]
    settled, conflict_lines = conflicts(stages, facts.prices), list[str]()
    for op, count, claims, taken, (losers, _), trail in settled.table.rows:
        more = f" ({count} alike)" if count > 1 else ""
        conflict_lines.append(f"{op} at {w.source_text(trail)}{more}: took {taken}")
        conflict_lines += [f"  {x}" for x in (*claims.splitlines(), *losers.splitlines())]
    sections = (
        w.section(title, opening),
        w.section(f"program {facts.title}", w.aligned(facts.header)),
        facts.measured.lines() if facts.measured is not None else (),
        *(part.lines() for part in facts.leaves),
        w.section("largest values inside", largest_table(plan, 12).lines()),
        costs.collective_section(found).lines(),
        costs.traffic_section(found).lines(),
        w.section("marks that forbid something cheaper", marks),
        w.section(settled.heading, conflict_lines),
        _titled("rings", ring_rows(stages, facts.prices)),
        recomputed(plan, facts.timeline).lines(),
        _titled("pipelines", pipeline_rows(stages)),
        w.section("forms", [form.text for form in plan.forms]),
        w.section("notes", notes),
        w.section("memory per device", w.aligned(facts.memory)),
    )
    return _joined([line for lines in sections for line in lines], plan.mesh)


def _joined(lines: Sequence[str], *meshes: Mesh) -> str:
    """Makes one text, with what its parts of axes are below it."""
    parts = w.section("parts of axes", w.parts_of_axes("\n".join(lines), *meshes))
    return "\n".join([*lines, *parts]).rstrip() + "\n"


def summarize(facts: Facts, costly: Relief | None = None) -> str:
    """Returns the short report on a program; a note warns of the marks `costly`, if given."""
    plan, rows, constants = facts.plan, dict(facts.memory), facts.constants
    split = [leaf for leaf in facts.arguments if any(leaf.sharding.dims)]
    inferred = sum(leaf.origin != "marked" for leaf in split)
    # The shardings of which each device holds the most, with how many arguments have them.
    alike = w.grouped(facts.arguments, lambda leaf: w.spec_text(leaf.sharding, plan.mesh))
    sized = [(sum(x.local.bytes for x in leaves), spec, leaves) for spec, leaves in alike.items()]
    shardings = [
        (spec, f"{len(leaves)} arguments", f"{w.bytes_text(held)} per device")
        for held, spec, leaves in sorted(sized, key=lambda row: -row[0])[:6]
    ]
    lines = [
        f"spmd: {plan.mesh.size} devices ({plan.mesh}) on {plan.topology}",
        f"  arguments    {split_text(facts.arguments)} ({inferred} inferred); {rows['arguments']}",
        *(f"    {line}" for line in w.aligned(shardings)),
    ]
    if constants:
        lines.append(f"  constants    {split_text(constants)}; {rows['constants']}")
    traffic = costs.traffic_section(facts.collectives).table
    lines.append(f"  collectives  {costs.collective_section(facts.collectives).remark}")
    lines += [f"    {line}" for line in traffic.first(8).lines()]
    lines.append(
        f"  memory       {rows['peak, predicted']} predicted, {rows['temporary']} of it "
        f"temporary: {rows['on the device']}"
    )
    lines.append(f"  time         {facts.time_text}")
    if facts.stages.is_read:
        lines.append("  plan         as an earlier start made it")
    if facts.measured is not None:
        lines.append(f"  measured     {facts.measured.title}")
    if plan.recomputed:
        lines.append(f"  made again   {recomputed(plan, facts.timeline).remark}")
    for row in pipeline_rows(facts.stages):
        lines.append(f"  pipeline     {row.title}: {row.parts[0][1]}")
    lines += [f"  form         {form.text}" for form in plan.forms if not form.refusal]
    if plan.choices and plan.idle_axes:
        lines.append(f"  note         {w.idle_text(plan.idle_axes)}")
    if costly is not None:
        lines.append(f"  note         {costly_text(costly, plan.mesh)}")
    lines += [f"  note         {part}" for part in w.parts_of_axes("\n".join(lines), plan.mesh)]
    return "\n".join(lines) + "\n"


def brief(what: str, facts: Facts) -> str:
    """Returns a program's mesh and figures in one line, for `repr`; `what` is the class's name.

    `<spmd.Compiled train_step on data=4, model=2 (8 cpu): 14 collectives, 3.2 MiB sent per device,
    41 MiB memory per device, predicted 1.9 ms>`.
    """
    mesh, chip = facts.plan.mesh, facts.plan.topology.chip.name
    figures = (
        w.plural(len(facts.collectives), "collective"),
        f"{w.bytes_text(facts.sent_bytes)} sent per device",
        f"{w.bytes_text(facts.use.peak)} memory per device",
        f"predicted {w.seconds_text(facts.timeline.seconds)}",
    )
    return f"<spmd.{what} {facts.name} on {mesh} ({mesh.size} {chip}): {', '.join(figures)}>"


def _titled(title: str, rows: Iterable[PipelineRow | RingRow]) -> w.Lines:
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row.title}, at {w.source_text(row.source)}")
        lines += [f"  {line}" for line in w.aligned(row.parts)]
    return w.section(title, lines)


# ---------------------------------------------------------------------------------------------
# One value: why each dim is split or not, and which uses reshard it.

Found = list[tuple[str, Value, Sharding | None]]  # (title, value, its sharding)


def explain_value(stages: Stages, name: str, prices: Prices | None = None) -> str:
    """Returns a text on one value: its sharding, why each dim is split or not, uses and reshards.

    `name` is an argument, a result, a pattern, `%12` or `model.py:12`; several values may fit. With
    `prices`, other shardings and what they cost are listed. ArgumentError if no value fits.
    """
    plan, program = stages.plan, stages.plan.program
    found, rest = _found(plan, name)
    if not found:
        known = list(dict.fromkeys((*program.arg_names, *program.result_names)))
        close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
        close += [k for k in known if name and name in k and k not in close][: 5 - len(close)]
        raise ArgumentError(
            f"the program has no value {name!r}",
            actual=f"{len(program.arg_names)} arguments, {len(program.result_names)} results, "
            f"values %0 to %{len(program.types) - 1}",
            required=f"close to it: {', '.join(close or known[:5])}",
            fix='name an argument or a result (patterns as in "params/*" work), a value as '
            'compiled.as_text("program") prints it ("%12"), or a source line ("model.py:12")',
        )
    lines = [
        line
        for title, value, sharding in found[:MOST_VALUES]
        for line in _value_lines(plan, title, value, sharding, prices)
    ]
    if len(found) > MOST_VALUES:
        lines.append(f"{len(found) - MOST_VALUES} more {rest}")
    return _joined(lines, plan.mesh)


def _found(plan: Plan, name: str) -> tuple[Found, str]:
    """Returns the values that `name` stands for, and a verb for any more: `match 'params/*'`."""
    # An argument or a result of this name, or those that match it as a pattern.
    ends = boundary(plan)
    fitting = [end for end in ends if end[1] == name]
    fitting = fitting or [end for end in ends if fnmatch.fnmatchcase(end[1], name)]
    if fitting:
        return [(f"{what} {x} (%{v})", v, s) for what, x, v, s in fitting], f"match {name!r}"
    program, digits = plan.program, name.removeprefix("%")
    if digits.isdecimal() and int(digits) < len(program.types):
        number, title = int(digits), f"value {name}"
        if number in program.body.args:
            title = f"argument {w.value_name(program, number)} ({name})"
        return [(title, number, plan.states[number])], ""
    if not re.search(r":\d+$", name):
        return [], ""
    # What the ops of a source line make; results that are alike are shown once.
    there = [
        (op.label, value)
        for op in program.walk()
        if any(f"/{f.file}:{f.line}".endswith(f"/{name}") for f in op.loc.user_frames[:2])
        for value in op.results
    ]
    alike = w.grouped(there, lambda m: (m[0], program.types[m[1]], plan.states[m[1]]))
    made: Found = []
    for (label, value), *others in alike.values():
        more = f" and {len(others)} alike" if others else ""
        made.append((f"value %{value}, {label}{more}", value, plan.states[value]))
    return made, f"are made at {name}"


def _value_lines(
    plan: Plan, title: str, value: Value, sharding: Sharding | None, prices: Prices | None
) -> w.Lines:
    """Yields lines on one value; `sharding` is None if every use makes its own copy of it."""
    type_, state = plan.program.types[value], plan.states[value]
    yield f"{title}: {w.type_text(type_)}"
    if sharding is None:
        yield "  it costs nothing to make, so that every use makes its own copy as it wants it"
    else:
        local = local_type(type_, sharding, plan.mesh)
        rows = [
            ("sharding", w.spec_text(sharding, plan.mesh)),
            ("local", w.type_text(local)),
            ("per device", f"{w.bytes_text(local.bytes)} of {w.bytes_text(type_.bytes)}"),
        ]
        if (op := plan.problem.index.producers.get(value)) is not None:
            rows.append(("made by", f"{op.label} at {w.source_text(op.loc.trail)}"))
        if (mark := plan.propagated.marks.get(value)) is not None:
            rows.append(("mark", w.source_text(mark.reason)))
        if state is not None and state != sharding:
            rows.append(("as made", w.spec_text(state, plan.mesh)))
        lines = w.aligned(rows)
        for dim in range(type_.rank):
            lines += _dim(plan, value, sharding, dim)
        lines += [] if prices is None else _others(plan, value, prices)
        yield from (f"  {line}" for line in lines)
    uses = list(_uses(plan, value, state or sharding))
    yield "  uses" if uses else "  no uses"
    yield from (f"    {line}" for line in uses)
    yield ""


def _others(plan: Plan, value: Value, prices: Prices) -> w.Lines:
    producer = plan.problem.index.producers.get(value)
    if producer is not None and producer.is_mark:
        # Without the mark of a value and those that belong to it.
        groups = mark_groups(plan, every=True)
        group = next(group for group in groups if value in group.values)
        relief = relief_of(plan, group, prices.options)
        more = len(relief.marks.values) - 1
        alike = f" and the {more} made with it" if more else ""
        yield f"without this mark{alike}: {relief.price.run_text}"
        return
    if not (others := prices.others(value)):
        yield "no other state of it was weighed: nothing around it asks for one"
        return
    is_argument = value in plan.program.body.args
    how = "planned again with each" if is_argument else "the rest of the plan adapting"
    yield f"instead ({how}):"
    rows = [(w.spec_text(sharding, plan.mesh), price.text) for sharding, price in others]
    yield from (f"  {line}" for line in w.aligned(rows))
    if others[0][1].seconds < -CLOSE * plan.run_seconds:
        spec = w.spec_text(others[0][0], plan.mesh)
        is_marked = value in plan.propagated.marks
        why = "its mark forbids what is faster" if is_marked else "the planner did not find it"
        yield f"  {why}: mark it {spec}"


def _dim(plan: Plan, value: Value, sharding: Sharding, dim: int) -> w.Lines:
    """Yields why a dim is split over its axes; if it is not split, why not over each axis."""
    mesh, propagated, size = plan.mesh, plan.propagated, plan.program.types[value].shape[dim]

    def why_not(axis: str, atoms: Axes) -> str:
        """Returns the first reason that holds why the dim is not split over an axis."""
        other = next((d for d, axes in enumerate(sharding.dims) if set(axes) & set(atoms)), None)
        if other is not None:
            return f"it already splits dim {other}"
        if set(sharding.partial) & set(atoms):
            return "the value is partial over it: a sum is still owed"
        if size % mesh.shape[axis]:
            return f"its size {mesh.shape[axis]} does not divide {size}"
        if set(propagated.proposals[value][dim]) & set(atoms):
            chain = next(filter(None, (propagated.why(value, dim, a) for a in atoms)), ("",))
            cause = w.source_text(chain[-1]) or "a neighbour"
            return f"{cause} suggests it; the planner chose otherwise"
        for conflict in propagated.conflicts:
            if any(v == value and d == dim for _, v, d in conflict.claims):
                where = w.source_text(conflict.op.loc.trail)
                return f"its neighbours disagree around {conflict.op.label} at {where}"
        return "no mark reaches it"

    if axes := sharding.dims[dim]:
        yield f"dim {dim} (size {size}) is split over {w.axes_text(axes, mesh)}"
        chains = w.grouped(axes, lambda a: tuple(map(w.source_text, propagated.why(value, dim, a))))
        for chain, alike in chains.items():
            yield f"  {w.axes_text(tuple(alike), mesh)}:"
            reasons = chain or ("no mark asks for it: the planner's choice",)
            yield from (f"    {reason}" for reason in reasons)
        return
    yield f"dim {dim} (size {size}) is not split"
    mark = propagated.marks.get(value)
    if mark is not None and not mark.open[dim]:
        yield f"  closed by the mark: {w.source_text(mark.reason)}"
        return
    for axis, atoms in mesh.axis_atoms.items():
        if atoms:
            yield f"  {axis}: {why_not(axis, atoms)}"


def _uses(plan: Plan, value: Value, state: Sharding | None) -> w.Lines:
    """Yields each reader of a value, the sharding that it needs, and the collectives for that."""
    type_, mesh = plan.program.types[value], plan.mesh

    def wants(region: Region, owner: Op | None) -> Iterator[tuple[str, Sharding | None]]:
        """Yields (reader as text, sharding it needs or None) for readers in a region."""
        for op in region.ops:
            choice = plan.choices.get(op.results[0]) if op.results else None
            where = f" at {w.source_text(op.loc.trail)}" if op.loc.frames else ""
            for i, operand in enumerate(op.operands):
                if operand == value:
                    label = f"operand {i} of {op.label}{where}"
                    yield label, choice.operands[i] if choice else None
            for inner in op.regions:
                yield from wants(inner, op)
        for i in (i for i, result in enumerate(region.results) if result == value):
            if owner is None:
                yield f"result {plan.program.result_names[i]}", plan.results[i]
            elif owner.is_loop and region is owner.regions[0]:
                yield f"the condition of {owner.name}", None
            else:
                choice = plan.choices.get(owner.results[0])
                label = f"result {i} of the body of {owner.name}"
                yield label, choice.results[i] if choice else None

    for label, wanted in wants(plan.program.body, None):
        if wanted is None:
            yield label
            continue
        yield f"{label} takes it as {w.spec_text(wanted, mesh)}"
        if state is None or wanted == state:
            continue
        if not set(wanted.partial) <= set(state.partial):
            yield "  made from another copy"
            continue
        for step in plan.problem.resharder.path(value, state, wanted).steps:
            before, after = (local_type(type_, s, mesh).bytes for s in (step.before, step.after))
            sent = wire_bytes(step.kind, mesh.extent(step.axes), before, after)
            what = f"{w.bytes_text(sent)} sent" if sent else "free"
            yield f"  {step.kind} over {w.axes_text(step.axes, mesh)}: {what}"


# ---------------------------------------------------------------------------------------------
# Two plans side by side: what changed, and what that costs.


def diff_text(a: Facts, b: Facts) -> str:
    """Returns what differs between two plans, as text; see `spmd.explain.diff`."""
    changes = (
        _changed_leaves("arguments", a, b, a.arguments, b.arguments),
        _changed_leaves("results", a, b, a.results, b.results),
        _changed_values(a, b),
        _changed_collectives(a.collectives, b.collectives),
    )
    lines = [line for lines in changes for line in lines] or ["nothing changed"]
    return _joined([*_changed_costs(a, b), *lines], a.plan.mesh, b.plan.mesh)


def _changed_costs(a: Facts, b: Facts) -> w.Lines:
    named = (("a", a), ("b", b))
    about = [(key, f.title, f"{f.plan.mesh} on {f.plan.topology}") for key, f in named]
    rows = [("", "a", "b", "b - a")]

    def compare(what: str, old: float, new: float, text: Callable[[float], str]) -> None:
        share = f" ({(new - old) / old:+.1%})" if old else ""
        change = f"{'-' if new < old else '+'}{text(abs(new - old))}{share}"
        rows.append((what, text(old), text(new), "the same" if old == new else change))

    compare("predicted time", a.timeline.seconds, b.timeline.seconds, w.seconds_text)
    if a.measured and b.measured:
        compare("measured time", a.measured.seconds, b.measured.seconds, w.seconds_text)
    compare("sent by each device", a.sent_bytes, b.sent_bytes, w.bytes_text)
    compare("peak memory, predicted", a.use.peak, b.use.peak, w.bytes_text)
    return w.section("programs", [*w.aligned(about), *w.aligned(rows, right=(1, 2, 3))])


def _changed_leaves(
    what: str, a: Facts, b: Facts, old: Iterable[Leaf], new: Iterable[Leaf]
) -> w.Lines:
    """Yields lines on leaves whose sharding differs; the title has `what`: arguments or results."""
    before, after = ({leaf.name: leaf for leaf in leaves} for leaves in (old, new))

    def spec(leaf: Leaf | None, facts: Facts) -> str:
        return "none" if leaf is None else w.spec_text(leaf.sharding, facts.plan.mesh)

    def change(leaf: Leaf) -> tuple[str, str]:
        old, new = spec(before.get(leaf.name), a), spec(after.get(leaf.name), b)
        return w.type_text(leaf.type), f"{old} -> {new}" if old != new else ""

    every = [*before.values(), *(leaf for name, leaf in after.items() if name not in before)]
    changed = [leaf for leaf in every if change(leaf)[1]]
    rows = []
    for group in group_leaves(changed, change):
        names = [leaf.name for leaf in group]
        sizes = [
            sum(leaves[name].local.bytes for name in names if name in leaves)
            for leaves in (before, after)
        ]
        name = pattern(names) + (f" ({len(names)})" if names[1:] else "")
        text = " -> ".join(map(w.bytes_text, sizes))
        rows.append((max(sizes), (name, *change(group[0]), text)))
    title = f"{what}: {len(changed)} of {len(every)} lie otherwise"
    return _some_rows(title, rows)


def _changed_values(a: Facts, b: Facts) -> w.Lines:
    """Yields lines on ops whose results are sharded differently in `b`, by op and source line."""

    def shardings(plan: Plan) -> dict[tuple[str, str, str], tuple[str, int]]:
        """Maps (op, type, source line) to (shardings as text, bytes of the largest piece)."""
        # What copies cost is among the collectives.
        inside = [value for value in values_inside(plan) if not value[0].startswith("copy for ")]
        alike = w.grouped(inside, lambda value: (value[0], w.type_text(value[1]), value[3]))
        return {
            key: (
                " and ".join(sorted({w.spec_text(s, plan.mesh) for _, _, s, _ in values})),
                max(local_type(type_, s, plan.mesh).bytes for _, type_, s, _ in values),
            )
            for key, values in alike.items()
        }

    # How many there are may differ by what is computed twice: only their shardings are compared.
    before, after = shardings(a.plan), shardings(b.plan)
    rows = []
    for op, type_, source in dict.fromkeys([*before, *after]):
        key = op, type_, source
        (old, held), (new, holds) = before.get(key, ("none", 0)), after.get(key, ("none", 0))
        if old != new:
            place = w.source_text(source).partition(" <- ")[0]
            rows.append((max(held, holds), (op, type_, place, f"{old} -> {new}")))
    title = f"values inside: {len(rows)} kinds lie otherwise, the largest first"
    return _some_rows(title, rows, MOST_CHANGES // 2)


def _changed_collectives(a: Iterable[costs.Collective], b: Iterable[costs.Collective]) -> w.Lines:
    """Yields the collectives that `b` adds (+), removes (-), resizes (~), by layer and place."""

    def place(c: costs.Collective) -> tuple[str, str, str]:
        return c.layer, c.source, f"{c.kind} over {', '.join(c.axes)}"

    def text(total: costs.Total) -> str:
        sent, seconds = w.bytes_text(total.bytes), w.seconds_text(total.seconds)
        return f"{w.plural(total.runs, 'run')}, {sent}, {seconds}"

    # What never runs is not there.
    before, after = (costs.totals((c for c in run if c.count), place) for run in (a, b))
    changes = []  # (layer, source line, bytes, row)
    for key in dict.fromkeys([*before, *after]):
        (layer, source, what), old, new = key, before.get(key), after.get(key)
        if not (old and new and (old.runs, old.bytes) == (new.runs, new.bytes)):
            sign = "~" if old and new else "+" if new else "-"
            figures = " -> ".join(text(total) for total in (old, new) if total)
            size = abs((new.bytes if new else 0) - (old.bytes if old else 0))
            changes.append((layer, source, size, (sign, what, figures)))
    signs = [sign for *_, (sign, _, _) in changes]
    words = {"+": "added", "-": "removed", "~": "resized"}
    counts = [f"{signs.count(sign)} {word}" for sign, word in words.items() if sign in signs]
    places = list(w.grouped(changes, lambda change: change[:2]).items())
    places.sort(key=lambda place: -sum(size for _, _, size, _ in place[1]))
    lines: list[str] = []
    for (layer, source), alike in places[:MOST_CHANGES]:
        line = w.source_text(source) or "no source line"
        is_said = all(f"({name})" in line for name in layer.split("/"))  # functions, no scope
        lines.append(line if is_said or not layer else f"{layer}, {line}")
        lines += [f"  {row}" for row in w.aligned(sorted(row for *_, row in alike))]
    if len(places) > MOST_CHANGES:
        lines.append(f"and at {len(places) - MOST_CHANGES} more places")
    return w.section(f"collectives: {', '.join(counts)}", lines)


def _some_rows(
    title: str, sized: Iterable[tuple[int, Sequence[str]]], most: int = MOST_CHANGES
) -> w.Lines:
    rows = [row for _, row in sorted(sized, key=lambda row: -row[0])]
    more = [f"and {len(rows) - most} more"] if len(rows) > most else []
    return w.section(title, w.aligned(rows[:most]) + more)
