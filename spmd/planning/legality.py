"""Checks of a plan, on which the partitioner relies: each returns None, or a text if it fails."""

from collections.abc import Callable

from spmd.ir.dialect.registry import rule_of
from spmd.ir.legality import fail, hold
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Mark, Sharding, format_axes, format_sharding, is_legal
from spmd.planning.plan import Choice, Plan
from spmd.propagation.projection import is_legal_assignment, project, reduced_axes
from spmd.reshard.paths import can_reshard


def check_plan(plan: Plan) -> None:
    """Raises a `LegalityError` for the first check of this file that a plan fails, with the op."""
    hold("planned", PLAN_CHECKS, None, plan)
    for op in plan.program.walk():
        if op.results and plan.propagated.cheap.issuperset(op.results):
            continue
        choice = plan.choices.get(op.results[0]) if op.results else None
        if choice is None:
            fail("planned", "has_choice", "an op that is not cheap has no choice", op)
        hold("planned", REGION_OP_CHECKS if op.regions else OP_CHECKS, op, plan, op, choice)


def states_are_legal(plan: Plan) -> str | None:
    """Returns None if every state has its value's rank and uses no atom twice, else what is wrong.

    Atoms need not divide dims. Values without a state (unused, or recomputed at each use) pass.
    """
    types = plan.program.types
    if len(plan.states) != len(types):
        return f"{len(plan.states)} states for {len(types)} values"
    for value, (state, type_) in enumerate(zip(plan.states, types, strict=True)):
        if state is not None and not is_legal(state, type_.shape, plan.mesh, even=False):
            return f"%{value}: {type_} is {format_sharding(state, plan.mesh)}"
    return None


def held_atoms_are_left_alone(plan: Plan) -> str | None:
    """Returns which value in a `shard_map` is split or partial over its manual axes, or None."""
    for value, held in plan.problem.index.held.items():
        state = plan.states[value]
        if state is not None and not state.used.isdisjoint(held):
            text = format_sharding(state, plan.mesh)
            return f"%{value} is {text} where {format_axes(held, plan.mesh)} is held"
    return None


def arguments_fit(plan: Plan) -> str | None:
    """Returns None if arguments' shardings fit, are not partial and are their states; else why."""
    args = plan.program.body.args
    if problem := _boundary(plan, "argument", args, plan.arguments):
        return problem
    for value, sharding in zip(args, plan.arguments, strict=True):
        if plan.states[value] != sharding:
            return f"argument %{value} is not in the sharding of its value"
    return None


def results_fit(plan: Plan) -> str | None:
    """Returns None if every result's sharding divides it and is not partial, else what is wrong."""
    return _boundary(plan, "result", plan.program.body.results, plan.results)


def marks_hold(plan: Plan) -> str | None:
    """Returns None if marked values are split as marked, else which dim is not.

    A closed dim has exactly the marked axes; an open one begins with them. A result's mark holds
    for what is returned, not for the value, which may be returned twice.
    """
    program = plan.program
    owners = {v for op in program.walk() if op.is_mark for v in op.results}
    owners |= set(program.body.args)
    for value, mark in plan.propagated.marks.items():
        if value in owners:
            state = plan.states[value]
            problem = _against(plan, mark, state) if state else "has no state"
        else:
            returned = zip(program.body.results, plan.results, strict=True)
            found = [_against(plan, mark, s) for v, s in returned if v == value]
            problem = None if None in found else next(iter(found), None)
        if problem:
            return f"%{value} {problem} ({mark.reason})"
    return None


def _against(plan: Plan, mark: Mark, have: Sharding) -> str | None:
    if have.partial:
        return f"is marked and {format_sharding(have, plan.mesh)}"
    for dim, (wanted, is_open) in enumerate(zip(mark.dims, mark.open, strict=True)):
        axes = have.dims[dim]
        if axes != wanted and not (is_open and axes[: len(wanted)] == wanted):
            marked, found = format_axes(wanted, plan.mesh), format_axes(axes, plan.mesh)
            return f"dim {dim} is marked {marked} and is {found}"
    return None


def _boundary(
    plan: Plan, what: str, values: tuple[Value, ...], shardings: tuple[Sharding, ...]
) -> str | None:
    if len(values) != len(shardings):
        return f"{len(shardings)} shardings for {len(values)} {what}s"
    for i, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
        type_, text = plan.program.types[value], format_sharding(sharding, plan.mesh)
        if not is_legal(sharding, type_.shape, plan.mesh):
            return f"{what} {i}, {text}, does not fit {type_}"
        if sharding.partial:
            return f"{what} {i}, {text}, is partial"
    return None


def choice_has_arity(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if a choice has a sharding for each operand and result, else both counts."""
    have = len(choice.operands), len(choice.results)
    need = len(op.operands), len(op.results)
    return None if have == need else f"shardings for {have} operands and results, not {need}"


def shardings_fit_types(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if a choice's shardings have their types' ranks and no atom twice, else why."""
    types = op.kind.operands + op.kind.results
    for sharding, type_ in zip(choice.operands + choice.results, types, strict=True):
        if not is_legal(sharding, type_.shape, plan.mesh, even=False):
            return f"{format_sharding(sharding, plan.mesh)} does not fit {type_}"
    return None


def results_are_states(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if a choice's shardings of results are their states, else which one is not."""
    for value, sharding in zip(op.results, choice.results, strict=True):
        if plan.states[value] != sharding:
            return f"%{value} is left {format_sharding(sharding, plan.mesh)}, not in its state"
    return None


def partials_exist(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if operands needed partial are or can be made so, else which one cannot."""
    for value, sharding in zip(op.operands, choice.operands, strict=True):
        if not sharding.kind:
            continue
        if not can_reshard(plan.states[value] or sharding.full(), sharding):
            return f"%{value} is needed {format_sharding(sharding, plan.mesh)} and is never so"
    return None


def assignment_is_legal(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if the op's rule allows the assignment (no atom on two factors), else a text."""
    rule = rule_of(op.kind, op.loc)
    if len(choice.assignment) != len(rule.factors):
        return f"{len(choice.assignment)} entries for the {len(rule.factors)} factors of {rule}"
    if is_legal_assignment(rule, choice.assignment, plan.mesh.atom_sizes):
        return None
    return f"{_assignment(plan, choice)} is not legal for {rule}"


def shardings_follow(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if a choice's shardings split dims as its assignment says, else which not."""
    rule = rule_of(op.kind, op.loc)
    sizes = plan.mesh.atom_sizes
    for dims, sharding in zip(rule.values, choice.operands + choice.results, strict=True):
        needed = project(rule, dims, choice.assignment, sizes)
        if needed.dims != sharding.dims:
            have, want = (format_sharding(s, plan.mesh) for s in (sharding, needed))
            return f"{have} instead of {want}, as {_assignment(plan, choice)} of {rule} says"
    return None


def partials_follow(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if a choice is partial as the op's rule allows, else what is wrong.

    Partial operands are one group in which the op is linear (both of an add, or one of a multiply),
    partial alike. Results are partial over these atoms and those of split reduce factors.
    """
    rule = rule_of(op.kind, op.loc)
    partial = tuple(i for i, s in enumerate(choice.operands) if s.partial)
    states = {(choice.operands[i].partial, choice.operands[i].kind) for i in partial} or {((), "")}
    if len(states) > 1:
        return "its operands are partial in different ways"
    ((carried, kind),) = states
    if partial and partial not in {tuple(sorted(group)) for group in rule.linear}:
        return f"operands {partial} are partial, it is linear in {rule.linear}"
    if partial and not rule.lets_through(kind):
        return f"a partial {kind} can't flow through it"
    if reduced_axes(rule, choice.assignment) and carried and kind != rule.reduction:
        return f"a partial {kind} meets a reduction by {rule.reduction}"
    if set(carried) & {a for axes in choice.assignment for a in axes}:
        return "it is split over atoms over which its operands are partial"
    for dims, sharding in zip(rule.results, choice.results, strict=True):
        owed = tuple(sorted((*carried, *reduced_axes(rule, choice.assignment, dims))))
        owed_kind = (kind or rule.reduction) if owed else ""
        if (sharding.partial, sharding.kind) != (owed, owed_kind):
            have = format_sharding(sharding, plan.mesh)
            return f"a result is {have}, but owes {owed_kind} {format_axes(owed, plan.mesh)}"
    return None


def _assignment(plan: Plan, choice: Choice) -> str:
    return "(" + ", ".join(format_axes(axes, plan.mesh) for axes in choice.assignment) + ")"


def carries_agree(plan: Plan, op: Op, choice: Choice) -> str | None:
    """Returns None if each loop carry comes in, stays and goes out in one sharding, else which."""
    if not op.is_loop:
        return None
    for i in range(len(op.results)):
        if choice.operands[i] != choice.results[i]:
            return f"carry {i} comes in and goes out in two shardings"
        for region in op.regions:
            if plan.states[region.args[i]] != choice.results[i]:
                return f"%{region.args[i]} is not in the sharding of carry {i}"
    return None


PLAN_CHECKS: tuple[Callable[[Plan], str | None], ...] = (
    states_are_legal,
    held_atoms_are_left_alone,
    arguments_fit,
    results_fit,
    marks_hold,
)
_EVERY_OP: tuple[Callable[[Plan, Op, Choice], str | None], ...] = (
    choice_has_arity,
    shardings_fit_types,
    results_are_states,
    partials_exist,
)
OP_CHECKS = (*_EVERY_OP, assignment_is_legal, shardings_follow, partials_follow)
REGION_OP_CHECKS = (*_EVERY_OP, carries_agree)
