"""What must hold of a program at each stage, as a table of small checks.

A failure is a bug of the stage that made the program, never the user's fault. Checking a program
takes time proportional to the number of its ops.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from spmd.errors import LegalityError
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK
from spmd.ir.program import Body, Op, Program, Region, Value
from spmd.ir.text import format_op
from spmd.ir.types import TensorType

DIALECTS = ("stablehlo", "chlo", "spmd")


def fail(stage: str, check: str, problem: str, op: Op | None = None) -> NoReturn:
    """Raises LegalityError: the program that stage `stage` made does not pass check `check`."""
    raise LegalityError(
        f"stage {stage} broke its contract ({check}): {problem}",
        op=format_op(op) if op else None,
        source=op.loc.source if op else None,
        fix="this is a bug in spmd: please report it, with the program",
    )


def hold(
    stage: str, checks: Iterable[Callable[..., str | None]], op: Op | None, *given: object
) -> None:
    """Calls each check as `check(*given)`; raises LegalityError for the first that returns text."""
    for check in checks:
        problem = check(*given)
        if problem is not None:
            fail(stage, check.__name__, problem, op)


class View(NamedTuple):
    """What a check of one op may read: the type of every value, and which values are defined."""

    types: Sequence[TensorType]  # type of every value
    defined: set[Value]  # values that have a definition so far, visible or not
    visible: set[Value]  # values that the op may read
    around: list[str]  # what the regions around it are (`Description.region`), outermost first


OpCheck = Callable[[View, Op], str | None]

_Types = tuple[TensorType, ...]
_PREDICATE = TensorType((), "i1")


# ---------------------------------------------------------------------------------------------
# Checks of one op.


def defines_once(view: View, op: Op) -> str | None:
    """Returns a problem if the op defines a value twice, again, or without a type; else None."""
    return _once(view, op.results)


def reads_visible(view: View, op: Op) -> str | None:
    """Returns a problem if an operand is not defined before the op and visible to it; else None."""
    return _visible(view, op.operands)


def kind_has_types(view: View, op: Op) -> str | None:
    """Returns a problem if operands or results have other types than the op's kind; else None."""
    sides = ("operand", op.operands, op.kind.operands), ("result", op.results, op.kind.results)
    for what, values, types in sides:
        if len(values) != len(types):
            return f"{len(values)} {what}s, but its kind has {len(types)}"
        for i, (value, type_) in enumerate(zip(values, types, strict=True)):
            if view.types[value] != type_:
                return f"{what} {i} is %{value}: {view.types[value]}, but its kind says {type_}"
    return None


def regions_fit(view: View, op: Op) -> str | None:
    """Returns a problem if number or types of the op's regions are wrong for it; else None."""
    # Types of operands and results; name, types of arguments and of results of each region.
    about, operands, results = op.kind.about, op.kind.operands, op.kind.results
    regions: list[tuple[str, _Types, _Types]] = []
    if about.region == "loop":  # what it carries goes in, through both regions, and out
        results = operands
        regions = [("the condition", operands, (_PREDICATE,)), ("the body", operands, operands)]
    elif about.region == "branches":
        selector = TensorType((), about.selector)
        count = 2 if selector == _PREDICATE else max(1, len(op.regions))
        operands, regions = (selector,), [(f"branch {i}", (), results) for i in range(count)]
    elif about.region == "manual":
        operands, regions = (), [("the body", (), results)]
    ends = ("operands", op.kind.operands, operands), ("results", op.kind.results, results)
    for what, have, wanted in ends:
        if have != wanted:
            return f"its {what} are not ({', '.join(map(str, wanted))})"
    if len(op.regions) != len(regions):
        names = ", ".join(name for name, _, _ in regions) or "none: it is not control flow"
        return f"{len(op.regions)} regions instead of {names}"
    for region, (name, taken, given) in zip(op.regions, regions, strict=True):
        sides = ("arguments", region.args, taken), ("results", region.results, given)
        for what, values, types in sides:
            have = tuple(view.types[v] for v in values)
            if have != types:
                said, asked = (", ".join(map(str, side)) for side in (have, types))
                return f"the {what} of {name} are ({said}) instead of ({asked})"
    return None


def dialect_known(view: View, op: Op) -> str | None:
    """Returns a problem if the op is of no dialect in `DIALECTS`; else None."""
    dialect = op.name.partition(".")[0]
    return None if dialect in DIALECTS else f"the dialect {dialect} is none of {DIALECTS}"


def is_global(view: View, op: Op) -> str | None:
    """Returns a problem if the op is local, manual in no manual region, or lacks its axes."""
    if op.kind.about.is_local:
        return "an op of one device's program in the whole program"
    if op.kind.about.is_manual and "manual" not in view.around:
        return "an op of one device's program outside any manual region"
    return _axes_known(op)


def is_local(view: View, op: Op) -> str | None:
    """Returns a problem if the op is a mark, a manual region or a collective without axes."""
    if op.kind.about.is_global:
        return "an op of the whole program in one device's program"
    return _axes_known(op)


def _axes_known(op: Op) -> str | None:
    lacks = op.collective and "axes" not in op.kind.attrs
    return "a collective without axes" if lacks else None


def is_expanded(view: View, op: Op) -> str | None:
    """Returns a problem if the op is an `spmd` op other than those of callbacks; else None."""
    own = op.name.startswith("spmd.") and op.name not in (CALLBACK, CHECK_CALLBACK)
    return "an op that only spmd knows" if own else None


def _once(view: View, values: Sequence[Value]) -> str | None:
    if len(set(values)) != len(values):
        return f"%{next(v for v in values if values.count(v) > 1)} is defined twice"
    for value in values:
        if not 0 <= value < len(view.types):
            return f"%{value} has no type"
        if value in view.defined:
            return f"%{value} is defined twice"
    return None


def _visible(view: View, values: Sequence[Value]) -> str | None:
    for value in values:
        if value not in view.visible:
            where = "before its definition or outside its region"
            return f"%{value} is read {where if value in view.defined else 'but not defined yet'}"
    return None


# ---------------------------------------------------------------------------------------------
# The tables, and the walk.
#
# The walk visits ops in program order and keeps two sets of values. `defined` only grows, so that a
# number is never used twice, not even in two regions that don't see each other. `visible` shrinks
# again when a region ends:
#
#   %1 = while %0 { cond(%2): %3 = compare %2; body(%4): %5 = add %4 }
#
#                    defined          visible
#   in the condition 0 2 3            0 2 3
#   in the body      0 2 3 4 5        0 4 5          reading %3 here is an error
#   behind the loop  0 1 2 3 4 5      0 1
#
# A loop's own results count as defined only after its regions: a body that reads %1 is refused.

_ALWAYS: tuple[OpCheck, ...] = (defines_once, reads_visible, kind_has_types, dialect_known)

STAGES: Mapping[str, tuple[OpCheck, ...]] = {
    "program": (*_ALWAYS, is_global),
    "local": (*_ALWAYS, is_local),
    "optimized": (*_ALWAYS, is_local),
    "expanded": (*_ALWAYS, is_local, is_expanded),
}
"""Maps each stage to the checks of every op. `regions_fit` is made at all stages, after these."""


def check_program(program: Program, stage: str = "program") -> None:
    """Raises LegalityError if a program is not as its stage must leave it; it names check and op.

    `stage` is `program` for a global program; `local`, `optimized` or `expanded` for a local one.
    """
    for what, values, names in (
        ("argument", program.body.args, program.arg_names),
        ("result", program.body.results, program.result_names),
    ):
        if len(values) != len(names):
            fail(stage, "names", f"{len(values)} {what}s have {len(names)} names")
    _check_region(program.body, None, stage, View(program.types, set(), set(), []), set())


def _check_region(
    region: Region, owner: Op | None, stage: str, view: View, bodies: set[int]
) -> None:
    """Checks a region and all inside it; its values are in `view.visible` only meanwhile."""
    if problem := _once(view, region.args):
        fail(stage, "arguments_defined_once", problem, owner)
    view.defined.update(region.args)
    view.visible.update(region.args)
    for op in region.ops:
        hold(stage, STAGES[stage], op, view, op)
        for body in op.kind.attrs.values():
            # A body is a closed program of its own, one object in thousands of ops: checked anew
            # for each of them, the walk would not be linear in the number of ops.
            if isinstance(body, Body) and id(body) not in bodies:
                bodies.add(id(body))
                _check_region(body.region, op, stage, View(body.types, set(), set(), []), bodies)
        view.around.append(op.kind.about.region)
        for inner in op.regions:
            _check_region(inner, op, stage, view, bodies)
        view.around.pop()
        hold(stage, (regions_fit,), op, view, op)
        view.defined.update(op.results)
        view.visible.update(op.results)
    if problem := _visible(view, region.results):
        fail(stage, "results_visible", problem, owner)
    view.visible.difference_update(region.args)
    for op in region.ops:
        view.visible.difference_update(op.results)
