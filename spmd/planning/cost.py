"""What an op costs on one device: its arithmetic or its memory traffic, whichever takes longer."""

from __future__ import annotations

import math

from spmd.ir.program import OpKind
from spmd.ir.types import dtype_bits
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, local_shape, piece_sizes
from spmd.mesh.topology import Topology
from spmd.planning.comm import collective_seconds
from spmd.propagation.merge import rounds
from spmd.propagation.projection import Assignment
from spmd.propagation.rule import Rule
from spmd.propagation.window import Halo, exchange, reads_of

_CONTRACTIONS = {"stablehlo.dot_general", "stablehlo.convolution"}


def op_flops(kind: OpKind, rule: Rule) -> int:
    """Floating-point operations of the whole op: two for each point of a contraction's space."""
    if kind.name in _CONTRACTIONS:
        return 2 * math.prod(factor.size for factor in rule.factors)
    return max((t.size for t in (*kind.operands, *kind.results)), default=0)


def op_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time of one device's share of an op under an assignment."""
    split = mesh.extent(a for axes in assignment for a in axes)
    dtype = kind.operands[0].dtype if kind.operands else kind.results[0].dtype
    compute = 0.0
    exchanges = halo_seconds(kind, rule, assignment, mesh, topology)
    exchanges += merge_seconds(rule, assignment, mesh, topology)
    if kind.name in _CONTRACTIONS:
        compute = op_flops(kind, rule) / split / topology.peak_flops(dtype)
    memory = local_bytes(kind, rule, assignment, mesh) / topology.hbm_bandwidth
    return max(compute, memory) + exchanges


def halo_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time of the exchanges that bring what devices read of their neighbours' pieces."""
    seconds = 0.0
    for halo in rule.halos:
        axes = assignment[halo.factor]
        if axes:
            type_ = kind.operands[halo.operand]
            dims = [
                () if d == halo.dim else tuple(a for f in dim for a in assignment[f])
                for d, dim in enumerate(rule.operands[halo.operand])
            ]
            shape = local_shape(type_.shape, Sharding(tuple(dims)), mesh)
            row = type_.with_shape((*shape[: halo.dim], 1, *shape[halo.dim + 1 :])).bytes
            for name, sent, got in halo_moves(halo, type_.shape[halo.dim], axes, mesh):
                seconds += collective_seconds(name, axes, sent * row, got * row, mesh, topology)
    return seconds


def halo_moves(halo: Halo, size: int, axes: Axes, mesh: Mesh) -> tuple[tuple[str, int, int], ...]:
    """The collectives of a halo: (kind, elements along the dim before, and after)."""
    devices = mesh.extent(axes)
    if halo.window is None:
        return (("all_gather", 1, devices),)
    plan = exchange(reads_of(halo.window, size, axes, mesh).need, size, axes, mesh)
    if plan.gather:
        piece = piece_sizes(size, axes, mesh)[-1]
        return (("all_gather", piece, devices * piece),)
    return tuple(("collective_permute", length, length) for length in plan.lengths)


def merge_seconds(rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology) -> float:
    """Time of putting together what devices find in their pieces, memory traffic included."""
    seconds = 0.0
    for merge in rule.merges:
        axes = assignment[merge.factor]
        if not axes:
            continue
        own = sum(
            type_.bytes // mesh.extent(a for dim in dims for f in dim for a in assignment[f])
            for type_, dims in merge.tensors
        )
        devices = mesh.extent(axes)
        kind, after, times = "all_gather", own * devices, 1
        if merge.network:
            kind, after, times = "collective_permute", own, len(rounds(devices))
        wire = collective_seconds(kind, axes, own, after, mesh, topology)
        seconds += times * (wire + (own + after) / topology.hbm_bandwidth)
    return seconds


def local_bytes(kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh) -> float:
    """Bytes that one device reads and writes."""
    total = 0.0
    for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True):
        split = mesh.extent(a for dim in dims for f in dim for a in assignment[f])
        total += type_.size * dtype_bits(type_.dtype) / 8 / split
    return total
