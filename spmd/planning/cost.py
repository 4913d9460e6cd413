"""What an op costs on one device: its arithmetic or its memory traffic, whichever takes longer."""

from __future__ import annotations

import math

from spmd.ir.program import OpKind
from spmd.ir.types import dtype_bits
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.propagation.projection import Assignment
from spmd.propagation.rule import Rule

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
    if kind.name in _CONTRACTIONS:
        compute = op_flops(kind, rule) / split / topology.peak_flops(dtype)
    return max(compute, local_bytes(kind, rule, assignment, mesh) / topology.hbm_bandwidth)


def local_bytes(kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh) -> float:
    """Bytes that one device reads and writes."""
    total = 0.0
    for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True):
        split = mesh.extent(a for dim in dims for f in dim for a in assignment[f])
        total += type_.size * dtype_bits(type_.dtype) / 8 / split
    return total
