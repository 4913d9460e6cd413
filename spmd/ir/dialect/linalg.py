"""Rules of linear algebra: batch dims pass, the dims of a matrix stay whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmd.ir.description import Passes
from spmd.ir.dialect.registry import BATCHED_CALL, batch_rank, op
from spmd.ir.dialect.rule import PASS, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType

MATRIX_CALLS = (
    "Eigh",
    "LuDecomposition",
    "ProductOfElementaryHouseholderReflectors",
    "Qr",
)
"""Targets that XLA itself expands, with a matrix as first operand."""


@op("stablehlo.fft", is_same_locally=True, passes=Passes.LOGARITHMIC)
def _fft(kind: OpKind) -> Rule:
    """All dims but the transformed ones, which are the last, pass."""
    return _batched(kind, kind.operands[0].rank - len(kind.attrs["fft_length"]))


@op("stablehlo.cholesky", is_same_locally=True, passes=Passes.COLUMNS)
def _cholesky(kind: OpKind) -> Rule:
    """`b i j -> b i j`, with `i` and `j` whole."""
    return _batched(kind, kind.operands[0].rank - 2)


@op("stablehlo.triangular_solve", is_same_locally=True, passes=Passes.COLUMNS)
def _triangular_solve(kind: OpKind) -> Rule:
    """`b i j, b j c -> b j c`: the right-hand sides `c` pass too; linear in them."""
    free = -1 if kind.attrs["left_side"] else -2
    return _solve(kind, kind.operands[0].rank - 2, 1, free)


@op(*(f"custom_call:{target}" for target in MATRIX_CALLS), is_same_locally=True)
def _matrix_call(kind: OpKind) -> Rule:
    """`b i j -> b i j, b k`: the leading dims of the matrix are those of every result."""
    return _batched(kind, kind.operands[0].rank - 2)


@op(BATCHED_CALL, is_same_locally=True)
def _batched_call(kind: OpKind) -> Rule:
    """The leading dims that the call says are batch pass; so do the columns that a solve has."""
    batch = batch_rank(kind)
    assert batch is not None
    target = str(kind.attrs["call_target_name"])
    if "trsm" in target:
        config = getattr(kind.attrs.get("mhlo.backend_config"), "text", "")
        right = re.search(r"side = 82\b|left_side = false", config)
        return _solve(kind, batch, 1, -2 if right else -1)
    if "gtsv2" in target or "gtsv" in target:
        return _solve(kind, batch, 3, -1)
    return _batched(kind, batch)


def _batched(kind: OpKind, batch: int) -> Rule:
    """The leading dims are shared by all operands and results, every other dim stays whole."""
    build = RuleBuilder()
    shared = [build.factor(size, PASS) for size in _common(kind, batch)]
    operands = [_dims(build, t, shared) for t in kind.operands]
    return build.build(operands, [_dims(build, t, shared) for t in kind.results])


def _solve(kind: OpKind, batch: int, right: int, free: int) -> Rule:
    """As `_batched`; one dim of the right-hand sides passes to the same dim of their result.

    Args:
      kind: the op.
      batch: number of leading dims that pass.
      right: index of the operand that holds the right-hand sides.
      free: the dim that passes, counted from the end.
    """
    build = RuleBuilder()
    shared = [build.factor(size, PASS) for size in _common(kind, batch)]
    sides = kind.operands[right]
    column = build.factor(sides.shape[free])

    def dims(type_: TensorType) -> list[DimFactors]:
        found = _dims(build, type_, shared)
        if type_.shape == sides.shape:
            found[free] = column
        return found

    operands = [
        dims(t) if i == right else _dims(build, t, shared) for i, t in enumerate(kind.operands)
    ]
    linear = ((right,),) if len(kind.results) == 1 else ()
    return build.build(operands, [dims(t) for t in kind.results], linear=linear)


def _common(kind: OpKind, batch: int) -> Sequence[int]:
    """Sizes of the batch dims; none where an operand or result has other leading dims."""
    sizes = kind.operands[0].shape[:batch]
    matrices = [t for t in (*kind.operands, *kind.results) if t.rank]
    return sizes if all(t.shape[:batch] == sizes for t in matrices) else ()


def _dims(build: RuleBuilder, type_: TensorType, shared: Sequence[DimFactors]) -> list[DimFactors]:
    if not type_.rank:
        return []
    own = type_.shape[len(shared) :]
    return [*shared, *(build.factor(size, REPLICATE) for size in own)]
