"""Functions that add descriptions of ops to `DESCRIPTIONS`, and that look up rules there."""

import re
from collections.abc import Callable
from typing import Any

from spmd.errors import SpmdError, UnsupportedOpError
from spmd.ir.description import (
    CUSTOM_CALL,
    DESCRIPTIONS,
    UNKNOWN,
    UNKNOWN_CALL,
    Description,
    key_of,
)
from spmd.ir.dialect.rule import Rule
from spmd.ir.program import Loc, OpKind
from spmd.ir.types import is_integer

RuleFunction = Callable[[OpKind], Rule]


def describe(description: Description, *names: str, dialect: str = "stablehlo") -> None:
    """Adds a description of several ops of a dialect; SpmdError if one of them has one already."""
    for key in [f"{dialect}.{name}" if dialect else name for name in names]:
        if key in DESCRIPTIONS:
            fix = "leave the second one out, or name it otherwise"
            raise SpmdError(f"op {key} already has a rule", fix=fix)
        DESCRIPTIONS[key] = description


def op(*names: str, **traits: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Returns a decorator that describes ops by the rule function and `traits`, other fields."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            base = UNKNOWN_CALL if name.startswith("custom_call:") else UNKNOWN
            describe(base._replace(rule=function, **traits), name, dialect="")
        return function

    return register


TAUGHT: set[str] = set()
"""Names in modules of ops that code outside `spmd` registered; programs with one are not cached."""


def registered_ops() -> tuple[str, ...]:
    """Returns the names of all ops with a rule, sorted."""
    return tuple(sorted(name for name, about in DESCRIPTIONS.items() if about.rule))


ALONE = "spmd.alone"  # attribute of a custom call: all axes of the mesh are manual where it is

# Keys of the rules for custom calls that have none of their own: of those that have batch dims, and
# of those that are `ALONE`, so that no axis is left to split them.
BATCHED_CALL = "custom_call:num_batch_dims"
LONE_CALL = "custom_call:in_manual_region"

_LIBRARY_CALL = re.compile(r"(lapack|(cu|hip)(solver|sparse|_cholesky_update))_?.*_ffi$")
_VECTOR_CALL = re.compile(r"(cu|hip)_lu_pivots_to_permutation$")


def rule_name(kind: OpKind) -> str:
    """Returns the key in `DESCRIPTIONS` of an op's rule; calls with known batch dims share one."""
    name = key_of(kind.name, kind.attrs)
    if kind.name != CUSTOM_CALL or name in DESCRIPTIONS:
        return name
    if kind.attrs.get(ALONE):
        return LONE_CALL
    return BATCHED_CALL if batch_rank(kind) is not None else name


def is_known_call(target: str) -> bool:
    """Whether a custom call's target has a rule, or is of a known linear algebra library."""
    is_library = _LIBRARY_CALL.match(target) or _VECTOR_CALL.match(target)
    return f"custom_call:{target}" in DESCRIPTIONS or is_library is not None


def batch_rank(kind: OpKind) -> int | None:
    """Returns how many leading dims of a custom call's operands are a batch; None if unknown.

    jax writes it on every call of a target registered as batch-partitionable. In other calls of
    linear algebra libraries a matrix (or a vector of pivots) comes behind the batch dims.
    """
    frontend = getattr(kind.attrs.get("mhlo.frontend_attributes"), "text", "")
    said = re.search(r'num_batch_dims = "(\d+)"', frontend)
    if said is not None:
        return int(said[1])
    target = str(kind.attrs.get("call_target_name", ""))
    if _VECTOR_CALL.match(target):
        return kind.operands[0].rank - 1
    if _LIBRARY_CALL.match(target):
        return max(t.rank for t in kind.operands) - 2
    return None


def rule_of(kind: OpKind, loc: Loc | None = None) -> Rule:
    """Returns an op's sharding rule, made once for each kind; UnsupportedOpError without one."""
    found: Rule | None = kind._cache.get("rule")
    if found is None:
        name = rule_name(kind)
        function = DESCRIPTIONS.get(name, UNKNOWN).rule
        if function is None or not kind.results:
            types = ", ".join(map(str, kind.operands))
            raise UnsupportedOpError(
                f"no sharding rule for op {name}",
                op=f"{name}({types}) -> {', '.join(map(str, kind.results))}",
                source=loc.source if loc else None,
                fix=f"to run it whole on every device: spmd.register_rule({name!r}, 'whole'); or "
                "say in place of 'whole' what may be split: docs/custom_calls.md"
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
