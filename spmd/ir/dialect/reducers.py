"""Reductions by name (`add`, `max`, ...): the op that combines two terms, and its identity."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from spmd.ir.description import BROADCAST, CONSTANT, DESCRIPTIONS
from spmd.ir.dialect import elementwise  # noqa: F401 (describes the ops)
from spmd.ir.program import Body, Op, OpKind, Region, Value
from spmd.ir.types import TensorType, is_integer, numpy_dtype

REDUCER_OPS = {about.reducer: name for name, about in DESCRIPTIONS.items() if about.reducer}
"""Maps a reduction's name (`add`, `max`, ...) to the name of the op that combines two terms."""

NEUTRAL = "spmd.neutral"
"""Attribute of reductions, pads: if initial values or padding are the identity (0 of a sum)."""


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


def joining(dtype: str) -> str:
    """Returns the reduction that gives the element that one device has, where others have zeros."""
    # f8E8M0FNU has no zero: all powers of two from 2**-127 on, which then stands for it.
    return {"i1": "or", "f8E8M0FNU": "max"}.get(dtype, "add")


def is_identity(value: Value, producers: Mapping[Value, Op], reducer: str) -> bool:
    """Whether a value is a constant (or its broadcast) of a reducer's identity, 0 of `add`."""
    op = producers.get(value)
    while op is not None and op.name == BROADCAST:
        op = producers.get(op.operands[0])
    if op is None or op.name != CONSTANT or not reducer:
        return False
    element = identity_element(reducer, op.kind.results[0].dtype)
    return bool((op.kind.attrs["value"].array() == element).all())


def is_neutral(inits: Sequence[Value], producers: Mapping[Value, Op], body: Body) -> bool:
    """Whether values that a reduction starts from change nothing, however often they join in.

    For a body that `body_reducer` does not know: whether the first is an end of its dtype's range
    (False if unsigned or `i1`). So jax starts argmax, logaddexp and maxima of complex numbers.
    """
    if reducer := body_reducer(body):
        return all(is_identity(value, producers, reducer) for value in inits)
    dtype, ends = body.types[body.region.args[0]].dtype, ("max", "min")
    # 0 is an end of unsigned numbers, which many bodies start from.
    is_ended = dtype[0] != "u" and dtype != "i1" and len(body.region.ops) > 0
    return is_ended and any(is_identity(inits[0], producers, end) for end in ends)


def identity_element(kind: str, dtype: str) -> Any:
    """Returns the `dtype` element that changes no reduction by `kind`: 0 for `add`, 1 for `mul`."""
    np_dtype = numpy_dtype(dtype)
    if kind in ("add", "or", "xor"):
        return np.zeros((), np_dtype)
    if kind == "mul":
        return np.ones((), np_dtype)
    if kind == "and":
        return np.asarray(-1).astype(np_dtype)
    largest = kind == "min"  # min and max start from the far end of the dtype's range
    if dtype == "i1":
        return np.asarray(largest)
    if is_integer(dtype):
        limits: Any = ml_dtypes.iinfo(np_dtype)
    else:
        end = np.inf if largest else -np.inf
        found = np.asarray(complex(end, end) if np_dtype.kind == "c" else end, np_dtype)
        if not np.isnan(found):
            return found
        limits = ml_dtypes.finfo(np_dtype)  # of an 8-bit float without infinity
    return np.asarray(limits.max if largest else limits.min, np_dtype)
