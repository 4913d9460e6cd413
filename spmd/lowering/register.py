"""`register_rule`: users teach the compiler ops that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from spmd.errors import SpmdError
from spmd.ir.builder import identity_element
from spmd.ir.program import OpKind, Value
from spmd.lowering.local import LocalOp, local
from spmd.propagation import rules  # noqa: F401 (a user's op must not shadow one of ours)
from spmd.propagation.registry import rule as register
from spmd.propagation.rule import Rule, parse_rule

LocalLowering = Callable[[LocalOp], Sequence[Value]]


def register_rule(
    op: str,
    rule: str | Callable[[OpKind], Rule],
    *,
    kinds: Mapping[str, str] | None = None,
    reduction: str = "",
    linear: Iterable[Sequence[int]] = (),
    lower: LocalLowering | None = None,
) -> None:
    """Says how an op may be split, and how one device computes its share.

    Args:
      op: the target name of a custom call (`jax.ffi.ffi_call("my_norm", ...)`), or the full name
        of an op (`stablehlo.…`, `custom_call:…`).
      rule: its factors as text, `"b s h, h -> b s h"`: a term for each operand, an arrow, a term
        for each result; or a function from the op's kind to a `Rule`.
      kinds: factor -> `pass` (split freely; the default), `reduce` (splitting it leaves the
        results partial) or `replicate` (must not be split).
      reduction: for `reduce` factors, how partial results combine: `add`, `max`, ...
      linear: groups of operands in which the op is linear: a partial sum may flow through these.
      lower: computes the local results; the op itself at local shapes when left out, with the
        padding of reduced dims replaced by the reduction's identity.

    Raises:
      SpmdError: the op has a rule already, or the text is not a rule.

    Example:
      >>> register_rule("my_norm", "b s h, h -> b s h", kinds={"h": "replicate"})
    """
    name = op if ":" in op or "." in op else f"custom_call:{op}"
    bad = {kind for kind in (kinds or {}).values()} - {"pass", "reduce", "replicate"}
    if bad:
        raise SpmdError(
            f"{sorted(bad)[0]!r} is not a kind of factor",
            op=name,
            required="pass, reduce or replicate",
            fix="correct `kinds`",
        )
    if "reduce" in (kinds or {}).values() and not reduction:
        raise SpmdError(
            f"the rule of {name} reduces a factor without saying how",
            fix='name it: reduction="add"',
        )
    groups = tuple(tuple(group) for group in linear)

    def from_text(kind: OpKind) -> Rule:
        assert isinstance(rule, str)
        try:
            return parse_rule(
                rule, kind.operands, kind.results, kinds=kinds, reduction=reduction, linear=groups
            )
        except ValueError as error:
            raise SpmdError(
                f"the rule registered for {name} does not fit this use of it: {error}",
                op=f"({', '.join(map(str, kind.operands))}) -> "
                f"({', '.join(map(str, kind.results))})",
                fix="one term for each operand and result, one factor for each dim",
            ) from error

    def lowered(op: LocalOp) -> tuple[Value, ...]:
        return tuple(lower(op) if lower is not None else _masked(op))

    register(name)(from_text if isinstance(rule, str) else rule)
    local(name)(lowered)


def _masked(op: LocalOp) -> tuple[Value, ...]:
    """The op itself, fed with the reduction's identity where padding would be reduced."""
    operands = list(op.operands)
    for i, type_ in enumerate(op.op.kind.operands):
        dims = op.reduced_dims(i)
        if dims:
            operands[i] = op.masked(i, identity_element(op.rule.reduction, type_.dtype), dims)
    return op.emit(operands)
