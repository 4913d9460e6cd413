"""Reshard steps as ops of the local program, and what they must not be where devices part ways."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.types import TensorType, local_type
from spmd.lowering.local.dims import (
    Split,
    cut,
    dynamic_take_dim,
    gather_dim,
    join,
    own_piece,
    per_device,
)
from spmd.mesh.mesh import Mesh
from spmd.reshard.paths import WHOLE_TERMS, Step, permute_pairs


def apply_step(b: Builder, x: Value, global_type: TensorType, step: Step, mesh: Mesh) -> Value:
    """Appends one reshard step: from a local value in `step.before` to one in `step.after`."""
    # Collectives know equal pieces only. A dim that is about to be split is padded first (`cut`),
    # and one that was just joined loses its inner padding afterwards (`join`).
    type_ = local_type(global_type, step.after, mesh)
    if step.kind == "slice":
        return own_piece(b, x, step.dims[0], step.axes, mesh)
    if step.kind == "mask" and step.after.kind in WHOLE_TERMS:
        return x
    if step.kind == "mask":
        first = b.compare("EQ", b.axis_index(step.axes), b.constant(0, "i32"))
        return b.select(first, x, b.splat(0, type_))
    if step.kind == "all_gather":
        (dim,) = step.dims
        x = gather_dim(b, x, dim, step.axes, mesh)
        return join(b, x, Split(dim, type_.shape[dim], step.axes, mesh))
    if step.kind == "all_to_all":
        source, target = step.dims
        x = cut(b, x, target, step.axes, mesh)
        pieces = b.types[x].scaled(source, mesh.extent(step.axes))
        pieces = pieces.with_dim(target, type_.shape[target])
        how = {"concat_dimension": source, "split_dimension": target}
        x = b.collective(step.kind, x, pieces, step.axes, **how)
        return join(b, x, Split(source, type_.shape[source], step.axes, mesh))
    if step.kind == "collective_permute":
        pairs = permute_pairs(step.before, step.after, mesh)
        return b.collective(step.kind, x, type_, step.axes, pairs=pairs)
    if step.kind == "reduce_scatter":
        x = cut(b, x, step.dims[0], step.axes, mesh)
    if not _has_collective(step.before.kind, type_.dtype):
        return _reduce_gathered(b, x, type_, step, mesh)
    body = reducer_body(step.before.kind, type_.dtype)
    dims = {"scatter_dimension": step.dims[0]} if step.kind == "reduce_scatter" else {}
    assert dims or step.kind == "all_reduce", step.kind
    return b.collective(step.kind, x, type_, step.axes, body=body, **dims)


def _has_collective(kind: str, dtype: str) -> bool:
    """Whether XLA's backends reduce this way across devices; bitwise ones only for predicates."""
    return kind in ("add", "mul", "max", "min") or (kind in ("and", "or") and dtype == "i1")


def _reduce_gathered(b: Builder, x: Value, result: TensorType, step: Step, mesh: Mesh) -> Value:
    """A reduction that no backend offers as a collective: gather the terms, reduce them locally."""
    terms = gather_dim(b, b.reshape(x, (1, *b.types[x].shape)), 0, step.axes, mesh)
    reduced = b.reduce(step.before.kind, terms, (0,))
    if step.kind == "all_reduce":
        return reduced
    return b.local_slice(reduced, result, step.axes, step.dims[0])


HELD = "spmd.held"
"""Attribute of control flow whose way may depend on the device: along which atoms it may."""


def without_permutes(program: Program, mesh: Mesh) -> Program:
    """Replaces the permutes over free axes in control flow that has `HELD`.

    Inside a manual region a branch or a loop may depend on the device. Devices that agree along the
    manual axes go together, so a collective whose groups lie within the free axes is safe; but
    XLA's collective-permute is one exchange among all devices, however far apart its pairs are.
    Those that the compiler put there become all-gathers, of which each device keeps what was sent
    to it.

    before: `%3 = collective_permute %2 {y} pairs=[[0, 1], [1, 0], ...]`
    after:  `%4 = all_gather (reshape %2) {y}; %3 = %4[table[position]]`
    """
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
