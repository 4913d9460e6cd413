"""Scalar functions of reductions, sorts, maps: which are elementwise; inlining."""

from collections.abc import Sequence

import numpy as np

from spmd.ir.description import CONSTANT
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Body, Value
from spmd.ir.rewrite import repeat_op
from spmd.ir.types import TensorType

_SCALAR_ATTRS = {
    "compare_type", "comparison_direction", "exponent_bits", "mantissa_bits", "result_accuracy",
    "value",
}  # fmt: skip
"""Names of attributes of elementwise ops, which say nothing about dims."""


def is_elementwise(body: Body) -> bool:
    """Whether a body is elementwise: all values have one shape, no attribute is about dims."""
    shape = body.types[body.region.args[0]].shape
    return all(
        op.kind.about.rule is not None
        and set(op.kind.attrs) <= _SCALAR_ATTRS
        and all(t.shape == shape for t in (*op.kind.operands, *op.kind.results))
        and (op.name != CONSTANT or op.kind.attrs["value"].splat or not shape)
        for op in body.region.ops
    )


def inline_elementwise(
    b: Builder, body: Body, args: Sequence[Value], shape: tuple[int, ...]
) -> tuple[Value, ...]:
    """Appends an elementwise body's ops over tensors `args` of `shape`; returns its results."""
    env = dict(zip(body.region.args, args, strict=True))
    for op in body.region.ops:
        results = [type_.with_shape(shape) for type_ in op.kind.results]
        if op.name == CONSTANT:
            element = op.kind.attrs["value"].array().reshape(-1)[0]
            env[op.results[0]] = b.splat(np.asarray(element), results[0])
        else:
            outs = b.op(op.name, [env[v] for v in op.operands], results, op.kind.attrs)
            env.update(zip(op.results, outs, strict=True))
    return tuple(env[v] for v in body.region.results)


def with_identity(body: Body) -> Body:
    """Returns a reduction's body with an operand more: a flag, false if the others are no term.

    `(a, b): f(a, b)` becomes `(a, p, b, q): (p & q ? f(a, b) : p ? a : b), p | q`.
    """
    b, count, flag = Builder(), len(body.region.results), TensorType((), "i1")
    *left, p = [b.value(t) for t in (*(body.types[v] for v in body.region.args[:count]), flag)]
    *right, q = [b.value(b.types[v]) for v in (*left, p)]
    b.begin()
    env = dict(zip(body.region.args, (*left, *right), strict=True))
    for op in body.region.ops:
        repeat_op(b, op, env)
    both = b.binary("and", p, q)
    one = [b.select(p, x, y) for x, y in zip(left, right, strict=True)]
    made = [b.select(both, env[v], x) for v, x in zip(body.region.results, one, strict=True)]
    region = b.end([*left, p, *right, q], [*made, b.binary("or", p, q)])
    return Body(tuple(b.types), region)
