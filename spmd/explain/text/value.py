"""The report about one value as text: which values a name stands for, and each of them."""

from __future__ import annotations

import difflib
import fnmatch
import re

from spmd.compiler import Stages
from spmd.errors import ArgumentError
from spmd.explain.prices import Prices
from spmd.explain.text.reasons import value_lines
from spmd.explain.words import value_name
from spmd.ir.program import Op, Program, Value
from spmd.mesh.sharding import Sharding
from spmd.planning.plan import Plan


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
        for line in value_lines(plan, title, value, sharding, prices)
    ]
    if len(found) > MOST_VALUES:
        lines.append(f"{len(found) - MOST_VALUES} more {rest}")
    return "\n".join(lines).rstrip() + "\n"


MOST_VALUES = 8
"""Values that one pattern or source line shows."""

Found = list[tuple[str, Value, Sharding | None]]
"""(title, value, what it lies in) of values that are asked for."""


def _named(plan: Plan, name: str) -> Found:
    """Arguments and results of this name, or that match it as a pattern."""
    program = plan.program
    arguments = zip(program.arg_names, program.body.args, plan.arguments, strict=True)
    results = zip(program.result_names, program.body.results, plan.results, strict=True)
    boundary = [("argument", *leaf) for leaf in arguments] + [("result", *leaf) for leaf in results]
    fitting = [leaf for leaf in boundary if leaf[1] == name]
    fitting = fitting or [leaf for leaf in boundary if fnmatch.fnmatchcase(leaf[1], name)]
    return [(f"{what} {label} (%{value})", value, s) for what, label, value, s in fitting]


def _numbered(plan: Plan, name: str) -> Found:
    """The value of a number, as in `%12`."""
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
