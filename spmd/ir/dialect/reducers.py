"""Reductions by name (`add`, `max`, ...): the op that combines two terms, and its identity."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd.ir.description import BROADCAST, CONSTANT, DESCRIPTIONS
from spmd.ir.dialect import elementwise  # noqa: F401 (describes the ops)
from spmd.ir.program import Body, Op, OpKind, Region, Value
from spmd.ir.types import TensorType, numpy_dtype

REDUCER_OPS = {about.reducer: name for name, about in DESCRIPTIONS.items() if about.reducer}
"""Maps a reduction's name (`add`, `max`, ...) to the name of the op that combines two terms."""

NEUTRAL = "spmd.neutral"
"""Attribute of reductions, pads: whether initial values or padding are the identity (0 of a
sum)."""


def body_reducer(body: Body) -> str:
    """Returns `add`, `max`, ... if a body is just that op of its two arguments, else ""."""
    region = body.region
    if len(region.ops) != 1 or len(region.args) != 2 or len(region.results) != 1:
        return ""
    op = region.ops[0]
    if sorted(op.operands) != sorted(region.args) or region.results != op.results:
        return ""
    return op.kind.about.reducer


def reducer_body(kind: str, dtype: str) -> Body:
    """Returns the body of a reduction by `kind` (`add`, `max`, ...): one op over two scalars."""
    scalar = TensorType((), dtype)
    op_kind = OpKind(REDUCER_OPS[kind], (scalar, scalar), (scalar,), {})
    return Body((scalar,) * 3, Region((0, 1), (Op(op_kind, (0, 1), (2,)),), (2,)))


def is_identity(value: Value, producers: Mapping[Value, Op], reducer: str) -> bool:
    """Whether a value is a constant (or its broadcast) of a reducer's identity, 0 of `add`."""
    op = producers.get(value)
    while op is not None and op.name == BROADCAST:
        op = producers.get(op.operands[0])
    if op is None or op.name != CONSTANT or not reducer:
        return False
    element = identity_element(reducer, op.kind.results[0].dtype)
    return bool((op.kind.attrs["value"].array() == element).all())


def identity_element(kind: str, dtype: str) -> Any:
    """Returns the `dtype` element that changes no reduction by `kind`: 0 for `add`, 1 for `mul`."""
    np_dtype = numpy_dtype(dtype)
    if kind in ("add", "or", "xor"):
        return np.zeros((), np_dtype)
    if kind == "mul":
        return np.ones((), np_dtype)
    if kind == "and":
        return np.asarray(True) if dtype == "i1" else np.invert(np.zeros((), np_dtype))
    largest = kind == "min"  # min and max start from the far end of the dtype's range
    if dtype == "i1":
        return np.asarray(largest)
    if np_dtype.kind in "iu" or dtype in ("i2", "i4", "ui2", "ui4"):
        import ml_dtypes

        limits = ml_dtypes.iinfo(np_dtype)
        return np.asarray(limits.max if largest else limits.min, np_dtype)
    return np.asarray(np.inf if largest else -np.inf, np_dtype)
