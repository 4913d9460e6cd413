"""Rewrite: a collective over links of both kinds sends over the slow ones only what it must.

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
from typing import NamedTuple

from spmd.ir.control_flow import users_of
from spmd.ir.dead import remove_dead
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds


def two_level(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Splits collectives over fast and slow links in two or three where that is faster."""
    links = topology.atom_links(mesh)
    slow = frozenset(a for a, link in enumerate(links) if link == topology.chip.dcn)
    if not slow or len(slow) == len(links):
        return program
    machine = _Machine(mesh, topology, slow)
    chains = _chains(program)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        way = _WAYS.get(op.collective)
        if way is None or len(op.operands) != 1 or "groups" in op.kind.attrs:
            return None
        chain = chains.get(op.results[0], [op])
        axes = tuple(a for part in chain for a in part.kind.attrs["axes"])
        if not all(machine.levels(axes)):
            return None
        as_it_is = sum(machine.op_seconds(part) for part in chain)
        x = now(chain[0].operands[0])
        result = way(b, op, x, axes, as_it_is, machine)
        return None if result is None else (result,)

    return remove_dead(edit_ops(program, edit))


def _chains(program: Program) -> dict[Value, list[Op]]:
    """For each all-reduce, the chain of all-reduces over other atoms that ends with it."""
    # `%2 = all_reduce %1 {x}; %3 = all_reduce %2 {y}` counts as one sum over x and y if nothing
    # else reads %2. The parts of %3 then start from %1, which leaves %2 to `remove_dead`.
    users = users_of(program)
    chains: dict[Value, list[Op]] = {}
    for op in program.walk():
        if op.collective == "all_reduce" and len(op.results) == 1 and "groups" not in op.kind.attrs:
            before = chains.get(op.operands[0], []) if len(users[op.operands[0]]) == 1 else []
            fits = all(_reduce_alike(other, op) for other in before)
            chains[op.results[0]] = [*before, op] if fits else [op]
    return chains


def _reduce_alike(op: Op, other: Op) -> bool:
    mine, its = op.kind.attrs, other.kind.attrs
    return mine["body"] == its["body"] and set(mine["axes"]).isdisjoint(its["axes"])


class _Machine(NamedTuple):
    """The mesh and its links; `slow` are the atoms between hosts or slices."""

    mesh: Mesh
    topology: Topology
    slow: frozenset[int]

    def levels(self, axes: Axes) -> tuple[Axes, Axes]:
        """Atoms with fast links and atoms with slow ones, each in their order."""
        fast = tuple(a for a in axes if a not in self.slow)
        return fast, tuple(a for a in axes if a in self.slow)

    def seconds(self, kind: str, axes: Axes, sent: int, received: int) -> float:
        return collective_seconds(kind, axes, sent, received, self.mesh, self.topology)

    def op_seconds(self, op: Op) -> float:
        """Time of a collective as it is."""
        (sent,), (received,) = op.kind.operands, op.kind.results
        return self.seconds(op.label, op.kind.attrs["axes"], sent.bytes, received.bytes)

    def copy_seconds(self, size: int) -> float:
        """Time to read and write so many bytes of device memory."""
        return 2 * size / self.topology.hbm_bandwidth


class _Parts:
    """Appends the parts of one collective, each with a note that says which part it is."""

    def __init__(self, b: Builder, op: Op, count: int, slow: Axes) -> None:
        self.b, self.op, self.count, self.slow = b, op, count, slow
        self.done = 0

    def add(self, kind: str, x: Value, type_: TensorType, axes: Axes, **attrs: object) -> Value:
        """The next part."""
        self.done += 1
        links = "between hosts" if axes == self.slow else "within hosts"
        note = f"{self.op.loc.note} ({links}, part {self.done} of {self.count})".strip()
        self.b.loc = self.op.loc._replace(note=note)
        return self.b.collective(kind, x, type_, axes, **attrs)


def _all_reduce(
    b: Builder, op: Op, x: Value, axes: Axes, limit: float, machine: _Machine
) -> Value | None:
    attrs, mesh = op.kind.attrs, machine.mesh
    type_ = b.types[x]
    fast, slow = machine.levels(axes)
    parts = mesh.extent(fast)
    # A dim that the fast devices divide is scattered in place. Without one the sum goes through a
    # flat buffer that is padded to a multiple: f32[3, 5] over 4 devices is f32[16], in fours.
    dim = next((d for d, size in enumerate(type_.shape) if size and size % parts == 0), None)
    padded = type_.size if dim is not None else -(-type_.size // parts) * parts
    whole = type_.bytes * padded // max(1, type_.size)
    seconds = 0.0 if dim is not None else 2 * machine.copy_seconds(whole)
    seconds += machine.seconds("reduce_scatter", fast, whole, whole // parts)
    seconds += machine.seconds("all_reduce", slow, whole // parts, whole // parts)
    seconds += machine.seconds("all_gather", fast, whole // parts, whole)
    if seconds >= limit:
        return None
    made, body = _Parts(b, op, 3, slow), attrs["body"]
    flat = x if dim is not None else _flat(b, x, padded)
    at = dim or 0
    all_, one = b.types[flat], b.types[flat].scaled(at, 1, parts)
    y = made.add("reduce_scatter", flat, one, fast, scatter_dimension=at, body=body)
    y = made.add("all_reduce", y, one, slow, body=body)
    y = made.add("all_gather", y, all_, fast, all_gather_dim=at)
    return y if dim is not None else _unflat(b, y, type_)


def _gather_or_scatter(
    b: Builder, op: Op, x: Value, axes: Axes, limit: float, machine: _Machine
) -> Value | None:
    # A gather goes over the slow links first, a reduce-scatter last: while pieces are small.
    attrs, mesh, along = op.kind.attrs, machine.mesh, op.kind.about.along
    dim, gathers = attrs[along], op.collective == "all_gather"
    fast, slow = machine.levels(axes)
    first, second = (slow, fast) if gathers else (fast, slow)
    (before,), (after,) = op.kind.operands, op.kind.results
    some = (before if gathers else after).scaled(dim, mesh.extent(slow))
    seconds = machine.seconds(op.collective, first, before.bytes, some.bytes)
    seconds += machine.seconds(op.collective, second, some.bytes, after.bytes)
    if axes != fast + slow:
        seconds += machine.copy_seconds(max(before.bytes, after.bytes))
    if seconds >= limit:
        return None
    made, how = _Parts(b, op, 2, slow), {n: attrs[n] for n in (along, "body") if n in attrs}
    y = x if gathers else _reordered(b, x, dim, axes, fast + slow, mesh)
    y = made.add(op.collective, y, some, first, **how)
    y = made.add(op.collective, y, after, second, **how)
    return _reordered(b, y, dim, fast + slow, axes, mesh) if gathers else y


_Way = Callable[[Builder, Op, Value, Axes, float, _Machine], "Value | None"]
"""Called with the builder, a collective, its operand, its atoms, and its seconds as it is. Returns
its result made in parts, or None where that takes longer."""

_WAYS: dict[str, _Way] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_or_scatter,
    "reduce_scatter": _gather_or_scatter,
}


def _reordered(b: Builder, x: Value, dim: int, have: Axes, wanted: Axes, mesh: Mesh) -> Value:
    """Reorders the pieces along a dim from one order of their atoms to another."""
    # data=4 made of host (slow, 2) and device (fast, 2). Piece hd belongs to device d of host h:
    #   wanted, data = (host, device):            00 01 10 11
    #   gathered over host, then over device:     00 10 01 11     (device, host)
    # The dim is taken apart into (device, host, piece), and the first two change places.
    if have == wanted:
        return x
    shape = b.types[x].shape
    counts = [mesh.atom_sizes[a] for a in have]
    piece = shape[dim] // mesh.extent(have)
    apart = b.reshape(x, (*shape[:dim], *counts, piece, *shape[dim + 1 :]))
    order = [dim + have.index(a) for a in wanted]
    rank = len(shape) + len(have)
    moved = b.transpose(apart, (*range(dim), *order, *range(dim + len(have), rank)))
    return b.reshape(moved, shape)


def _flat(b: Builder, x: Value, size: int) -> Value:
    """All elements in one dim, with zeros behind them up to a size."""
    type_ = b.types[x]
    x = b.reshape(x, (type_.size,))
    zero = b.splat(0, TensorType((), type_.dtype))
    return b.pad_dim(x, 0, 0, size - type_.size, zero)


def _unflat(b: Builder, x: Value, type_: TensorType) -> Value:
    """The inverse of `_flat`."""
    return b.reshape(b.slice_dim(x, 0, 0, type_.size), type_.shape)
