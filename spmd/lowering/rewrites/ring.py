"""Rewrite for TPUs: a sum that is scattered travels while the product that makes it is computed.

before: `%2 = dot %0, %1; %3 = reduce_scatter %2 {data} dim=0`
after, four devices, of which this is the d-th; piece i is the i-th quarter of `%0`:
        `%4 = dot piece[d-1], %1; %5 = collective_permute %4 {data}` (to the next device)
        `%6 = dot piece[d-2], %1; %7 = add %5, %6; %8 = collective_permute %7 {data}`
        `%9 = dot piece[d-3], %1; ...; %3 = add %11, dot piece[d], %1`

The TPU compiler waits for every reduce-scatter, and for no permute: each is under way while the
next piece is multiplied. Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models".

Over a whole slice, whose devices jax puts in an order in which each is next to the one before it,
pieces go round both ways at once, half of the way each: the fifth of eight devices gets the terms
of 1 to 4 from one side, and those of 6 to 8 from the other. The compiler makes an all-reduce of
such a sum, and waits for it. Sums among more than `MOST_DEVICES` of a slice stay: neighbours in that
ring are no neighbours in the torus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from spmd.ir.control_flow import users_of
from spmd.ir.dead import remove_dead
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import PASS
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.lowering.divergence import HELD
from spmd.lowering.local.dims import dynamic_take_dim
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology

MOST_DEVICES = 8
"""Among more devices sums are left to the compiler, but for those over a whole slice."""

LEAST_BYTES = 2 << 20
"""Smaller pieces take no longer than starting a product does."""


def ring(program: Program, mesh: Mesh, topology: Topology, least: int = LEAST_BYTES) -> Program:
    """Takes reduce-scatters of products apart; programs for other machines than TPUs stay.

    Args:
      program: a local program.
      mesh: its mesh.
      topology: the machine.
      least: bytes of the smallest piece that is worth it.
    """
    # A permute is an exchange among all of the mesh: not where devices go different ways.
    if topology.platform != "tpu" or any(HELD in op.kind.attrs for op in program.walk()):
        return program
    slow = {a for a, link in enumerate(topology.atom_links(mesh)) if link == topology.chip.dcn}

    def worth(op: Op) -> bool:
        axes = op.kind.attrs.get("axes", ())
        if op.collective != "reduce_scatter" or op.kind.results[0].bytes < least:
            return False
        few = 1 < mesh.extent(axes) <= MOST_DEVICES
        return slow.isdisjoint(axes) and (few or _is_whole(axes, mesh, topology))

    products = _products(program, worth)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        product = products.get(op.results[0]) if op.results else None
        if product is None:
            return None
        ways = 2 if _is_whole(op.kind.attrs["axes"], mesh, topology) else 1
        operands = [now(v) for v in product.operands]
        return (_in_pieces(b, op, product, operands, mesh, ways),)

    return remove_dead(edit_ops(program, edit)) if products else program


def _is_whole(axes: Axes, mesh: Mesh, topology: Topology) -> bool:
    """Whether axes are all of a slice, in the order in which its devices are neighbours."""
    return mesh.extent(axes) == topology.count and list(axes) == sorted(axes)


def _products(program: Program, worth: Callable[[Op], bool]) -> dict[Value, Op]:
    """For each reduce-scatter to be taken apart, the product that nothing else reads."""
    users = users_of(program)
    found: dict[Value, Op] = {}

    def visit(region: Region) -> None:
        made = {v: op for op in region.ops for v in op.results}
        for op in region.ops:
            for inner in op.regions:
                visit(inner)
            product = made.get(op.operands[0]) if worth(op) else None
            if product and len(users[op.operands[0]]) == 1 and _cut(product, op):
                found[op.results[0]] = product

    visit(program.body)
    return found


def _cut(product: Op, scatter: Op) -> dict[int, int]:
    """Operand -> its dim that becomes the scattered dim of a product; empty if there is none."""
    attrs, dtype = scatter.kind.attrs, scatter.kind.results[0].dtype
    if product.kind.about.flops is None or attrs["body"] != reducer_body("add", dtype):
        return {}
    rule = rule_of(product.kind)
    factors = rule.results[0][attrs["scatter_dimension"]]
    if len(factors) != 1 or rule.factors[factors[0]].kind != PASS or rule.reads or rule.merges:
        return {}
    return {i: dims.index(factors) for i, dims in enumerate(rule.operands) if factors in dims}


def _in_pieces(
    b: Builder, op: Op, product: Op, operands: Sequence[Value], mesh: Mesh, ways: int
) -> Value:
    axes, (piece,) = op.kind.attrs["axes"], op.kind.results
    count, cut = mesh.extent(axes), _cut(product, op)
    size, own = piece.shape[op.kind.attrs["scatter_dimension"]], b.axis_index(axes)

    def term(place: int) -> Value:
        """This device's term of the piece of the device `place` places behind it."""
        number = b.binary("add", own, b.constant(place % count, "i32"))
        number = b.binary("remainder", number, b.constant(count, "i32"))
        start = b.binary("multiply", number, b.constant(size, "i32"))
        parts = [
            dynamic_take_dim(b, v, cut[i], start, size) if i in cut else v
            for i, v in enumerate(operands)
        ]
        return b.op(product.name, parts, (piece,), product.kind.attrs)[0]

    # A piece begins farthest from its owner, `far` places, and each device on its way adds a term.
    far = {1: count // ways, -1: count - 1 - count // ways} if ways == 2 else {1: count - 1}
    total: dict[int, Value] = {}
    order = [(way, left) for left in range(max(far.values()), 0, -1) for way in far]
    order = [(way, left) for way, left in order if left <= far[way]]
    for step, (way, left) in enumerate(order, 1):
        b.loc = op.loc._replace(note=f"{op.loc.note} (piece {step} of {count})".strip())
        own_term = term(way * left)
        sum_ = b.binary("add", total[way], own_term) if way in total else own_term
        pairs = _to_next(axes, mesh, way)
        total[way] = b.collective("collective_permute", sum_, piece, axes, pairs=pairs)
    b.loc = op.loc._replace(note=f"{op.loc.note} (piece {count} of {count})".strip())
    return reduce(partial(b.binary, "add"), [*total.values(), term(0)])


def _to_next(axes: Axes, mesh: Mesh, way: int) -> tuple[tuple[int, int], ...]:
    """Who sends to whom, by target: each device to the next one along some atoms, or the last."""
    rings = [group[::way] for group in mesh.groups(axes)]
    pairs = [(a, c) for group in rings for a, c in zip(group, (*group[1:], group[0]), strict=True)]
    return tuple(sorted(pairs, key=lambda pair: pair[1]))
