"""Writes reports as text: on a program, long or short, on one value, and on two plans."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence

from spmd.compiler import Stages
from spmd.errors import ArgumentError
from spmd.explain import costs
from spmd.explain import words as w
from spmd.explain.data import Leaf, PlanReport
from spmd.explain.facts import CLOSE, Facts, boundary, group_leaves, pattern, split_text
from spmd.explain.memory import recomputed
from spmd.explain.prices import Prices, Relief, costly_text, mark_groups, relief_of
from spmd.explain.steps import pipeline_rows
from spmd.ir.program import Value
from spmd.ir.types import local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.plan import Plan
from spmd.reshard.comm import wire_bytes

MOST_VALUES = 8  # values that one pattern or source line shows
MOST_CHANGES = 12  # rows of each part of a difference that are shown, the largest


def explain_program(report: PlanReport) -> str:
    """Returns the long report on a program: what costs most, shardings and why, traffic, memory."""
    whole = report.timeline.seconds
    title, most = costs.largest(report.costs, whole)
    rows = [
        (w.share_text(cost.seconds, whole), w.seconds_text(cost.seconds), cost.title, cost.remark)
        for cost in most
    ]
    opening: list[str] = []
    for head, cost in zip(w.aligned(rows, right=(0, 1)), most, strict=True):
        why = [w.source_text(cost.reason)] if cost.reason else []
        lines = costs.code_lines(cost, report.code)
        why += w.aligned([(w.source_text(place), text) for place, text in lines])
        opening += [head, *(f"    {line}" for line in why)]
    parts = (w.section(title, opening), *(part.lines() for part in report.sections))
    return _joined([line for lines in parts for line in lines], report.mesh)


def _joined(lines: Sequence[str], *meshes: Mesh) -> str:
    """Joins lines to one text, and says below them what parts of axes in it (`data:(2)4`) are."""
    parts = w.section("parts of axes", w.parts_of_axes("\n".join(lines), *meshes))
    return "\n".join([*lines, *parts]).rstrip() + "\n"


def summarize(facts: Facts, costly: Relief | None = None) -> str:
    """Returns the short report on a program; a note warns of the marks `costly`, if given."""
    plan, rows, (arguments, constants, _) = facts.plan, dict(facts.memory), facts.leaves
    split = [leaf for leaf in arguments if any(leaf.sharding.dims)]
    inferred = sum(leaf.origin != "marked" for leaf in split)
    # The shardings of which each device holds the most, with how many arguments have them.
    alike = w.grouped(arguments, lambda leaf: leaf.spec)
    sized = [(sum(x.local.bytes for x in leaves), spec, leaves) for spec, leaves in alike.items()]
    shardings = [
        (spec, f"{len(leaves)} arguments", f"{w.bytes_text(held)} per device")
        for held, spec, leaves in sorted(sized, key=lambda row: -row[0])[:6]
    ]
    memory = f"{rows['peak, predicted']} predicted, {rows['temporary']} of it temporary: "
    found = [
        ("arguments", f"{split_text(arguments)} ({inferred} inferred); {rows['arguments']}"),
        *(("", line) for line in w.aligned(shardings)),
        *([("constants", f"{split_text(constants)}; {rows['constants']}")] if constants else []),
        ("collectives", costs.collective_section(facts.collectives).remark),
        *(("", line) for line in costs.traffic_table(facts.collectives).first(8).lines()),
        ("memory", memory + rows["on the device"]),
        ("time", facts.time_text),
        *([("plan", "as an earlier start made it")] if facts.stages.is_read else []),
        *([("measured", facts.measured.title)] if facts.measured is not None else []),
        *([("made again", recomputed(facts.stages).remark)] if plan.recomputed else []),
        *(("pipeline", f"{x.title}: {x.item.rows[0][1]}") for x in pipeline_rows(facts.stages)),
        *(("form", form.text) for form in plan.forms if not form.refusal),
    ]
    if plan.choices and plan.idle_axes:
        found.append(("note", w.idle_text(plan.idle_axes)))
    if costly is not None:
        found.append(("note", costly_text(costly, plan.mesh)))
    parts = w.parts_of_axes("\n".join(text for _, text in found), plan.mesh)
    lines = [
        f"  {name:11}  {text}" if name else f"    {text}"
        for name, text in (*found, *(("note", part) for part in parts))
    ]
    head = f"spmd: {plan.mesh.size} devices ({plan.mesh}) on {plan.topology}"
    return "\n".join([head, *lines]) + "\n"


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
        f"predicted {w.seconds_text(facts.stages.timeline.seconds)}",
    )
    return f"<spmd.{what} {facts.name} on {mesh} ({mesh.size} {chip}): {', '.join(figures)}>"


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
    """Returns (title, value, sharding) of what fits, and the end of `2 more match 'params/*'`."""
    # An argument or a result of this name, or those that match it as a pattern.
    ends = boundary(plan)
    fitting = [end for end in ends if end[1] == name]
    fitting = fitting or [end for end in ends if fnmatch.fnmatchcase(end[1], name)]
    if fitting:
        return [(f"{what} {x} (%{v})", v, s) for what, x, v, s in fitting], f"match {name!r}"
    program, digits = plan.program, name.removeprefix("%")
    if digits.isdecimal() and int(digits) < len(program.types):
        return [(f"value {name}", int(digits), plan.states[int(digits)])], ""
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
        group = next(group for group in mark_groups(plan) if value in group.values)
        relief, more = relief_of(plan, group, prices.options), len(group.values) - 1
        alike = f" and the {more} made with it" if more else ""
        yield f"without this mark{alike}: {relief.price.text}"
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
    program, type_, mesh = plan.program, plan.program.types[value], plan.mesh
    for op, i in plan.problem.index.users.get(value, ()):
        wanted = None
        if op is not None:
            label = f"operand {i} of {op.label}"
            label += f" at {w.source_text(op.loc.trail)}" if op.loc.frames else ""
            if op.results and op.results[0] in plan.choices:
                wanted = plan.choice(op).operands[i]
        elif program.body.results[i : i + 1] == (value,):
            label, wanted = f"result {program.result_names[i]}", plan.results[i]
        else:
            label = f"result {i} of the body or condition of a loop, or of a branch"
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


# Two plans side by side: what changed, and what that costs.


def diff_text(a: PlanReport, b: PlanReport) -> str:
    """Returns what differs between two plans, as text; see `spmd.explain.diff`."""
    changes = (
        _changed_leaves("arguments", a.arguments, b.arguments),
        _changed_leaves("results", a.results, b.results),
        _changed("values inside", _inside(a), _inside(b), MOST_CHANGES // 2),
        _changed("collectives", _sent(a), _sent(b)),
    )
    lines = [line for lines in changes for line in lines] or ["nothing changed"]
    return _joined([*_changed_costs(a, b), *lines], a.mesh, b.mesh)


def _changed_costs(a: PlanReport, b: PlanReport) -> w.Lines:
    about = [(key, f.title, f"{f.mesh} on {f.machine.name}") for key, f in (("a", a), ("b", b))]
    rows = [("", "a", "b", "b - a")]

    def compare(what: str, old: float, new: float, text: Callable[[float], str]) -> None:
        share = f" ({(new - old) / old:+.1%})" if old else ""
        change = f"{'-' if new < old else '+'}{text(abs(new - old))}{share}"
        rows.append((what, text(old), text(new), "the same" if old == new else change))

    compare("predicted time", a.timeline.seconds, b.timeline.seconds, w.seconds_text)
    if a.measured_seconds and b.measured_seconds:
        compare("measured time", a.measured_seconds, b.measured_seconds, w.seconds_text)
    compare("sent by each device", a.sent_bytes, b.sent_bytes, w.bytes_text)
    compare("peak memory, predicted", a.peak_bytes, b.peak_bytes, w.bytes_text)
    return w.section("programs", [*w.aligned(about), *w.aligned(rows, right=(1, 2, 3))])


Lying = dict[tuple[str, ...], tuple[str, int]]  # what something is -> (how it lies, its bytes)


def _changed(title: str, before: Lying, after: Lying, most: int = MOST_CHANGES) -> w.Lines:
    """Yields a heading and lines on the `most` largest keys whose text changed; nothing if none."""
    every, none = list(dict.fromkeys([*before, *after])), ("none", 0)
    sized = [
        (max(old[1], new[1]), (*key, f"{old[0]} -> {new[0]}"))
        for key in every
        if (old := before.get(key, none))[0] != (new := after.get(key, none))[0]
    ]
    rows = [row for _, row in sorted(sized, key=lambda row: -row[0])]
    more = [f"and {len(rows) - most} more"] if len(rows) > most else []
    heading = f"{title}: {len(rows)} of {len(every)} kinds differ"
    return w.section(heading, w.aligned(rows[:most]) + more)


def _changed_leaves(what: str, *leaves: Sequence[Leaf]) -> w.Lines:
    """Yields lines on leaves whose sharding differs; the title has `what`: arguments or results."""
    both = before, after = [{leaf.name: leaf for leaf in own} for own in leaves]

    def look(leaf: Leaf) -> object:
        return leaf.type, *(own[leaf.name].spec if leaf.name in own else None for own in both)

    found: tuple[Lying, Lying] = {}, {}
    for group in group_leaves((before | after).values(), look):
        names = [leaf.name for leaf in group]
        name = pattern(names) + (f" ({len(names)})" if names[1:] else "")
        for lying, own in zip(found, both, strict=True):
            if names[0] in own:
                size = sum(own[name].local.bytes for name in names)
                lying[name, w.type_text(group[0].type)] = own[names[0]].spec, size
    return _changed(what, *found)


def _inside(report: PlanReport) -> Lying:
    """Maps (op, type, source line) to (its results' shardings as text, largest local bytes)."""
    # What copies cost is among the collectives. How many there are may differ by what is computed
    # twice: only their shardings are compared.
    inside = [value for value in report.inside if not value.op.startswith("copy for ")]
    alike = w.grouped(
        inside, lambda v: (v.op, w.type_text(v.type), w.source_text(v.source).partition(" <- ")[0])
    )
    return {
        key: (
            " and ".join(sorted({value.spec for value in values})),
            max(value.local.bytes for value in values),
        )
        for key, values in alike.items()
    }


def _sent(report: PlanReport) -> Lying:
    """Maps (kind and axes, layer, source line) to (collectives' runs and bytes as text, bytes)."""
    alike = costs.totals(
        (c for c in report.collectives if c.count),  # what never runs is not there
        lambda c: (f"{c.kind} over {', '.join(c.axes)}", c.layer, w.source_text(c.source)),
    )
    return {
        key: (f"{w.plural(total.runs, 'run')}, {w.bytes_text(total.bytes)}", total.bytes)
        for key, total in alike.items()
    }
