"""Functions of one device that exchange with others by jax's collectives, as functions of a module.

jax knows the groups of a collective inside of a `shard_map` alone. So a function is traced in one
over all devices of the mesh, whose atoms are its axes, and what is inside of it is taken out:

before: `func @main(%0) { %1 = sdy.manual_computation(%0) (%2) { %3 = all_gather %2 ... } }`
after:  `func @main(%0) { %3 = all_gather %0 ... }`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxlib.mlir import ir

from spmd.ir.dialect.manual import FROM_MANUAL, MANUAL, TO_MANUAL
from spmd.ir.program import Op, OpKind, Program, Region

_MANUAL = "sdy.manual_computation"


def atom_name(atom: int) -> str:
    """The axis of an atom of the mesh."""
    return f"atom{atom}"


def among_devices(function: Callable[..., Any], sizes: Sequence[int]) -> Callable[..., Any]:
    """The function of one device's operands in a `shard_map`.

    Args:
      function: may use jax's collectives along `atom_name(i)`.
      sizes: of the mesh's atoms.
    """
    names = tuple(map(atom_name, range(len(sizes))))
    # Axes that are Explicit, as jax 0.11 makes them, ask for a mesh of devices around the trace.
    mesh = AbstractMesh(tuple(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    spec = PartitionSpec()  # every device has its own, which nothing here looks at
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def inline_manual(module: ir.Module) -> None:
    """Takes what a module's one `shard_map` computes out of it, in place."""
    with module.context:
        for item in list(module.body.operations):
            if item.operation.name != "func.func":
                item.operation.erase()
        blocks = [f.operation.regions[0].blocks[0] for f in module.body.operations]
        found = [op for block in blocks for op in block if op.operation.name == _MANUAL]
        for manual in (op.operation for op in found):
            inside = manual.regions[0].blocks[0]
            for argument, operand in zip(inside.arguments, manual.operands, strict=True):
                argument.replace_all_uses_with(operand)
            *ops, end = [op.operation for op in inside]
            for op in ops:
                op.move_before(manual)
            for result, value in zip(manual.results, end.operands, strict=True):
                result.replace_all_uses_with(value)
            manual.erase()


def of_one_device(program: Program) -> Program:
    """An imported module's one `shard_map` as the program of one device, for its memory."""

    def flat(op: Op) -> tuple[Op, ...]:
        if op.name == MANUAL:
            return tuple(inner for part in op.regions[0].ops for inner in flat(part))
        if op.name in (TO_MANUAL, FROM_MANUAL):  # another name of its operand
            types = op.kind.operands
            return (op._replace(kind=OpKind("stablehlo.reshape", types, types, {})),)
        return (op,)

    ops = tuple(part for op in program.body.ops for part in flat(op))
    ends = {op.results: op.regions[0].results for op in program.body.ops if op.name == MANUAL}
    inside = {v: x for outer, inner in ends.items() for v, x in zip(outer, inner, strict=True)}
    results = tuple(inside.get(v, v) for v in program.body.results)
    return program._replace(body=Region(program.body.args, ops, results))
