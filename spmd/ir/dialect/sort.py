"""Rules of ops whose pieces are searched or sorted alone and then merged: `top_k` and `sort`."""

from __future__ import annotations

import math

from spmd.ir.dialect.batched import in_front, shifted
from spmd.ir.dialect.bodies import is_elementwise
from spmd.ir.dialect.merge import Merge
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import MERGE, PASS, REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType

GATHERED_SORT_BYTES = 1 << 18
"""Up to this many bytes of operands the sorted dim stays whole, gathered if need be.

A network of 8 devices takes 6 rounds that wait for each other, a gather one. It moves no less
before there are 32 devices (of each element also its position); what it saves is memory: a device
never holds more than two pieces. For this many bytes that is nothing, and latency decides.
"""


def _halvings(kind: OpKind) -> float:
    """How often a sort of the longest dim goes through it."""
    return 1 + math.log2(max(2, *kind.operands[0].shape))


@op("chlo.top_k", batched=in_front(), passes=_halvings)
def _top_k(kind: OpKind) -> Rule:
    """`i j -> i k, i k {j: merge}`: the largest are among the largest `k` of each piece."""
    build = RuleBuilder()
    *outer, searched = kind.operands[0].shape
    shared = [build.factor(size) for size in outer]
    along = build.factor(searched, MERGE)
    found = [*shared, build.factor(kind.results[0].shape[-1], REPLICATE)]
    merge = Merge(along[0], tuple((type_, (*shared, ())) for type_ in kind.results))
    return build.build([[*shared, along]], [found, found], merges=[merge])


@op("stablehlo.sort", batched=in_front(dimension=shifted), passes=_halvings, is_in_place=True)
def _sort(kind: OpKind) -> Rule:
    """All dims but the sorted one pass; pieces of the sorted dim meet in a sorting network.

    StableHLO specification, section sort.
    """
    build = RuleBuilder()
    along = kind.attrs["dimension"]
    merges = is_elementwise(kind.attrs["body"]) and (
        sum(t.bytes for t in kind.operands) > GATHERED_SORT_BYTES
    )
    dims = [
        build.factor(size, PASS if d != along else MERGE if merges else REPLICATE)
        for d, size in enumerate(kind.results[0].shape)
    ]
    keys = TensorType(kind.results[0].shape, "i32")
    tensors = tuple((type_, tuple(dims)) for type_ in (*kind.operands, keys))
    merge = [Merge(dims[along][0], tensors, network=True)] if merges else []
    return build.build([dims] * len(kind.operands), [dims] * len(kind.results), merges=merge)
