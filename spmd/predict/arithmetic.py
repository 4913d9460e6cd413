"""How long an op's arithmetic takes on one device, without what it reads and writes."""

from __future__ import annotations

from spmd.ir.program import OpKind
from spmd.mesh.topology import Topology


def arithmetic_seconds(kind: OpKind, topology: Topology) -> float:
    """Time of an op's arithmetic, all of it on one device; 0 where memory decides its time."""
    about = kind.about
    if about.flops is None:
        return 0.0
    dtype = (*kind.operands, *kind.results)[0].dtype
    return topology.arithmetic_seconds(about.flops(kind), dtype, about.arithmetic)
