"""Callbacks: one device calls Python; all devices get its results, or all raise its error.

before: `%1, %2 = spmd.callback %0 {number = 0}`        (%1 is 1 if the function raised, else 0)
after:  `%3, %4 = spmd.callback %0 {number = 0, free = {data, model}}; %1 = all_reduce %3
         %5 = all_reduce (bits of %4); %2 = spmd.check_callback %1, (%5 as it was)`

The first device along the `free` atoms calls, the others have zeros. The all-reduces add the bits
of numbers as integers, so that each arrives unchanged. Without the check, a device whose call
raised would leave the others waiting in the next collective. `expand` writes both as branches:

after:  `%3, %4 = if (device is the first) { spmd.callback %0 } else { zeros }; ...
         %2 = if (%1 != 0) { spmd.check_callback %1, %5 } else { %5 }`
"""

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Value
from spmd.ir.types import TensorType, dtype_bits, is_float
from spmd.lowering.local.table import LocalOp, local
from spmd.mesh.sharding import Axes

FREE = "free"  # attribute of a local callback: the atoms along which one device calls for all


@local(CALLBACK)
def _callback(op: LocalOp) -> tuple[Value, ...]:
    b, attrs = op.b, op.attrs
    others = (a for a in range(len(op.mesh.atoms)) if a not in attrs["held"])
    free = () if attrs["partitioned"] else tuple(others)
    results = op.emit(**{FREE: free})
    if not free:
        return results
    with b.noted(f"one device calls {op.op.label}, and all need what comes of it"):
        flag, *shared = [_shared(b, value, free) for value in results]
    types = [b.types[value] for value in shared]
    return (flag, *b.op(CHECK_CALLBACK, (flag, *shared), types, {"number": attrs["number"]}))


def _shared(b: Builder, x: Value, axes: Axes) -> Value:
    """Returns `x` of the first device along `axes` on all of them; others have to have zeros."""
    type_ = b.types[x]
    if type_.dtype.startswith("complex"):
        part = type_._replace(dtype=type_.dtype[len("complex<") : -1])
        parts = [b.op(f"stablehlo.{name}", (x,), (part,))[0] for name in ("real", "imag")]
        return b.op("stablehlo.complex", [_shared(b, part, axes) for part in parts], (type_,))[0]
    if is_float(type_.dtype):
        bits = type_._replace(dtype=f"ui{dtype_bits(type_.dtype)}")
        return as_bits(b, _shared(b, as_bits(b, x, bits), axes), type_)
    if dtype_bits(type_.dtype) < 8:
        return b.convert(_shared(b, b.convert(x, "i32"), axes), type_.dtype)
    kind = "or" if type_.dtype == "i1" else "add"
    return b.collective("all_reduce", x, type_, axes, body=reducer_body(kind, type_.dtype))


def as_bits(b: Builder, x: Value, type_: TensorType) -> Value:
    """Appends the reading of the bits of `x` as another type of the same width."""
    return b.op("stablehlo.bitcast_convert", (x,), (type_,))[0]
