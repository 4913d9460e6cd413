"""Rewrite for TPUs: a sum that is scattered travels while the product that makes it is computed.

before: `%2 = dot %0, %1; %3 = reduce_scatter %2 {data} dim=0`
after, four devices, of which this is the d-th; piece i is the i-th quarter of `%0`:
        `%4 = dot piece[d-1], %1; %5 = collective_permute %4 {data}` (to the next device)
        `%6 = dot piece[d-2], %1; %7 = add %5, %6; %8 = collective_permute %7 {data}`
        `%9 = dot piece[d-3], %1; ...; %3 = add %11, dot piece[d], %1`

The TPU compiler waits for every reduce-scatter, and for no permute: each is under way while the
next piece is multiplied. Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models".

Sums among more than `MOST_DEVICES` stay. Pieces of products get small then; and where they go round
a part of the devices only, neighbours in that ring are no neighbours in the torus. Of a whole slice
the compiler's all-reduce has the links of all torus dims, and a ring or two those of one.
"""

from __future__ import annotations

from collections.abc import Sequence

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
"""Among more devices sums are left to the compiler."""

LEAST_BYTES = 16 << 20
"""Smaller sums take no longer than starting the pieces of a product does."""


def ring(program: Program, mesh: Mesh, topology: Topology, least: int = LEAST_BYTES) -> Program:
    """Takes reduce-scatters of products apart; programs for other machines than TPUs stay.

    Args:
      program: a local program.
      mesh: its mesh.
      topology: the machine.
      least: bytes of the smallest sum that is worth it.
    """
    # A permute is an exchange among all of the mesh: not where devices go different ways.
    if topology.platform != "tpu" or any(HELD in op.kind.attrs for op in program.walk()):
        return program
    slow = {a for a, link in enumerate(topology.atom_links(mesh)) if link == topology.chip.dcn}
    products = _products(program, mesh, least, slow)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        product = products.get(op.results[0]) if op.results else None
        if product is None:
            return None
        return (_in_pieces(b, op, product, [now(v) for v in product.operands], mesh),)

    return remove_dead(edit_ops(program, edit)) if products else program


def _products(program: Program, mesh: Mesh, least: int, slow: set[int]) -> dict[Value, Op]:
    """For each reduce-scatter to be taken apart, the product that nothing else reads."""
    users = users_of(program)
    found: dict[Value, Op] = {}

    def visit(region: Region) -> None:
        made = {v: op for op in region.ops for v in op.results}
        for op in region.ops:
            for inner in op.regions:
                visit(inner)
            axes = op.kind.attrs.get("axes", ())
            if op.collective != "reduce_scatter" or op.kind.operands[0].bytes < least:
                continue
            if not 1 < mesh.extent(axes) <= MOST_DEVICES or not slow.isdisjoint(axes):
                continue
            product = made.get(op.operands[0])
            if product and len(users[op.operands[0]]) == 1 and _cut(product, op):
                found[op.results[0]] = product

    visit(program.body)
    return found


def _cut(product: Op, scatter: Op) -> dict[int, int]:
    """Operand -> its dim that becomes the scattered dim of a product; empty if there is none."""
    attrs, dtype = scatter.kind.attrs, scatter.kind.results[0].dtype
    # A product of matrices or images is the same op on a piece; a kernel takes its own shapes.
    if not product.kind.about.reads or attrs["body"] != reducer_body("add", dtype):
        return {}
    rule = rule_of(product.kind)
    factors = rule.results[0][attrs["scatter_dimension"]]
    if len(factors) != 1 or rule.factors[factors[0]].kind != PASS or rule.reads or rule.merges:
        return {}
    return {i: dims.index(factors) for i, dims in enumerate(rule.operands) if factors in dims}


def _in_pieces(b: Builder, op: Op, product: Op, operands: Sequence[Value], mesh: Mesh) -> Value:
    axes, (piece,) = op.kind.attrs["axes"], op.kind.results
    count, cut = mesh.extent(axes), _cut(product, op)
    size, own = piece.shape[op.kind.attrs["scatter_dimension"]], b.axis_index(axes)
    pairs, total = _to_next(axes, mesh), None
    for step in range(count):
        note = f"{op.loc.note} (piece {step + 1} of {count})".strip()
        b.loc = op.loc._replace(note=note)
        if total is not None:
            total = b.collective("collective_permute", total, piece, axes, pairs=pairs)
        # Device d begins with the piece of the device before it, and ends with its own.
        number = b.binary("add", own, b.constant(count - 1 - step, "i32"))
        number = b.binary("remainder", number, b.constant(count, "i32"))
        start = b.binary("multiply", number, b.constant(size, "i32"))
        parts = [
            dynamic_take_dim(b, v, cut[i], start, size) if i in cut else v
            for i, v in enumerate(operands)
        ]
        (term,) = b.op(product.name, parts, (piece,), product.kind.attrs)
        total = term if total is None else b.binary("add", total, term)
    assert total is not None
    return total


def _to_next(axes: Axes, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom, by target: each device to the next one along some atoms."""
    rings = mesh.groups(axes)
    pairs = [(a, c) for group in rings for a, c in zip(group, (*group[1:], group[0]), strict=True)]
    return tuple(sorted(pairs, key=lambda pair: pair[1]))
