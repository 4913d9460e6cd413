"""Local lowerings of contractions: local sums, partial over the atoms that split what is summed."""

from __future__ import annotations

from spmd.ir.dialect.reducers import REDUCER_OPS, identity_element
from spmd.ir.program import Value
from spmd.lowering.local.merge import merged_dims, reduce_merged
from spmd.lowering.local.table import LocalOp, local
from spmd.propagation.projection import reduced_axes

_IDEMPOTENT = {"max", "min", "and", "or"}


@local("stablehlo.dot_general")
def _dot_general(op: LocalOp) -> tuple[Value, ...]:
    """A local product; padding along contracted dims is zero on both sides (it may be NaN)."""
    return op.emit([op.masked(i, 0, op.reduced_dims(i)) for i in range(2)])


@local("stablehlo.reduce")
def _reduce(op: LocalOp) -> tuple[Value, ...]:
    """The initial value joins in after the local sum, and only on the first device along the split.

    After, because XLA forgets the initial value of a reduction over dims of size 1, and a local
    piece has such dims where the global value has none.
    """
    if merged_dims(op):
        return reduce_merged(op)
    axes = reduced_axes(op.rule, op.choice.assignment)
    if not axes:
        return op.emit()
    b, reducer = op.b, op.attrs["reducer"]
    _, init = op.operands  # a body that is one known op has one operand
    dtype = b.types[init].dtype
    element = identity_element(reducer, dtype)
    x = op.masked(0, element, op.reduced_dims(0))
    if op.attrs.get("spmd.neutral"):
        return op.emit([x, init])
    identity = b.constant(element, dtype)
    (terms,) = op.emit([x, identity])
    if reducer not in _IDEMPOTENT:
        init = b.select(op.is_first(axes), init, identity)
    spread = b.broadcast(init, b.types[terms].shape)
    return (b.binary(REDUCER_OPS[reducer].removeprefix("stablehlo."), terms, spread),)
