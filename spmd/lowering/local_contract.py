"""Local lowerings of contractions: local sums, partial over the atoms that split what is summed."""

from __future__ import annotations

from spmd.ir.builder import identity_element
from spmd.ir.program import Value
from spmd.lowering.local import LocalOp, local, same_op
from spmd.propagation.projection import reduced_axes

local("stablehlo.dot_general")(same_op)

_IDEMPOTENT = {"max", "min", "and", "or"}


@local("stablehlo.reduce")
def _reduce(op: LocalOp) -> tuple[Value, ...]:
    """The initial value must count once: only the first device along the split uses it."""
    count = len(op.operands) // 2
    reducer = op.attrs["reducer"]
    axes = reduced_axes(op.rule, op.choice.assignment)
    if not axes or op.attrs.get("spmd.neutral") or reducer in _IDEMPOTENT:
        return op.emit()
    inits = [
        op.b.select(
            op.is_first(axes),
            init,
            op.b.constant(
                identity_element(reducer, op.b.types[init].dtype), op.b.types[init].dtype
            ),
        )
        for init in op.operands[count:]
    ]
    return op.emit([*op.operands[:count], *inits])
