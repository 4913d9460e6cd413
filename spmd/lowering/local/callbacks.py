"""Callbacks: one device calls Python; all devices get its results, or all raise its error.

before: `%1, %2 = spmd.callback %0 {number = 0}`        (%1 is the flag)
after:  `%3, %4 = spmd.callback %0 {number = 0, free = {data, model}}; %1 = all_reduce %3
         %5 = all_reduce (bits of %4); %2 = spmd.check_callback %1, (%5 as it was)`

The first of the devices calls, the others have zeros, and integers are added: their bits, so that
every number arrives as it was. Without the check a device that raised would leave the others
waiting in the next collective. As they are written (`expand`) the first device's call is a branch:

after:  `%3, %4 = if (device is the first) { spmd.callback %0 } else { zeros }; ...
         %2 = if (%1 != 0) { spmd.check_callback %1, %5 } else { %5 }`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK, FLAG
from spmd.ir.dialect.manual import IF
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Carry, recarried
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
    checked = b.op(CHECK_CALLBACK, (flag, *shared), types, {"number": attrs["number"]})
    return (flag, *checked)


def _shared(b: Builder, x: Value, axes: Axes) -> Value:
    """Returns on all devices the value of the one device where it is not zero, by an all-reduce."""
    type_ = b.types[x]
    if type_.dtype.startswith("complex"):
        part = type_._replace(dtype=type_.dtype[len("complex<") : -1])
        parts = [b.op(f"stablehlo.{name}", (x,), (part,))[0] for name in ("real", "imag")]
        return b.op("stablehlo.complex", [_shared(b, part, axes) for part in parts], (type_,))[0]
    if is_float(type_.dtype):
        bits = type_._replace(dtype=f"ui{dtype_bits(type_.dtype)}")
        return _cast(b, _shared(b, _cast(b, x, bits), axes), type_)
    if dtype_bits(type_.dtype) < 8:
        return b.convert(_shared(b, b.convert(x, "i32"), axes), type_.dtype)
    kind = "or" if type_.dtype == "i1" else "add"
    return b.collective("all_reduce", x, type_, axes, body=reducer_body(kind, type_.dtype))


def _cast(b: Builder, x: Value, type_: TensorType) -> Value:
    return b.op("stablehlo.bitcast_convert", (x,), (type_,))[0]


LINKED = "linked"
"""Attribute of a callback whose last operand and last result are a number that orders it."""


def in_order(program: Program) -> Program:
    """Links each ordered callback to the one before it, so that XLA cannot change their order.

    Each takes a number from the one before and returns it, through loops and branches.

    before: `spmd.callback %0 {ordered}; while { spmd.callback %1 {ordered} }`
    after:  `%7 = spmd.callback %0, zero; while(%8 = %7) { %9 = spmd.callback %1, %8; return %9 }`
    """
    if not any(map(_is_ordered, program.body.ops)):
        return program
    b = Builder(program.types)
    b.begin()
    first = b.splat(0, FLAG)
    start = b.end((), ()).ops
    body, _ = _linked(b, program.body, first)
    return program._replace(types=tuple(b.types), body=body._replace(ops=(*start, *body.ops)))


def _is_ordered(op: Op) -> bool:
    inner = (inner for region in op.regions for inner in region.ops)
    return bool(op.name == CALLBACK and op.kind.attrs["ordered"]) or any(map(_is_ordered, inner))


def _linked(b: Builder, region: Region, link: Value) -> tuple[Region, Value]:
    ops = []
    for op in region.ops:
        if not _is_ordered(op):
            ops.append(op)
            continue
        after, kind = b.value(FLAG), op.kind
        if op.is_loop:
            # What a condition calls comes after the body before it, for a loop runs one by one.
            test, inside = b.value(FLAG), b.value(FLAG)
            cond, _ = _linked(b, op.regions[0], test)
            body, last = _linked(b, op.regions[1], inside)
            carry = Carry(link, test, inside, last, after)
            op = recarried(op._replace(regions=(cond, body)), b.types, more=(carry,))
        elif op.regions:
            made = [_linked(b, inner, link) for inner in op.regions]
            op = op._replace(
                kind=OpKind(op.name, kind.operands, (*kind.results, FLAG), kind.attrs),
                results=(*op.results, after),
                regions=tuple(inner._replace(results=(*inner.results, n)) for inner, n in made),
            )
        else:
            types, attrs = (*kind.operands, FLAG), {**kind.attrs, LINKED: True}
            op = op._replace(
                kind=OpKind(op.name, types, (*kind.results, FLAG), attrs),
                operands=(*op.operands, link),
                results=(*op.results, after),
            )
        ops.append(op)
        link = after
    return region._replace(ops=tuple(ops)), link


def where(
    b: Builder,
    flag: Value,
    op: Op,
    operands: tuple[Value, ...],
    otherwise: Callable[[], Sequence[Value]],
) -> Sequence[Value]:
    """Appends a branch: the results of `op` where a flag is set, those of `otherwise` elsewhere."""
    b.begin()
    done = b.end((), b.repeat(op.kind, operands))
    b.begin()
    others = b.end((), otherwise())
    return b.op(IF, (flag,), op.kind.results, {}, (done, others))
