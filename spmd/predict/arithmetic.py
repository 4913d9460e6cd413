"""How long an op's arithmetic takes on one device, and how often it reads its operands."""

from __future__ import annotations

import math

from spmd.ir.description import Passes
from spmd.ir.program import OpKind
from spmd.mesh.topology import Topology


def arithmetic_seconds(kind: OpKind, topology: Topology) -> float:
    """Time of an op's arithmetic, all of it on one device; 0 where memory decides its time."""
    about = kind.about
    if about.flops is None:
        return 0.0
    dtype = (*kind.operands, *kind.results)[0].dtype
    return topology.arithmetic_seconds(about.flops(kind), dtype, about.arithmetic)


BLOCK = 32
"""Columns that a factorisation takes at once."""


def passes(kind: OpKind) -> float:
    """How often an op goes through its operands: factorisations once for each block of columns.

    Blocks are as wide as in LAPACK (Anderson et al. 1999, section 3.4): their arithmetic is a
    product, behind which single columns hide.
    """
    shape = max((t.shape for t in kind.operands), key=math.prod, default=())
    longest = max(shape[-2:], default=1)
    if kind.about.passes == Passes.COLUMNS:
        return max(1, longest / BLOCK)
    if kind.about.passes == Passes.LOGARITHMIC:
        return 1 + math.log2(max(2, max(shape, default=2)))
    return 1
