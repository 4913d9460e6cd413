"""CHLO's implicit broadcasts, constants and scans, said with StableHLO.

before: `%2 = chlo.broadcast_add %0, %1 : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xf32>`
after:  `%2 = broadcast_in_dim %1; %3 = stablehlo.add %0, %2`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.dialect.bodies import inline_elementwise, is_elementwise
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Body, Value
from spmd.ir.types import Attribute, Dense, Opaque, TensorType, dtype_bits, numpy_dtype

_STABLEHLO = (
    "add", "and", "atan2", "compare", "complex", "divide", "maximum", "minimum", "multiply", "or",
    "power", "remainder", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "subtract", "xor",
)  # fmt: skip
BROADCASTING = {
    **{f"chlo.broadcast_{name}": f"stablehlo.{name}" for name in _STABLEHLO},
    **{f"chlo.broadcast_{name}": f"chlo.{name}" for name in ("next_after", "polygamma", "zeta")},
}
"""Broadcasting op -> the op that it is once its operands have one shape."""


@canonical(*BROADCASTING)
def _broadcasting(site: Site) -> Sequence[Value]:
    name = BROADCASTING[site.op.name]
    shape = site.result.shape
    given = site.attrs.get("broadcast_dimensions")
    operands = [_spread(site.b, v, shape, given) for v in site.operands]
    attrs = {n: _as_stablehlo(a) for n, a in site.attrs.items() if n != "broadcast_dimensions"}
    return site.b.op(name, operands, (site.result,), attrs)


def _spread(b: Builder, x: Value, shape: tuple[int, ...], given: tuple[int, ...] | None) -> Value:
    """An operand at the common shape; dims line up at the end unless the op says how."""
    rank = b.types[x].rank
    if b.types[x].shape == shape:
        return x
    if given is not None and len(given) == rank:
        return b.broadcast(x, shape, given)
    return b.broadcast(x, shape, tuple(range(len(shape) - rank, len(shape))))


def _as_stablehlo(attr: Attribute) -> Attribute:
    """CHLO's own spelling of comparison attributes."""
    return Opaque(attr.text.replace("#chlo<", "#stablehlo<")) if isinstance(attr, Opaque) else attr


@canonical("chlo.constant")
def _constant(site: Site) -> Sequence[Value]:
    return site.b.op("stablehlo.constant", (), (site.result,), site.attrs)


@canonical("chlo.constant_like")
def _constant_like(site: Site) -> Sequence[Value]:
    return (site.b.splat(_number(site.attrs["value"], site.result), site.result),)


def _number(attr: Attribute, type_: TensorType) -> Any:
    """The number that a scalar attribute writes."""
    if isinstance(attr, Dense):
        return attr.array().reshape(-1)[0]
    text = getattr(attr, "text", str(attr)).partition(":")[0].strip()
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    dtype = numpy_dtype(type_.dtype)
    if text.startswith("0x"):
        return np.frombuffer(int(text, 16).to_bytes(dtype.itemsize, "little"), dtype)[0]
    return int(text) if dtype.kind in "iu" else float(text)


@canonical("chlo.mulhi")
def _mulhi(site: Site) -> Sequence[Value]:
    """The upper half of a product: of twice the width, or of 32-bit halves for 64 bits."""
    b, dtype = site.b, site.result.dtype
    bits = dtype_bits(dtype)
    if bits == 64:
        return (_mulhi_64(b, *site.operands),)
    wide = dtype.replace(str(bits), str(2 * bits))
    x, y = (b.convert(v, wide) for v in site.operands)
    product = b.binary("multiply", x, y)
    width = b.splat(bits, b.types[product])
    return (b.convert(b.binary("shift_right_logical", product, width), dtype),)


def _mulhi_64(b: Builder, x: Value, y: Value) -> Value:
    """The upper half of a 128-bit product, by multiplying 32-bit halves."""
    # As unsigned numbers a negative factor x counts as x + 2**64, so the product has y * 2**64 too
    # much: its upper half is too large by y. The last loop takes that away.
    type_ = b.types[x]
    half, mask = b.splat(32, type_), b.splat(2**32 - 1, type_)

    def low(v: Value) -> Value:
        return b.binary("and", v, mask)

    def high(v: Value) -> Value:
        return b.binary("shift_right_logical", v, half)

    def times(v: Value, w: Value) -> Value:
        return b.binary("multiply", v, w)

    middle = b.binary("add", times(high(x), low(y)), high(times(low(x), low(y))))
    other = b.binary("add", times(low(x), high(y)), low(middle))
    carried = b.binary("add", high(middle), high(other))
    result = b.binary("add", times(high(x), high(y)), carried)
    if type_.dtype.startswith("u"):
        return result
    sign = b.splat(63, type_)
    for negative, factor in ((x, y), (y, x)):
        bits = b.binary("shift_right_arithmetic", negative, sign)
        result = b.binary("subtract", result, b.binary("and", bits, factor))
    return result


@canonical("chlo.scan")
def _scan(site: Site) -> Sequence[Value]:
    """An associative scan in log2(n) steps, each a shifted combination of the whole.

    `y[0] = body(x[0], init)`, then for shifts s = 1, 2, 4, ...: `y[i] = body(y[i], y[i - s])`.
    """
    # A running sum of 1 2 3 4:   shift 1: 1 3 5 7   shift 2: 1 3 6 10
    # After the step with shift s every element holds the last 2 s terms up to its own. Each step is
    # elementwise, so that the scanned dim may be split; a loop over its elements could not be.
    body: Body = site.attrs["body"]
    dim = site.attrs["dimension"]
    if len(site.operands) != 2 or not site.attrs.get("is_associative") or not is_elementwise(body):
        site.fail("only a scan of one tensor by an associative elementwise body is known",
                  "write it as a loop")  # fmt: skip
    if body.region.results[0] != body.region.results[1]:
        site.fail("its output differs from its carry", "write it as a loop")
    scan = _Scan(site.b, body, dim, bool(site.attrs.get("is_reverse")))
    y = scan.start(*site.operands)
    shift = 1
    while shift < site.result.shape[dim]:
        y = scan.step(y, shift)
        shift *= 2
    return y, scan.last(y, site.op.kind.results[1])


class _Scan:
    def __init__(self, b: Builder, body: Body, dim: int, is_reverse: bool) -> None:
        self.b = b
        self.body = body
        self.dim = dim
        self.is_reverse = is_reverse

    def start(self, x: Value, init: Value) -> Value:
        """The first element combined with the initial carry."""
        size = self.b.types[x].shape[self.dim]
        first = self.first(x, 1)
        shape = self.b.types[first].shape
        combined = self.combine(first, self.b.reshape(init, shape))
        return self.join(combined, self.rest(x, 1)) if size > 1 else combined

    def step(self, y: Value, shift: int) -> Value:
        """Every element combined with the one `shift` before it."""
        size = self.b.types[y].shape[self.dim]
        moved = self.first(y, size - shift)
        return self.join(self.first(y, shift), self.combine(self.rest(y, shift), moved))

    def last(self, y: Value, type_: TensorType) -> Value:
        """The final carry."""
        return self.b.reshape(self.rest(y, self.b.types[y].shape[self.dim] - 1), type_.shape)

    def combine(self, x: Value, carry: Value) -> Value:
        return inline_elementwise(self.b, self.body, (x, carry), self.b.types[x].shape)[0]

    def first(self, x: Value, count: int) -> Value:
        """The first elements in the scan's order."""
        size = self.b.types[x].shape[self.dim]
        return self.cut(x, size - count, size) if self.is_reverse else self.cut(x, 0, count)

    def rest(self, x: Value, count: int) -> Value:
        """All but the first elements."""
        size = self.b.types[x].shape[self.dim]
        return self.cut(x, 0, size - count) if self.is_reverse else self.cut(x, count, size)

    def cut(self, x: Value, start: int, limit: int) -> Value:
        return self.b.slice_dim(x, self.dim, start, limit)

    def join(self, first: Value, rest: Value) -> Value:
        parts = (rest, first) if self.is_reverse else (first, rest)
        return self.b.concatenate(parts, self.dim)
