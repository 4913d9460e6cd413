"""Rewrite: what only moves elements between devices moves them in the narrowest type.

before: `%2 = all_gather %1 : f32; %3 = transpose %2; %4 = convert %3 : bf16` (no other use)
after:  `%2 = convert %1 : bf16; %3 = all_gather %2; %4 = transpose %3`

before: `%2 = convert %1 : f32; %3 = transpose %2; %4 = all_gather %3` (`%1` is bf16)
after:  `%2 = transpose %1; %3 = all_gather %2; %4 = convert %3 : f32`

A convert of elements gives the same wherever they lie, so both change no number. Reductions are
left alone: their terms' type is the precision of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.control_flow import producers_of, users_of
from spmd.ir.description import CONVERT, RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import TensorType, dtype_bits
from spmd.lowering.rewrites.moves import again

_EXCHANGES = ("all_gather", "all_to_all", "collective_permute")
"""Collectives that hand elements on as they are."""


def narrow(program: Program) -> Program:
    """Widens after exchanges instead of before, and narrows before instead of after."""
    return _narrowed_first(_widened_last(program))


def _is_narrower(dtype: str, other: str) -> bool:
    """Whether elements travel as fewer bytes; types below a byte don't count."""
    return 8 <= dtype_bits(dtype) < dtype_bits(other)


def _exchanges(op: Op) -> bool:
    return op.collective in _EXCHANGES


def _reshapes(op: Op) -> bool:
    return op.kind.adds_dims or op.name in (TRANSPOSE, RESHAPE)


def _passes_on(op: Op) -> bool:
    """Whether an op hands the elements of its one operand on, as they are."""
    return len(op.results) == 1 and (_exchanges(op) or _reshapes(op))


def _widens(op: Op) -> bool:
    """Whether an op converts elements of a narrower type."""
    is_convert = op.name == CONVERT
    return is_convert and _is_narrower(op.kind.operands[0].dtype, op.kind.results[0].dtype)


def _widened_last(program: Program) -> Program:
    made = producers_of(program)

    def is_widened(value: Value) -> bool:
        source = made.get(value)
        while source is not None and _reshapes(source):
            source = made.get(source.operands[0])
        return source is not None and _widens(source)

    if not any(_exchanges(op) and is_widened(op.operands[0]) for op in program.walk()):
        return program
    narrow_form: dict[Value, Value] = {}

    def narrow_of(b: Builder, value: Value) -> Value | None:
        """The narrower value that this one was converted from, moved the way this one is."""
        if value in narrow_form:
            return narrow_form[value]
        op = made.get(value)
        if op is None:
            return None
        if op.name == CONVERT:
            return op.operands[0] if _widens(op) else None
        if not _reshapes(op) or (inner := narrow_of(b, op.operands[0])) is None:
            return None
        return _retyped(b, op, inner)

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        made.update((result, op) for result in op.results)
        source = narrow_of(b, op.operands[0]) if _exchanges(op) and len(op.results) == 1 else None
        if source is None:
            return None
        exchanged = _retyped(b, op, source)
        wide = b.convert(exchanged, op.kind.results[0].dtype)
        narrow_form[wide] = exchanged
        return (wide,)

    return edit_ops(program, edit)


def _narrowed_first(program: Program) -> Program:
    wanted = _wanted_types(program)
    if not wanted:
        return program
    made = producers_of(program)

    def narrowed(b: Builder, value: Value, dtype: str) -> Value:
        op = made.get(value)
        widened = op is not None and op.name == CONVERT
        if op is not None and widened and op.kind.operands[0].dtype == dtype:
            return op.operands[0]
        return b.once(("narrowed", value, dtype), lambda: b.convert(value, dtype))

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        made.update((result, op) for result in op.results)
        if len(op.results) != 1:
            return None
        (result,) = op.results
        if op.name == CONVERT and op.kind.results[0] == b.types[op.operands[0]]:
            return op.operands
        if result not in wanted:
            return None
        return (_retyped(b, op, narrowed(b, op.operands[0], wanted[result])),)

    return edit_ops(program, edit)


def _wanted_types(program: Program) -> dict[Value, str]:
    """For each exchanged value, the one narrower type that all its uses convert it to."""
    # Backwards from converts: `found` has the type that everything behind a value agrees on. Of
    #   %2 = all_gather %1; %3 = transpose %2; %4 = convert %3 : bf16; %5 = add %3, %3
    # %3 is also added in f32, so neither it nor %2 is in `found`. Then forwards from exchanges: a
    # transpose without an exchange in front of it stays as it is.
    if not any(map(_exchanges, program.walk())):
        return {}
    users = users_of(program)
    found: dict[Value, str] = {}

    def wanted(use: Op | None, have: str) -> str | None:
        if use is None:
            return None
        if use.name == CONVERT:
            dtype = use.kind.results[0].dtype
            return dtype if _is_narrower(dtype, have) else None
        return found.get(use.results[0]) if _passes_on(use) else None

    ops = list(program.walk())
    for op in reversed(ops):
        if _passes_on(op):
            uses = users.get(op.results[0], [])
            types = {wanted(use, op.kind.results[0].dtype) for use, _ in uses}
            if len(types) == 1 and (dtype := types.pop()) is not None:
                found[op.results[0]] = dtype
    moved: dict[Value, str] = {}
    for op in ops:  # without exchange in front there is nothing to be gained
        behind = _exchanges(op) or (op.operands and op.operands[0] in moved)
        if behind and _passes_on(op) and op.results[0] in found:
            moved[op.results[0]] = found[op.results[0]]
    return moved


def _retyped(b: Builder, op: Op, operand: Value) -> Value:
    """The op again, on an operand of another element type."""
    return again(b, op, (operand,), TensorType(op.kind.results[0].shape, b.types[operand].dtype))
