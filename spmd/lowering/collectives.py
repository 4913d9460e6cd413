"""Reshard steps as ops of the local program."""

from __future__ import annotations

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.lowering.local.padding import cut, join
from spmd.mesh.mesh import Mesh
from spmd.reshard.paths import Step, permute_pairs


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
    count = mesh.extent(step.axes)
    if step.kind == "slice":
        x = cut(b, x, step.dims[0], step.axes, mesh)
        return b.local_slice(x, type_, step.axes, step.dims[0])
    if step.kind == "mask":
        first = b.compare("EQ", b.axis_index(step.axes), b.constant(0, "i32"))
        return b.select(first, x, b.splat(0, type_))
    if step.kind == "all_gather":
        (dim,) = step.dims
        pieces = _scaled(b.types[x], dim, count)
        x = b.collective(step.kind, x, pieces, step.axes, all_gather_dim=dim)
        return join(b, x, dim, type_.shape[dim], step.axes, mesh)
    if step.kind == "all_to_all":
        source, target = step.dims
        x = cut(b, x, target, step.axes, mesh)
        pieces = _scaled(b.types[x], source, count)
        pieces = pieces.with_shape(_replaced(pieces.shape, target, type_.shape[target]))
        x = b.collective(
            step.kind, x, pieces, step.axes, concat_dimension=source, split_dimension=target
        )
        return join(b, x, source, type_.shape[source], step.axes, mesh)
    if step.kind == "collective_permute":
        pairs = permute_pairs(step.before, step.after, mesh)
        return b.collective(step.kind, x, type_, step.axes, pairs=pairs)
    if step.kind == "reduce_scatter":
        x = cut(b, x, step.dims[0], step.axes, mesh)
    if not _has_collective(step.before.kind, type_.dtype):
        return _reduce_gathered(b, x, type_, step, mesh.extent(step.axes))
    body = reducer_body(step.before.kind, type_.dtype)
    if step.kind == "reduce_scatter":
        return b.collective(
            step.kind, x, type_, step.axes, scatter_dimension=step.dims[0], body=body
        )
    assert step.kind == "all_reduce", step.kind
    return b.collective(step.kind, x, type_, step.axes, body=body)


def _scaled(type_: TensorType, dim: int, count: int) -> TensorType:
    return type_.with_shape(_replaced(type_.shape, dim, type_.shape[dim] * count))


def _replaced(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _has_collective(kind: str, dtype: str) -> bool:
    """Whether XLA's backends reduce this way across devices; bitwise ones only for predicates."""
    return kind in ("add", "mul", "max", "min") or (kind in ("and", "or") and dtype == "i1")


def _reduce_gathered(b: Builder, x: Value, result: TensorType, step: Step, count: int) -> Value:
    """A reduction that no backend offers as a collective: gather the terms, reduce them locally.

    Args:
      b: the builder that ops are appended to.
      x: this device's term.
      result: local type after the step.
      step: an all-reduce or reduce-scatter.
      count: number of terms.
    """
    local, kind = b.types[x], step.before.kind
    stacked = b.reshape(x, (1, *local.shape))
    gathered_type = local.with_shape((count, *local.shape))
    gathered = b.collective("all_gather", stacked, gathered_type, step.axes, all_gather_dim=0)
    reduced = b.reduce(kind, gathered, (0,))
    if step.kind == "all_reduce":
        return reduced
    return b.local_slice(reduced, result, step.axes, step.dims[0])
