"""Lift: large constants become arguments of the program, behind the user's, to be split like these.

before: `main(%0: "x") { %1 = constant {value = dense<...>}; %2 = add %0, %1; return %2 }`
after:  `main(%0: "x", %1: "constants/0") { %2 = add %0, %1; return %2 }`

The plan says how they lie. They are placed once, when the program is compiled, and passed at each
call (`spmd.lowering.execute`). What a manual region has inside is of one device, and stays there.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.importer.module import Imported
from spmd.ir.control_flow import held_atoms
from spmd.ir.description import CONSTANT
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import Dense, dtype_bits

LARGE = 64 << 10
"""Bytes above which a constant is an argument. Below, an argument more at each call (some
microseconds on eight devices) is worth more than the memory."""


def lift_constants(imported: Imported) -> Imported:
    """Makes large constants the last arguments of a program, equal ones one argument."""
    program = imported.program
    large = [op for op in program.walk() if _is_large(op)]
    if not large:
        return imported
    held = held_atoms(program)
    lifted: dict[Dense, Value] = {}

    def edit(_: Builder, op: Op, __: Now) -> Sequence[Value] | None:
        if not _is_large(op) or op.results[0] in held:
            return None
        return (lifted.setdefault(op.kind.attrs["value"], op.results[0]),)

    program = edit_ops(program, edit)
    body = program.body._replace(args=(*program.body.args, *lifted.values()))
    names = [f"constants/{number}" for number in range(len(lifted))]
    program = program._replace(
        body=body, arg_names=(*program.arg_names, *names), constants=tuple(lifted)
    )
    return imported._replace(
        program=program, arg_marks=(*imported.arg_marks, *[None] * len(lifted))
    )


def _is_large(op: Op) -> bool:
    """Whether an op is a constant that takes memory worth splitting."""
    if op.name != CONSTANT:
        return False
    dense: Dense = op.kind.attrs["value"]
    # Compiled programs of jax refuse arrays of elements below a byte, which they hold unpacked.
    return not dense.splat and len(dense.data) > LARGE and dtype_bits(dense.type.dtype) >= 8
