"""Local lowering of convolutions: of what a piece of the result, or of the kernel, reads."""

from __future__ import annotations

from spmd.ir.dialect.window import Sliding, contracts, kernel_window, result_window
from spmd.ir.program import Value
from spmd.ir.types import Attribute, ConvDims
from spmd.lowering.local.neighbours import base_of
from spmd.lowering.local.table import LocalOp, local
from spmd.mesh.sharding import piece_sizes


@local("stablehlo.convolution")
def _convolution(op: LocalOp) -> tuple[Value, ...]:
    """A convolution of what the piece of the result, or of the kernel, reads of the input."""
    kind, numbers = op.op.kind, op.attrs["dimension_numbers"]
    assert isinstance(numbers, ConvDims)
    lhs, rhs = (op.masked(i, 0, op.reduced_dims(i)) for i in range(2))
    sliding = Sliding(kind, len(numbers.input_spatial))
    padding, dilation = list(sliding.padding), list(sliding.base)
    for i, d in enumerate(numbers.input_spatial):
        axes = op.choice.operands[0].dims[d]
        if contracts(kind, i):
            window = kernel_window(kind, i, sliding)
        else:
            window = result_window(kind, i, sliding)
            axes = op.choice.results[0].dims[numbers.output_spatial[i]]
        if axes:
            lhs, low, high, dilation[i] = base_of(op, 0, lhs, d, window, axes, None)
            padding[i] = low, high
    attrs: dict[str, Attribute] = dict(_groups(op, numbers))
    if padding:
        attrs |= {"padding": tuple(padding), "lhs_dilation": tuple(dilation)}
    return op.emit([lhs, rhs], **attrs)


def _groups(op: LocalOp, numbers: ConvDims) -> dict[str, int]:
    """The groups that are left on one device."""
    found = {}
    for name, dims, d in (
        ("feature_group_count", op.rule.operands[0], numbers.input_feature),
        ("batch_group_count", op.rule.operands[0], numbers.input_batch),
    ):
        count = op.attrs.get(name, 1)
        if count > 1:
            axes = op.choice.assignment[dims[d][0]]
            found[name] = piece_sizes(count, axes, op.mesh)[-1]
    return found
