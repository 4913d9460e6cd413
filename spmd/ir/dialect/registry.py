"""Functions that add descriptions of ops to `DESCRIPTIONS`, and that look up rules there."""

import re
from collections.abc import Callable
from typing import Any

from spmd.errors import SpmdError, UnsupportedOpError
from spmd.ir.description import DESCRIPTIONS, UNKNOWN, UNKNOWN_CALL, Description, rule_name
from spmd.ir.dialect.rule import Rule, whole
from spmd.ir.program import Loc, OpKind
from spmd.ir.types import is_integer, types_text

RuleFunction = Callable[[OpKind], Rule]


def describe(description: Description, *names: str, dialect: str = "stablehlo") -> None:
    """Adds a description of several ops of a dialect; SpmdError if one of them has one already."""
    for key in [f"{dialect}.{name}" if dialect else name for name in names]:
        if key in DESCRIPTIONS:
            fix = "leave the second one out, or name it otherwise"
            raise SpmdError(f"op {key} already has a rule", fix=fix)
        DESCRIPTIONS[key] = description


def op(*names: str, **traits: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Returns a decorator that describes ops: the function is their rule, `traits` other fields."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            base = UNKNOWN_CALL if name.startswith("custom_call:") else UNKNOWN
            describe(base._replace(rule=function, **traits), name, dialect="")
        return function

    return register


TAUGHT: set[str] = set()
"""Names in modules of ops that code outside `spmd` registered; programs with one are not cached."""


def _registration(name: str, kind: OpKind) -> str:
    """Returns a text: how to register a rule for an op, for all its uses or by this one's dims."""
    text, *_ = str(whole(kind)).partition(" {")
    dims = "".join(re.findall(r"\w", text))
    fix = f"to run it whole on every device: spmd.register_rule({name!r}, 'whole')"
    if len(dims) == sum(t.rank for t in (*kind.operands, *kind.results)):  # a letter for each
        fix += (
            f"; or say what may be split, beginning with this rule, by which nothing may: "
            f"spmd.register_rule({name!r}, {text!r}, kinds=dict.fromkeys({dims!r}, 'replicate'))"
        )
    return fix


def rule_of(kind: OpKind, loc: Loc | None = None) -> Rule:
    """Returns an op's sharding rule, cached; UnsupportedOpError if it has no rule or no results."""
    found: Rule | None = kind._cache.get("rule")
    if found is None:
        name, function = rule_name(kind), kind.about.rule
        if function is None or not kind.results:
            raise UnsupportedOpError(
                f"no sharding rule for op {name}",
                op=f"{name}{types_text(kind.operands)} -> {', '.join(map(str, kind.results))}",
                source=loc.source if loc else None,
                fix=_registration(name, kind)
                if kind.results
                else "let it return a value: plans are about results",
            )
        found = function(kind)
        # A sum of narrow integers wraps around where the sum of what becomes of its terms does not.
        wraps = {
            i
            for i, t in enumerate(kind.operands)
            if is_integer(t.dtype) and t.dtype != kind.results[0].dtype
        }
        linear = tuple(group for group in found.linear if wraps.isdisjoint(group))
        found = kind._cache["rule"] = found._replace(linear=linear)
    return found
