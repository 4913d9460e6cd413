"""The report about one value as text: which values a name stands for, and each of them."""

from __future__ import annotations

import difflib
import fnmatch
import re

from spmd.errors import ArgumentError
from spmd.explain.prices import Prices
from spmd.explain.text.reasons import value_lines
from spmd.explain.words import value_name
from spmd.ir.program import Op, Program, Value
from spmd.pipeline import Stages


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
        found += value_lines(stages, f"{what} {label} (%{value})", value, sharding, prices)
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
    return value_lines(stages, title, number, stages.plan.states[number], prices)


def _number(name: str, limit: int) -> int | None:
    digits = name.removeprefix("%")
    if not digits.isdecimal() or int(digits) >= limit:
        return None
    return int(digits)


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
        found += value_lines(stages, title, value, plan.states[value], prices)
    if len(alike) > MOST_VALUES:
        found.append(f"{len(alike) - MOST_VALUES} more are made at {name}")
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
