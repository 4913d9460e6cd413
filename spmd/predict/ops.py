"""The predicted seconds of an op on one device: arithmetic or memory traffic, whichever is longer.

The planner asks here for an op's share under an assignment; the timeline and recomputation for the
op of a local program, and for what it sends to other devices.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd.ir.description import COMPOSITE, SCATTER, Role
from spmd.ir.dialect.composites import AXES, SENT
from spmd.ir.dialect.halo import exchange, reads_of, rounds
from spmd.ir.dialect.rule import Exchange, Rule
from spmd.ir.program import Op, OpKind
from spmd.ir.types import TensorType, dtype_bits, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, local_shape, piece_sizes
from spmd.mesh.topology import Topology
from spmd.propagation.projection import Assignment, project
from spmd.reshard.comm import collective_seconds, group_size, run_as, wire_bytes


def arithmetic_seconds(kind: OpKind, topology: Topology) -> float:
    """Returns the seconds of an op's arithmetic on one device; 0 for ops that memory bounds."""
    about = kind.about
    if about.flops is None:
        return 0.0
    dtype = (*kind.operands, *kind.results)[0].dtype
    if about.multiplies is not None:
        dtype = about.multiplies(kind, topology.platform)
    return topology.arithmetic_seconds(about.flops(kind), dtype, about.arithmetic)


def bytes_moved(kind: OpKind, sizes: Sequence[float]) -> Sequence[float]:
    """Returns the bytes that an op reads of each operand, then those that it writes of each result.

    `sizes` has the bytes of one device's piece of each operand, then of each result, all in memory.
    An alias moves nothing, and an update of a part reads and writes only that part.
    """
    about, count, made = kind.about, len(kind.operands), len(kind.results)
    if about.role == Role.ALIAS or kind.is_renaming:
        return [0.0] * len(sizes)
    if about.role == Role.UPDATE:
        first = count - made if kind.name == SCATTER else made
        return [*[0.0] * made, *sizes[made:count], *sizes[first : first + made]]
    read = sizes[:count]
    if about.reads_pieces:
        read = [min(size, sizes[count]) for size in read]
    elif about.bytes_read is not None:
        shares = zip(about.bytes_read(kind), kind.operands, sizes, strict=False)
        read = [share * size / type_.bytes if type_.bytes else 0.0 for share, type_, size in shares]
    return [*read, *sizes[count:]]


def memory_seconds(kind: OpKind, moved: float, topology: Topology) -> float:
    """Returns the seconds to move `moved` bytes from or to memory in each of an op's passes."""
    if kind.about.between_memories:  # half is read in one memory, and half written in the other
        return moved / 2 / topology.chip.host_bandwidth
    passes = kind.about.passes
    return moved * (passes(kind) if passes else 1) / topology.hbm_bandwidth


def op_seconds(
    kind: OpKind,
    rule: Rule,
    assignment: Assignment,
    mesh: Mesh,
    topology: Topology,
    stored: Sequence[bool] = (),
) -> float:
    """Returns the seconds of one device's share of an op under an assignment, without reshards.

    For each operand and result `stored` says whether it is in memory (if left out, all are); others
    move nothing here. What the op itself sends counts: collective, halos, merges, rings, exchanges.
    """
    collective = halos = merges = exchanges = 0.0
    if name := kind.about.collective:
        piece = local_kind(kind, rule, assignment, mesh)
        sent, got = piece.operands[0].bytes, piece.results[0].bytes
        collective = collective_seconds(name, kind.attrs["axes"], sent, got, mesh, topology)
    # Halos: what devices read of their neighbours' pieces.
    for halo in rule.halos:
        if axes := assignment[halo.factor]:
            type_ = kind.operands[halo.operand]
            dims = [
                () if d == halo.dim else tuple(a for f in dim for a in assignment[f])
                for d, dim in enumerate(rule.operands[halo.operand])
            ]
            shape = local_shape(type_.shape, Sharding(tuple(dims)), mesh)
            row = type_.with_shape((*shape[: halo.dim], 1, *shape[halo.dim + 1 :])).bytes
            size, devices = type_.shape[halo.dim], mesh.extent(axes)
            steps = [("all_gather", 1, devices)]  # kind, elements along the dim before, and after
            if halo.window is not None:
                plan = exchange(reads_of(halo.window, size, axes, mesh).need, size, axes, mesh)
                steps = [("collective_permute", length, length) for length in plan.lengths]
                if plan.gather:
                    longest = piece_sizes(size, axes, mesh)[-1]
                    steps = [("all_gather", longest, devices * longest)]
            for name, sent, got in steps:
                halos += collective_seconds(name, axes, sent * row, got * row, mesh, topology)
    # Merges: putting together what devices find in their pieces, memory traffic included. Pieces
    # that meet in a network are exchanged, compared, and sorted again in every round.
    for merge in rule.merges:
        if not (axes := assignment[merge.factor]):
            continue
        own = sum(
            type_.bytes // mesh.extent(a for dim in dims for f in dim for a in assignment[f])
            for type_, dims in merge.tensors
        )
        devices = mesh.extent(axes)
        if merge.network:
            wire = collective_seconds("collective_permute", axes, own, own, mesh, topology)
            local = 3 * own / topology.hbm_bandwidth + memory_seconds(kind, 2 * own, topology)
            merges += len(rounds(devices)) * (wire + local)
        else:
            after = own * devices
            wire = collective_seconds("all_gather", axes, own, after, mesh, topology)
            merges += wire + (own + after) / topology.hbm_bandwidth
    # All-to-alls of factors that are split over the atoms of others.
    for number, trips in rule.exchanges:
        if rule.is_exchanged(number, assignment):
            sent = exchanged_bytes(trips, assignment, mesh)
            wire = collective_seconds(RAGGED, assignment[number], sent, sent, mesh, topology)
            exchanges += wire + 2 * sent / topology.hbm_bandwidth
    extents = [mesh.extent(axes) for axes in assignment]
    sizes = [
        type_.size * dtype_bits(type_.dtype) / 8 / math.prod([extents[f] for d in dims for f in d])
        for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True)
    ]
    moves = bytes_moved(kind, sizes)
    if stored:
        moves = tuple(itertools.compress(moves, stored))
    share = local_kind(kind, rule, assignment, mesh) if kind.about.passes else kind
    memory = memory_seconds(share, sum(moves), topology)
    compute = share_seconds(kind, rule, assignment, mesh, topology)
    # Pieces go round while the ones before them are computed with.
    rings = ring_seconds(kind, rule, assignment, mesh, topology)
    return max(compute, memory, rings) + (collective + halos + merges + exchanges)


def share_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Returns the seconds of arithmetic on the device that has the largest share of an op.

    Only composites' shares differ: with a part of the queries of causal attention, the device with
    the last of them sees nearly all keys. Their ring factors count whole: it meets all pieces.
    """
    if kind.name == COMPOSITE and kind.about.flops is not None:
        rings = {number for number, _ in rule.rings}
        whole = tuple(() if i in rings else axes for i, axes in enumerate(assignment))
        return arithmetic_seconds(local_kind(kind, rule, whole, mesh), topology)
    split = mesh.extent({a for axes in assignment for a in axes})
    return arithmetic_seconds(kind, topology) / split


def local_kind(kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh) -> OpKind:
    """Returns the op's kind with the types of one device's pieces under an assignment."""
    types = [
        local_type(type_, project(rule, dims, assignment, mesh.atom_sizes), mesh)
        for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True)
    ]
    count = len(kind.operands)
    return OpKind(kind.name, tuple(types[:count]), tuple(types[count:]), kind.attrs)


def ring_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Returns the seconds to pass the pieces of ring factors (attention's keys) to all devices."""
    seconds = 0.0
    for axes, piece in ring_pieces(kind, rule, assignment, mesh):
        args = "collective_permute", axes, piece.bytes, piece.bytes, mesh, topology
        seconds += (mesh.extent(axes) - 1) * collective_seconds(*args)
    return seconds


def ring_pieces(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh
) -> Iterator[tuple[Axes, TensorType]]:
    """Yields (atoms of the ring, type of a device's piece) for each value that goes round one."""
    for number, _ in rule.rings:
        axes = assignment[number]
        for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True):
            if axes and any(number in dim for dim in dims):
                sharding = project(rule, dims, assignment, mesh.atom_sizes)
                yield axes, local_type(type_, sharding, mesh)


def exchanged_bytes(trips: Exchange, assignment: Assignment, mesh: Mesh) -> int:
    """Returns the bytes that one device puts into an exchange, those for itself included."""
    return math.ceil(trips.bytes / mesh.extent({a for f in trips.along for a in assignment[f]}))


RAGGED = "ragged_all_to_all"  # the kind of what composites exchange


class Transfer(NamedTuple):
    """What an op exchanges: collective, atoms, bytes that a device puts in and gets, group size."""

    kind: str  # as in `spmd.reshard.comm.KINDS`
    axes: Axes  # the atoms along which devices exchange
    put: int  # bytes that a device puts in
    got: int  # bytes that it gets
    group: int  # how many devices exchange with one another

    @staticmethod
    def of(op: Op, mesh: Mesh) -> "Transfer | None":
        """Returns what an op of a local program exchanges with other devices; None if nothing."""
        attrs = op.kind.attrs
        if AXES in attrs:
            axes, sent = attrs[AXES], attrs[SENT]
            return Transfer(RAGGED, axes, sent, sent, mesh.extent(axes))
        if not op.collective or "axes" not in attrs:
            return None
        put, got = (sum(t.bytes for t in x) for x in (op.kind.operands, op.kind.results))
        return Transfer(op.collective, attrs["axes"], put, got, group_size(attrs, mesh))

    def seconds(self, mesh: Mesh, topology: Topology) -> float:
        """Returns the predicted seconds of the transfer."""
        return collective_seconds(self.kind, self.axes, self.put, self.got, mesh, topology)

    def sent_bytes(self, mesh: Mesh, topology: Topology) -> int:
        """Returns the bytes that one device sends, by the collective that the backend runs."""
        kind = run_as(self.kind, self.axes, mesh, topology)
        return wire_bytes(kind, self.group, self.put, self.got)
