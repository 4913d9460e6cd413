"""Rewrite: a collective over fast and slow links sends over the slow ones only what it must.

On a mesh whose axis `data` is made of hosts (slow links, `data:(1)2`) and of the devices of each
(fast ones, `data:(2)4`):

before: `%2 = all_reduce %1 {data}`
after:  `%2 = reduce_scatter %1 {data:(2)4}; %3 = all_reduce %2 {data:(1)2}`
        `%4 = all_gather %3 {data:(2)4}`

before: `%2 = all_gather %1 {data} dim=0`
after:  `%2 = all_gather %1 {data:(1)2} dim=0; %3 = all_gather %2 {data:(2)4} dim=0`
        `%4 =` the pieces of `%3` in the order of `data`

before: `%2 = reduce_scatter %1 {data} dim=0`
after:  `%2 =` the pieces of `%1`, those of one host's devices side by side
        `%3 = reduce_scatter %2 {data:(2)4} dim=0; %4 = reduce_scatter %3 {data:(1)2} dim=0`

So a device sends to other hosts one share of a sum instead of all of it, and its own piece of a
gathered value instead of all pieces of its host. An all-reduce over fast links and one over slow
links, one after the other, count as one over both. All this is done where the cost model predicts
it to be faster, copies that reorder pieces included. Cho et al. 2019, "BlueConnect".
"""

from collections.abc import Sequence
from typing import Any

from spmd.ir.control_flow import Index
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.predict.ops import Transfer


def two_level(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Splits each collective over fast and slow links into two or three where that is faster."""
    is_slow = [link == topology.chip.dcn for link in topology.atom_links(mesh)]
    if len(set(is_slow)) < 2:
        return program
    chains = _chains(program)

    def seconds(op: Op) -> float:
        sent = Transfer.of(op, mesh)
        return sent.seconds(mesh, topology) if sent else 0.0

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if op.collective not in IN_PIECES or len(op.operands) != 1 or "groups" in op.kind.attrs:
            return None
        chain = chains.get(op.results[0], [op])
        axes = tuple(a for part in chain for a in part.kind.attrs["axes"])
        fast = tuple(a for a in axes if not is_slow[a])
        slow = tuple(a for a in axes if is_slow[a])
        if not fast or not slow:
            return None
        x, split = now(chain[0].operands[0]), _summed if op.collective == "all_reduce" else _joined
        trial = Builder(b.types)
        trial.begin()
        _, copied = split(trial, x, op, fast, slow, mesh)
        in_parts = sum(map(seconds, trial.end((), ()).ops)) + 2 * copied / topology.hbm_bandwidth
        if in_parts >= sum(map(seconds, chain)):
            return None
        return split(b, x, op, fast, slow, mesh)[:1]

    return remove_dead(edit_ops(program, edit))


IN_PIECES = ("all_gather", "all_reduce", "reduce_scatter")  # kinds done in parts, or together


def _chains(program: Program) -> dict[Value, list[Op]]:
    """Maps each all-reduce's result to the row of all-reduces over distinct atoms that it ends."""
    # `%2 = all_reduce %1 {x}; %3 = all_reduce %2 {y}` counts as one sum over x and y if nothing
    # else reads %2. The parts of %3 then start from %1, which leaves %2 to `remove_dead`. Both are
    # in one region: devices along x may disagree on whether they enter one around %3 alone.
    users = Index(program).users
    chains: dict[Value, list[Op]] = {}
    regions = [program.body]
    for region in regions:
        here: dict[Value, list[Op]] = {}
        for op in region.ops:
            regions += op.regions
            own = op.kind.attrs
            if op.collective == "all_reduce" and len(op.results) == 1 and "groups" not in own:
                before = here.get(op.operands[0], []) if len(users[op.operands[0]]) == 1 else []
                fits = all(
                    other.kind.attrs["body"] == own["body"]
                    and set(other.kind.attrs["axes"]).isdisjoint(own["axes"])
                    for other in before
                )
                here[op.results[0]] = [*before, op] if fits else [op]
        chains.update(here)
    return chains


def _part(
    b: Builder, op: Op, where: str, kind: str, x: Value, type_: TensorType, axes: Axes, **how: Any
) -> Value:
    """Appends a collective `kind` of `x`, one of those that replace `op`; its note says `where`."""
    b.loc = op.loc._replace(note=f"{op.loc.note} ({where})".strip())
    return b.collective(kind, x, type_, axes, **how)


def _summed(b: Builder, x: Value, op: Op, fast: Axes, slow: Axes, mesh: Mesh) -> tuple[Value, int]:
    """Appends an all-reduce of `x` in three parts; returns (result, bytes copied to pad `x`)."""
    # A dim that the fast devices divide is scattered in place. Without one the sum goes through a
    # flat buffer that is padded to a multiple: f32[3, 5] over 4 devices is f32[16], in fours.
    type_, count, body = op.kind.results[0], mesh.extent(fast), op.kind.attrs["body"]
    found = [d for d, size in enumerate(type_.shape) if size and size % count == 0]
    dim = found[0] if found else 0
    if not found:
        zero, missing = b.splat(0, TensorType((), type_.dtype)), -type_.size % count
        x = b.pad_dim(b.reshape(x, (type_.size,)), 0, 0, missing, zero)
    whole = b.types[x]
    one = whole.scaled(dim, 1, count)
    how = {"scatter_dimension": dim, "body": body}
    x = _part(b, op, "within hosts, part 1 of 3", "reduce_scatter", x, one, fast, **how)
    x = _part(b, op, "between hosts, part 2 of 3", "all_reduce", x, one, slow, body=body)
    x = _part(b, op, "within hosts, part 3 of 3", "all_gather", x, whole, fast, all_gather_dim=dim)
    if found:
        return x, 0
    return b.reshape(b.slice_dim(x, 0, 0, type_.size), type_.shape), 2 * whole.bytes


def _joined(b: Builder, x: Value, op: Op, fast: Axes, slow: Axes, mesh: Mesh) -> tuple[Value, int]:
    """Appends a gather or reduce-scatter in two parts; returns (result, bytes reordered)."""
    # A gather goes over the slow links first, a reduce-scatter last: while pieces are small.
    attrs, along, kind = op.kind.attrs, op.kind.about.along, op.collective
    axes, dim, gathers = attrs["axes"], attrs[along], op.collective == "all_gather"
    (before,), (after,) = op.kind.operands, op.kind.results
    some = (before if gathers else after).scaled(dim, mesh.extent(slow))
    how = {name: attrs[name] for name in (along, "body") if name in attrs}
    # data=4 made of host (slow, 2) and device (fast, 2). Piece hd belongs to device d of host h:
    #   in the order of data, which is (host, device):  00 01 10 11
    #   gathered over host, then over device:           00 10 01 11     (device, host)
    # The dim is taken apart into (device, host, piece), and the first two change places.
    is_turned = axes != fast + slow
    if is_turned and not gathers:
        x = _turned(b, x, dim, axes, fast + slow, mesh)
    for number, over in enumerate((slow, fast) if gathers else (fast, slow), 1):
        where = f"{'between' if over == slow else 'within'} hosts, part {number} of 2"
        x = _part(b, op, where, kind, x, some if number == 1 else after, over, **how)
    if is_turned and gathers:
        x = _turned(b, x, dim, fast + slow, axes, mesh)
    return x, max(before.bytes, after.bytes) if is_turned else 0


def _turned(b: Builder, x: Value, dim: int, have: Axes, wanted: Axes, mesh: Mesh) -> Value:
    """Reorders the pieces of a dim from the order of the atoms `have` to that of `wanted`."""
    shape = b.types[x].shape
    counts = [mesh.atom_sizes[a] for a in have]
    piece = shape[dim] // mesh.extent(have)
    apart = b.reshape(x, (*shape[:dim], *counts, piece, *shape[dim + 1 :]))
    order = [dim + have.index(a) for a in wanted]
    rank = len(shape) + len(have)
    moved = b.transpose(apart, (*range(dim), *order, *range(dim + len(have), rank)))
    return b.reshape(moved, shape)
