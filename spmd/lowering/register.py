"""`register_rule`, `register_composite`: users describe ops that the compiler does not know."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from spmd.errors import SpmdError
from spmd.ir.dialect import registry
from spmd.ir.dialect.composites import COMPOSITES, Composite, Function
from spmd.ir.dialect.rule import Rule, parse_rule, whole
from spmd.ir.program import OpKind, Value
from spmd.ir.types import types_text
from spmd.lowering.local.composite import lower_composite
from spmd.lowering.local.table import LocalOp, local

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
    """Registers how an op may be split, and how one device computes its share.

    Args:
      op: the target name of a custom call (`jax.ffi.ffi_call("my_norm", ...)`), or the full name
        of an op (`stablehlo.…`, `custom_call:…`).
      rule: its factors as text, `"b s h, h -> b s h"`: a term for each operand, an arrow, a term
        for each result; or `"whole"`: every device computes all of it, of any operands; or a
        function from the op's kind to a `Rule`.
      kinds: factor -> `pass` (split freely; the default), `reduce` (splitting it leaves the
        results partial) or `replicate` (must not be split).
      reduction: for `reduce` factors, how partial results combine: `add`, `max`, ...
      linear: groups of operand numbers; partial sums may flow through the operands of a group
        together: `[(0, 1)]` for `x + y`, `[(0,), (1,)]` for `x * y`.
      lower: a function from a `LocalOp` to the local results; when left out, the op itself at local
        shapes, with the padding of reduced dims replaced by the reduction's identity.

    Raises:
      SpmdError: the op has a rule already, or `kinds` is wrong or lacks a `reduction`. A text that
        does not fit an op's operands and results raises it later, for a program with that op.

    Example:
      >>> register_rule("my_norm", "b s h, h -> b s h", kinds={"h": "replicate"})
    """
    name = op if ":" in op or "." in op else f"custom_call:{op}"
    made = _rule_function(name, rule, kinds or {}, reduction, linear)

    def lowered(op: LocalOp) -> tuple[Value, ...]:
        return tuple(lower(op) if lower is not None else _masked(op).emit())

    registry.op(name)(made)
    local(name)(lowered)
    _note(name)


def register_composite(
    name: str,
    rule: str | Callable[[OpKind], Rule],
    *,
    decomposition: Function | None = None,
    kernels: Mapping[str, Function] | None = None,
    kinds: Mapping[str, str] | None = None,
    reduction: str = "",
    linear: Iterable[Sequence[int]] = (),
    flops: Callable[[OpKind], float] | None = None,
    bytes_read: Callable[[OpKind], Sequence[float]] | None = None,
    arithmetic: str = "",
    multiplies: Callable[[OpKind, str | None], str] | None = None,
    lower: LocalLowering | None = None,
) -> None:
    """Keeps calls of a `jax.lax.composite` whole: one op with a rule, and a kernel on each device.

    Composites that are not registered are inlined, and their ops are partitioned.

    Args:
      name: as in `jax.lax.composite(function, name=...)`.
      rule: as for `register_rule`; a function from the op's kind to a `Rule` finds the composite's
        attributes in `spmd.ir.dialect.composites.arguments_of(kind)`.
      decomposition: the function of the composite. It is traced at the shapes of one device where
        no kernel is. Its positional arguments are the operands, its keyword arguments the
        attributes.
      kernels: platform (`cpu`, `cuda`, `tpu`) -> a JAX function with the same arguments, whose
        custom calls reach XLA as they are. It may return `NotImplemented` for shapes that are not
        for it: then the decomposition is taken.
      kinds: as for `register_rule`. A result that has a `reduce` factor in one of its own dims is
        not partial over it.
      reduction: as for `register_rule`.
      linear: as for `register_rule`.
      flops: for the planner, from an op's kind to its floating-point operations.
      bytes_read: for the planner, from an op's kind to the bytes that it reads of each operand, for
        kernels that look a few pieces up in a large operand. All bytes when left out.
      arithmetic: the kind of kernel that does the `flops`, as in `Chip.efficiency`, which says how
        fast it is on a chip. Kinds that a chip does not list are as fast as its matrix products.
      multiplies: from an op's kind and the platform to the MLIR dtype of its products; the first
        operand's when left out.
      lower: a function from a `LocalOp` to the local results; when left out, the kernel or the
        decomposition at local shapes (`spmd.lowering.local.composite.lower_composite`).

    On a platform without a kernel and with no `decomposition`, the composite is inlined.

    Raises:
      SpmdError: the composite is registered already, nothing computes it, or `kinds` is wrong; a
        text that does not fit raises it later, as in `register_rule`.

    Example:
      >>> register_composite(
      ...     "my.softmax", "b v -> b v", kinds={"v": "replicate"}, decomposition=jax.nn.softmax
      ... )
    """
    if decomposition is None and not kernels:
        raise SpmdError(
            f"nothing computes composite {name}",
            required="a decomposition, a kernel for some platform, or both",
            fix="pass decomposition= or kernels=",
        )
    made = _rule_function(name, rule, kinds or {}, reduction, linear)
    costs = {"flops": flops, "bytes_read": bytes_read}
    registry.op(f"composite:{name}", **costs, arithmetic=arithmetic, multiplies=multiplies)(made)
    COMPOSITES[name] = Composite(decomposition, dict(kernels or {}))
    _note(name)
    lowered = lower or lower_composite
    local(f"composite:{name}")(lambda op: tuple(lowered(_masked(op))))


def _note(name: str) -> None:
    """Adds an op's name, without its prefix, to `registry.TAUGHT` unless `spmd` registers it."""
    if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "spmd":
        registry.TAUGHT.add(name.rpartition(":")[2])


def _rule_function(
    name: str,
    rule: str | Callable[[OpKind], Rule],
    kinds: Mapping[str, str],
    reduction: str,
    linear: Iterable[Sequence[int]],
) -> Callable[[OpKind], Rule]:
    """Returns a function from op kinds to rules; SpmdError if `kinds` or `reduction` is wrong."""
    if bad := set(kinds.values()) - {"pass", "reduce", "replicate"}:
        raise SpmdError(
            f"{sorted(bad)[0]!r} is not a kind of factor",
            op=name,
            required="pass, reduce or replicate",
            fix="correct `kinds`",
        )
    if "reduce" in kinds.values() and not reduction:
        raise SpmdError(
            f"the rule of {name} reduces a factor without saying how",
            fix='name it: reduction="add"',
        )
    if not isinstance(rule, str):
        return rule
    if rule == "whole":
        return whole
    groups = tuple(tuple(group) for group in linear)

    def from_text(kind: OpKind) -> Rule:
        try:
            return parse_rule(
                rule, kind.operands, kind.results, kinds=kinds, reduction=reduction, linear=groups
            )
        except ValueError as error:
            raise SpmdError(
                f"the rule registered for {name} does not fit this use of it: {error}",
                op=f"{types_text(kind.operands)} -> {types_text(kind.results)}",
                fix="one term for each operand and result, one factor for each dim",
            ) from error

    return from_text


def _masked(op: LocalOp) -> LocalOp:
    return replace(op, operands=tuple(op.masked(i) for i in range(len(op.operands))))
