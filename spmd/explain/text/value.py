"""The report about one value as text: why each dim is split or not, and who reshards it."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator

from spmd.compiler import Stages
from spmd.errors import ArgumentError
from spmd.explain.document import Lines, aligned
from spmd.explain.facts import CLOSE
from spmd.explain.leaves import boundary
from spmd.explain.prices import Prices
from spmd.explain.words import axes_text, bytes_text, source_text, spec_text, type_text, value_name
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.types import local_type
from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Plan
from spmd.reshard.comm import wire_bytes

MOST_VALUES = 8  # values that one pattern or source line shows

Found = list[tuple[str, Value, Sharding | None]]
"""(title, value, what it lies in) of values that are asked for."""


def explain_value(stages: Stages, name: str, prices: Prices | None = None) -> str:
    """All about one value: its sharding, why each dim is split or not, and who reshards it.

    `name` is as for `Planned.explain`; without `prices` nothing is said of what else would cost.
    ArgumentError if no value has this name.
    """
    plan = stages.plan
    found = _named(plan, name) or _numbered(plan, name)
    rest = f"match {name!r}"
    if not found:
        found, rest = _at_line(plan, name), f"are made at {name}"
    if not found:
        raise _unknown(name, plan.program)
    lines = [
        line
        for title, value, sharding in found[:MOST_VALUES]
        for line in _value_lines(plan, title, value, sharding, prices)
    ]
    if len(found) > MOST_VALUES:
        lines.append(f"{len(found) - MOST_VALUES} more {rest}")
    return "\n".join(lines).rstrip() + "\n"


# ---------------------------------------------------------------------------------------------
# Which values a name stands for.


def _named(plan: Plan, name: str) -> Found:
    """Arguments and results of this name, or that match it as a pattern."""
    ends = boundary(plan)
    fitting = [end for end in ends if end[1] == name]
    fitting = fitting or [end for end in ends if fnmatch.fnmatchcase(end[1], name)]
    return [(f"{what} {label} (%{value})", value, s) for what, label, value, s in fitting]


def _numbered(plan: Plan, name: str) -> Found:
    digits = name.removeprefix("%")
    if not digits.isdecimal() or int(digits) >= len(plan.program.types):
        return []
    number, title = int(digits), f"value {name}"
    if number in plan.program.body.args:
        title = f"argument {value_name(plan.program, number)} ({name})"
    return [(title, number, plan.states[number])]


def _at_line(plan: Plan, name: str) -> Found:
    """What the ops of a source line make; results that are alike are shown once."""
    if not re.search(r":\d+$", name):
        return []
    alike: dict[object, list[tuple[Op, Value]]] = {}
    for op in plan.program.walk():
        places = [f"{frame.file}:{frame.line}" for frame in op.loc.user_frames[:2]]
        if any(place == name or place.endswith(f"/{name}") for place in places):
            for value in op.results:
                key = (op.label, plan.program.types[value], plan.states[value])
                alike.setdefault(key, []).append((op, value))
    found: Found = []
    for (op, value), *others in alike.values():
        more = f" and {len(others)} alike" if others else ""
        found.append((f"value %{value}, {op.label}{more}", value, plan.states[value]))
    return found


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


# ---------------------------------------------------------------------------------------------
# One of them.


def _value_lines(
    plan: Plan, title: str, value: Value, sharding: Sharding | None, prices: Prices | None
) -> Lines:
    """All about a value that lies so, under a title; None for one without a sharding of its own."""
    type_ = plan.program.types[value]
    yield f"{title}: {type_text(type_)}"
    if sharding is None:
        yield "  it costs nothing to make, so that every use makes its own copy as it wants it"
    else:
        yield from (f"  {line}" for line in _facts(plan, value, sharding))
        for dim in range(type_.rank):
            yield from (f"  {line}" for line in _dim(plan, value, sharding, dim))
        if prices is not None:
            yield from (f"  {line}" for line in _others(plan, value, prices))
    uses = list(_uses(plan, value, plan.states[value] or sharding))
    yield "  uses" if uses else "  no uses"
    yield from (f"    {line}" for line in uses)
    yield ""


def _facts(plan: Plan, value: Value, sharding: Sharding) -> list[str]:
    """How a value lies on the mesh, and where it comes from."""
    type_ = plan.program.types[value]
    local = local_type(type_, sharding, plan.mesh)
    rows = [
        ("sharding", spec_text(sharding, plan.mesh)),
        ("local", type_text(local)),
        ("per device", f"{bytes_text(local.bytes)} of {bytes_text(type_.bytes)}"),
    ]
    if (op := plan.problem.index.producers.get(value)) is not None:
        rows.append(("made by", f"{op.label} at {source_text(op.loc.trail)}"))
    if (mark := plan.propagated.marks.get(value)) is not None:
        rows.append(("mark", source_text(mark.reason)))
    if (state := plan.states[value]) is not None and state != sharding:
        rows.append(("as made", spec_text(state, plan.mesh)))
    return aligned(rows)


def _others(plan: Plan, value: Value, prices: Prices) -> Lines:
    """Why not otherwise: other shardings and what they would cost."""
    producer = plan.problem.index.producers.get(value)
    if producer is not None and producer.is_mark:
        relief = prices.without_mark(value)
        more = len(relief.marks.values) - 1
        alike = f" and the {more} made with it" if more else ""
        yield f"without this mark{alike}: {relief.price.run_text}"
        return
    others = prices.others(value)
    if not others:
        yield "no other state of it was weighed: nothing around it asks for one"
        return
    is_argument = value in plan.program.body.args
    how = "planned again with each" if is_argument else "the rest of the plan adapting"
    yield f"instead ({how}):"
    rows = [(spec_text(sharding, plan.mesh), price.text) for sharding, price in others]
    yield from (f"  {line}" for line in aligned(rows))
    if others[0][1].seconds < -CLOSE * plan.run_seconds:
        spec = spec_text(others[0][0], plan.mesh)
        is_marked = value in plan.propagated.marks
        why = "its mark forbids what is faster" if is_marked else "the planner did not find it"
        yield f"  {why}: mark it {spec}"


def _dim(plan: Plan, value: Value, sharding: Sharding, dim: int) -> Lines:
    """Why one dim is split over the axes that split it, and why not over the others."""
    size, axes = plan.program.types[value].shape[dim], sharding.dims[dim]
    if not axes:
        yield f"dim {dim} (size {size}) is not split"
        mark = plan.propagated.marks.get(value)
        if mark is not None and not mark.open[dim]:
            yield f"  closed by the mark: {source_text(mark.reason)}"
            return
        for name, atoms in plan.mesh.axis_atoms.items():
            if atoms:
                yield f"  {name}: {_why_not(plan, value, sharding, dim, name)}"
        return
    yield f"dim {dim} (size {size}) is split over {axes_text(axes, plan.mesh)}"
    chains: dict[tuple[str, ...], tuple[int, ...]] = {}
    for atom in axes:
        chain = tuple(map(source_text, plan.propagated.why(value, dim, atom)))
        chains[chain] = (*chains.get(chain, ()), atom)
    for chain, atoms in chains.items():
        yield f"  {axes_text(atoms, plan.mesh)}:"
        reasons = chain or ("no mark asks for it: the planner's choice",)
        yield from (f"    {reason}" for reason in reasons)


def _why_not(plan: Plan, value: Value, sharding: Sharding, dim: int, axis: str) -> str:
    """Why a dim that is not split is not split over an axis: the first reason that holds."""
    mesh, propagated = plan.mesh, plan.propagated
    atoms, size = mesh.axis_atoms[axis], plan.program.types[value].shape[dim]
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
        return f"{cause} suggests it; the planner chose otherwise"
    for conflict in propagated.conflicts:
        if any(v == value and d == dim for _, v, d in conflict.claims):
            where = source_text(conflict.op.loc.trail)
            return f"its neighbours disagree around {conflict.op.label} at {where}"
    return "no mark reaches it"


def _uses(plan: Plan, value: Value, state: Sharding | None) -> Lines:
    """Who reads a value in which sharding, and the collectives that it takes to get there."""
    for label, wanted in _wants(plan, value, plan.program.body, None):
        if wanted is None:
            yield label
            continue
        yield f"{label} takes it as {spec_text(wanted, plan.mesh)}"
        if state is not None and wanted != state:
            yield from (f"  {line}" for line in _steps(plan, value, state, wanted))


def _wants(
    plan: Plan, value: Value, region: Region, owner: Op | None
) -> Iterator[tuple[str, Sharding | None]]:
    """(who reads a value, in which sharding) of a region and those inside it, in program order."""
    for op in region.ops:
        choice = plan.choices.get(op.results[0]) if op.results else None
        for i, operand in enumerate(op.operands):
            if operand == value:
                where = f" at {source_text(op.loc.trail)}" if op.loc.frames else ""
                yield f"operand {i} of {op.label}{where}", choice.operands[i] if choice else None
        for inner in op.regions:
            yield from _wants(plan, value, inner, op)
    for i, result in enumerate(region.results):
        if result != value:
            continue
        if owner is None:
            yield f"result {plan.program.result_names[i]}", plan.results[i]
        elif owner.is_loop and region is owner.regions[0]:
            yield f"the condition of {owner.name}", None
        else:
            choice = plan.choices.get(owner.results[0])
            label = f"result {i} of the body of {owner.name}"
            yield label, choice.results[i] if choice else None


def _steps(plan: Plan, value: Value, state: Sharding, wanted: Sharding) -> Lines:
    """The collectives between two shardings; another copy that exists may make them cheaper."""
    type_, mesh = plan.program.types[value], plan.mesh
    if not set(wanted.partial) <= set(state.partial):
        yield "made from another copy"
        return
    for step in plan.problem.resharder.path(value, state, wanted).steps:
        before, after = (local_type(type_, s, mesh).bytes for s in (step.before, step.after))
        sent = wire_bytes(step.kind, mesh.extent(step.axes), before, after)
        what = f"{bytes_text(sent)} sent" if sent else "free"
        yield f"{step.kind} over {axes_text(step.axes, mesh)}: {what}"
