"""Scalar functions of reductions, sorts and maps: which are elementwise, and writing them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Body, Value

_SCALAR_ATTRS = {
    "compare_type",
    "comparison_direction",
    "exponent_bits",
    "mantissa_bits",
    "result_accuracy",
    "value",
}
"""Attributes of elementwise ops: they say nothing about dims."""


def is_elementwise(body: Body) -> bool:
    """Whether a body is elementwise: values of one shape, and no op that knows dims."""
    shape = body.types[body.region.args[0]].shape
    return all(
        op.kind.about.rule is not None
        and set(op.kind.attrs) <= _SCALAR_ATTRS
        and all(t.shape == shape for t in (*op.kind.operands, *op.kind.results))
        and (not op.kind.about.is_constant or op.kind.attrs["value"].splat or not shape)
        for op in body.region.ops
    )


def inline_elementwise(
    b: Builder, body: Body, args: Sequence[Value], shape: tuple[int, ...]
) -> tuple[Value, ...]:
    """The body of elementwise ops, once, on whole tensors.

    Args:
      b: the builder that ops are appended to.
      body: a body for which `is_elementwise` holds.
      args: for each argument of the body, a value of the wanted shape.
      shape: that shape.

    Returns:
      The values that the body returns, at the wanted shape.
    """
    env = dict(zip(body.region.args, args, strict=True))
    for op in body.region.ops:
        results = [type_.with_shape(shape) for type_ in op.kind.results]
        if op.kind.about.is_constant:
            element = op.kind.attrs["value"].array().reshape(-1)[0]
            env[op.results[0]] = b.splat(np.asarray(element), results[0])
        else:
            outs = b.op(op.name, [env[v] for v in op.operands], results, op.kind.attrs)
            env.update(zip(op.results, outs, strict=True))
    return tuple(env[v] for v in body.region.results)
