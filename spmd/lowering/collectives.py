"""Reshard steps as ops of the local program."""

from __future__ import annotations

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.lowering.local.dims import gather_dim
from spmd.lowering.local.padding import Split, cut, join, own_piece
from spmd.mesh.mesh import Mesh
from spmd.reshard.paths import WHOLE_TERMS, Step, permute_pairs


def apply_step(b: Builder, x: Value, global_type: TensorType, step: Step, mesh: Mesh) -> Value:
    """Appends one reshard step.

    Args:
      b: the builder that ops are appended to.
      x: the local value, in `step.before`.
      global_type: type of the whole value.
      step: the step.
      mesh: the mesh.

    Returns:
      The local value in `step.after`.
    """
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
