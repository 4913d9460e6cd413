"""Rewrite: where devices may go different ways, nothing waits for all of the mesh.

Inside a manual region a branch or a loop may depend on the device. Devices that agree along the
manual axes go together, so a collective whose groups lie within the free axes is safe; but XLA's
collective-permute is one exchange among all devices, however far apart its pairs are. Those that
the compiler put there become all-gathers, of which each device keeps what was sent to it.

before: `%3 = collective_permute %2 {y} pairs=[[0, 1], [1, 0], ...]`
after:  `%4 = all_gather (reshape %2) {y}; %3 = %4[table[position]]`
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import rewrite_ops
from spmd.lowering.local.dims import dynamic_take_dim, gather_dim, per_device
from spmd.mesh.mesh import Mesh

HELD = "spmd.held"
"""Attribute of control flow whose way may depend on the device: along which atoms it may."""


def without_permutes(program: Program, mesh: Mesh) -> Program:
    """Replaces the permutes over free axes in control flow that has `HELD`."""
    found: set[Value] = set()

    def visit(region: Region, held: frozenset[int]) -> None:
        for op in region.ops:
            for inner in op.regions:
                visit(inner, held.union(op.kind.attrs.get(HELD, ())))
            permutes = op.collective == "collective_permute"
            if held and permutes and held.isdisjoint(op.kind.attrs["axes"]):
                found.add(op.results[0])

    visit(program.body, frozenset())
    if not found:
        return program

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in found:
            return None
        return (_gathered(b, op, operands[0], mesh),)

    return rewrite_ops(program, rewrite)


def _gathered(b: Builder, op: Op, x: Value, mesh: Mesh) -> Value:
    # The table has, for each device of the mesh, the coordinate along `axes` of the one that sends
    # to it, or -1. For pairs [[0, 1], [1, 2]] of four devices it is -1 0 1 -1. Devices without a
    # sender have zeros, as behind a permute.
    axes, type_ = op.kind.attrs["axes"], b.types[x]
    shape = type_.shape
    gathered = gather_dim(b, b.reshape(x, (1, *shape)), 0, axes, mesh)
    sender = [-1] * mesh.size
    for source, to in op.kind.attrs["pairs"]:
        sender[to] = mesh.coordinate(source, axes)
    mine = per_device(b, tuple(range(len(mesh.atoms))), sender)
    zero = b.constant(0, "i32")
    start = b.binary("maximum", mine, zero)
    received = b.reshape(dynamic_take_dim(b, gathered, 0, start, 1), shape)
    if -1 not in sender:
        return received
    return b.select(b.compare("GE", mine, zero), received, b.splat(0, type_))
