"""CHLO's implicit broadcasts, constants and scans, written with StableHLO.

before: `%2 = chlo.broadcast_add %0, %1 : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xf32>`
after:  `%2 = broadcast_in_dim %1; %3 = stablehlo.add %0, %2`
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.dialect.bodies import inline_elementwise, is_elementwise
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Body, Value
from spmd.ir.types import Attribute, Opaque

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
    b, is_reverse = site.b, bool(site.attrs.get("is_reverse"))
    y, init = site.operands
    size = site.result.shape[dim]

    def first(x: Value, count: int) -> Value:
        """The first elements in the scan's order."""
        return b.slice_dim(x, dim, *((size - count, size) if is_reverse else (0, count)))

    def rest(x: Value, count: int) -> Value:
        """All but the first elements."""
        return b.slice_dim(x, dim, *((0, size - count) if is_reverse else (count, size)))

    def joined(head: Value, tail: Value) -> Value:
        return b.concatenate((tail, head) if is_reverse else (head, tail), dim)

    def combined(x: Value, carry: Value) -> Value:
        return inline_elementwise(b, body, (x, carry), b.types[x].shape)[0]

    head = first(y, 1)
    head = combined(head, b.reshape(init, b.types[head].shape))
    y = joined(head, rest(y, 1)) if size > 1 else head
    shift = 1
    while shift < size:
        moved = first(y, size - shift)
        y = joined(first(y, shift), combined(rest(y, shift), moved))
        shift *= 2
    return y, b.reshape(rest(y, size - 1), site.op.kind.results[1].shape)
