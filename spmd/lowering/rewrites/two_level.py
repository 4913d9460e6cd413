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

Each device sends one share of a sum to other hosts instead of all of it, and of a gathered value
its own piece instead of all pieces of its host. Sums over one kind of links after the other count
as one over both. Done where that is faster by the cost model, the copies that put pieces in order
included. Cho et al. 2019, "BlueConnect".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spmd.ir.control_flow import users_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds


def two_level(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Splits collectives over fast and slow links into two or three where that is faster."""
    links = topology.atom_links(mesh)
    is_slow = [link == topology.chip.dcn for link in links]
    if len(set(is_slow)) < 2:
        return program
    chains = _chains(program)

    def seconds(kind: str, axes: Axes, sent: TensorType, received: TensorType) -> float:
        return collective_seconds(kind, axes, sent.bytes, received.bytes, mesh, topology)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        attrs = op.kind.attrs
        if op.collective not in _PARTED or len(op.operands) != 1 or "groups" in attrs:
            return None
        chain = chains.get(op.results[0], [op])
        axes = tuple(a for part in chain for a in part.kind.attrs["axes"])
        fast = tuple(a for a in axes if not is_slow[a])
        slow = tuple(a for a in axes if is_slow[a])
        if not fast or not slow:
            return None
        sums = op.collective == "all_reduce"
        way = _summed(op, fast, slow, mesh) if sums else _joined(op, fast, slow, mesh)
        as_it_is = in_parts = 0.0
        for part in chain:
            (sent,), (received,) = part.kind.operands, part.kind.results
            as_it_is += seconds(part.label, part.kind.attrs["axes"], sent, received)
        before = way.first
        for kind, type_, over, _ in way.parts:
            in_parts += seconds(kind, over, before, type_)
            before = type_
        if in_parts + 2 * way.copied / topology.hbm_bandwidth >= as_it_is:
            return None
        x = way.before(b, now(chain[0].operands[0]))
        for number, (kind, type_, over, more) in enumerate(way.parts, 1):
            between = "between hosts" if over == slow else "within hosts"
            note = f"{op.loc.note} ({between}, part {number} of {len(way.parts)})".strip()
            b.loc = op.loc._replace(note=note)
            x = b.collective(kind, x, type_, over, **more)
        return (way.after(b, x),)

    return remove_dead(edit_ops(program, edit))


_PARTED = ("all_reduce", "all_gather", "reduce_scatter")


def _chains(program: Program) -> dict[Value, list[Op]]:
    """Maps each all-reduce's result to the chain of all-reduces over other atoms up to it."""
    # `%2 = all_reduce %1 {x}; %3 = all_reduce %2 {y}` counts as one sum over x and y if nothing
    # else reads %2. The parts of %3 then start from %1, which leaves %2 to `remove_dead`.
    users = users_of(program)
    chains: dict[Value, list[Op]] = {}
    for op in program.walk():
        if op.collective == "all_reduce" and len(op.results) == 1 and "groups" not in op.kind.attrs:
            before = chains.get(op.operands[0], []) if len(users[op.operands[0]]) == 1 else []
            own = op.kind.attrs
            fits = all(
                other.kind.attrs["body"] == own["body"]
                and set(other.kind.attrs["axes"]).isdisjoint(own["axes"])
                for other in before
            )
            chains[op.results[0]] = [*before, op] if fits else [op]
    return chains


_Turn = Callable[[Builder, Value], Value]


class _Way(NamedTuple):
    """The collectives that take the place of one, and the copies before and after them."""

    first: TensorType  # the type of what the first part takes
    # the kind of each, the type of its result, its atoms and its other attributes
    parts: tuple[tuple[str, TensorType, Axes, dict[str, Any]], ...]
    # bytes that are copied to put pieces in order, or into a flat buffer and out of it
    copied: int = 0
    # before, after: those copies of the operand, and of the last part's result
    before: _Turn = lambda b, x: x
    after: _Turn = lambda b, x: x


def _summed(op: Op, fast: Axes, slow: Axes, mesh: Mesh) -> _Way:
    # A dim that the fast devices divide is scattered in place. Without one the sum goes through a
    # flat buffer that is padded to a multiple: f32[3, 5] over 4 devices is f32[16], in fours.
    type_, count, body = op.kind.results[0], mesh.extent(fast), {"body": op.kind.attrs["body"]}
    found = (d for d, size in enumerate(type_.shape) if size and size % count == 0)
    dim = next(found, None)
    whole = type_ if dim is not None else type_.with_shape((-(-type_.size // count) * count,))
    one = whole.scaled(dim or 0, 1, count)
    parts = (
        ("reduce_scatter", one, fast, {"scatter_dimension": dim or 0, **body}),
        ("all_reduce", one, slow, body),
        ("all_gather", whole, fast, {"all_gather_dim": dim or 0}),
    )
    if dim is not None:
        return _Way(whole, parts)

    def flat(b: Builder, x: Value) -> Value:
        zero = b.splat(0, TensorType((), type_.dtype))
        return b.pad_dim(b.reshape(x, (type_.size,)), 0, 0, whole.size - type_.size, zero)

    def unflat(b: Builder, x: Value) -> Value:
        return b.reshape(b.slice_dim(x, 0, 0, type_.size), type_.shape)

    return _Way(whole, parts, 2 * whole.bytes, flat, unflat)


def _joined(op: Op, fast: Axes, slow: Axes, mesh: Mesh) -> _Way:
    # A gather goes over the slow links first, a reduce-scatter last: while pieces are small.
    attrs, along, kind = op.kind.attrs, op.kind.about.along, op.collective
    axes, dim, gathers = attrs["axes"], attrs[along], kind == "all_gather"
    (before,), (after,) = op.kind.operands, op.kind.results
    some = (before if gathers else after).scaled(dim, mesh.extent(slow))
    how = {name: attrs[name] for name in (along, "body") if name in attrs}
    first, second = (slow, fast) if gathers else (fast, slow)
    way = _Way(before, ((kind, some, first, how), (kind, after, second, how)))
    if axes == fast + slow:
        return way
    # data=4 made of host (slow, 2) and device (fast, 2). Piece hd belongs to device d of host h:
    #   in the order of data, which is (host, device):  00 01 10 11
    #   gathered over host, then over device:           00 10 01 11     (device, host)
    # The dim is taken apart into (device, host, piece), and the first two change places.
    have, wanted = (fast + slow, axes) if gathers else (axes, fast + slow)

    def turn(b: Builder, x: Value) -> Value:
        shape = b.types[x].shape
        counts = [mesh.atom_sizes[a] for a in have]
        piece = shape[dim] // mesh.extent(have)
        apart = b.reshape(x, (*shape[:dim], *counts, piece, *shape[dim + 1 :]))
        order = [dim + have.index(a) for a in wanted]
        rank = len(shape) + len(have)
        moved = b.transpose(apart, (*range(dim), *order, *range(dim + len(have), rank)))
        return b.reshape(moved, shape)

    moves = way._replace(after=turn) if gathers else way._replace(before=turn)
    return moves._replace(copied=max(before.bytes, after.bytes))
