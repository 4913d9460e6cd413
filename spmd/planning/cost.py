"""What an op costs on one device: its arithmetic or its memory traffic, whichever takes longer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from spmd.ir.description import Passes, Traffic
from spmd.ir.dialect.halo import Halo, exchange, reads_of
from spmd.ir.dialect.merge import rounds
from spmd.ir.dialect.rule import Exchange, Rule
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType, dtype_bits, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, local_shape, piece_sizes
from spmd.mesh.topology import Topology
from spmd.predict.arithmetic import arithmetic_seconds
from spmd.propagation.projection import Assignment, project
from spmd.reshard.comm import collective_seconds


def op_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time of one device's share of an op under an assignment."""
    split = mesh.extent({a for axes in assignment for a in axes})
    compute = arithmetic_seconds(kind, topology) / split
    exchanges = own_seconds(kind, rule, assignment, mesh, topology)
    exchanges += halo_seconds(kind, rule, assignment, mesh, topology)
    exchanges += merge_seconds(rule, assignment, mesh, topology)
    exchanges += exchange_seconds(rule, assignment, mesh, topology)
    memory = local_bytes(kind, rule, assignment, mesh) / topology.hbm_bandwidth * passes(kind)
    # Pieces go round while the ones before them are computed with.
    rings = ring_seconds(kind, rule, assignment, mesh, topology)
    return max(compute, memory, rings) + exchanges


def own_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time on the links of an op that is a collective itself."""
    if not kind.about.collective:
        return 0.0
    before, after = (
        local_type(type_, project(rule, dims, assignment, mesh.atom_sizes), mesh)
        for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True)
    )
    name, axes = kind.about.collective, kind.attrs["axes"]
    return collective_seconds(name, axes, before.bytes, after.bytes, mesh, topology)


def ring_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time in which all pieces of what goes round have been on all devices."""
    seconds = 0.0
    for axes, piece in ring_pieces(kind, rule, assignment, mesh):
        args = "collective_permute", axes, piece.bytes, piece.bytes, mesh, topology
        seconds += (mesh.extent(axes) - 1) * collective_seconds(*args)
    return seconds


def ring_pieces(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh
) -> Iterator[tuple[Axes, TensorType]]:
    """The axes round which something goes, and one device's piece of it: of each such value."""
    for number, _ in rule.rings:
        axes = assignment[number]
        for type_, dims in zip((*kind.operands, *kind.results), rule.values, strict=True):
            if axes and any(number in dim for dim in dims):
                sharding = project(rule, dims, assignment, mesh.atom_sizes)
                yield axes, local_type(type_, sharding, mesh)


def exchange_seconds(rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology) -> float:
    """Time in which what belongs to pieces of factors that exchange gets there, and back."""
    seconds = 0.0
    for number, trips in rule.exchanges:
        if rule.is_exchanged(number, assignment):
            sent = exchanged_bytes(trips, assignment, mesh)
            args = "ragged_all_to_all", assignment[number], sent, sent, mesh, topology
            seconds += collective_seconds(*args) + 2 * sent / topology.hbm_bandwidth
    return seconds


def exchanged_bytes(trips: Exchange, assignment: Assignment, mesh: Mesh) -> int:
    """Bytes that a device has for the others of its group, and itself, in an exchange."""
    split = mesh.extent({a for f in trips.along for a in assignment[f]})
    return math.ceil(trips.bytes / split)


def halo_seconds(
    kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology
) -> float:
    """Time of the exchanges that bring what devices read of their neighbours' pieces."""
    seconds = 0.0
    for halo in rule.halos:
        axes = assignment[halo.factor]
        if axes:
            type_ = kind.operands[halo.operand]
            dims = [
                () if d == halo.dim else tuple(a for f in dim for a in assignment[f])
                for d, dim in enumerate(rule.operands[halo.operand])
            ]
            shape = local_shape(type_.shape, Sharding(tuple(dims)), mesh)
            row = type_.with_shape((*shape[: halo.dim], 1, *shape[halo.dim + 1 :])).bytes
            for name, sent, got in halo_moves(halo, type_.shape[halo.dim], axes, mesh):
                seconds += collective_seconds(name, axes, sent * row, got * row, mesh, topology)
    return seconds


def halo_moves(halo: Halo, size: int, axes: Axes, mesh: Mesh) -> tuple[tuple[str, int, int], ...]:
    """The collectives of a halo: (kind, elements along the dim before, and after)."""
    devices = mesh.extent(axes)
    if halo.window is None:
        return (("all_gather", 1, devices),)
    plan = exchange(reads_of(halo.window, size, axes, mesh).need, size, axes, mesh)
    if plan.gather:
        piece = piece_sizes(size, axes, mesh)[-1]
        return (("all_gather", piece, devices * piece),)
    return tuple(("collective_permute", length, length) for length in plan.lengths)


def passes(kind: OpKind) -> float:
    """How often an op goes through its operands: factorisations once for each column."""
    shape = max((t.shape for t in kind.operands), key=math.prod, default=())
    longest = max(shape[-2:], default=1)
    if kind.about.passes == Passes.COLUMNS:
        return max(1, longest)
    if kind.about.passes == Passes.LOGARITHMIC:
        return 1 + math.log2(max(2, max(shape, default=2)))
    return 1


def is_fused(kind: OpKind) -> bool:
    """Whether a compiler computes an op where its result is used, if that is one place."""
    return kind.about.traffic in (Traffic.RESULTS, Traffic.NOTHING)


def merge_seconds(rule: Rule, assignment: Assignment, mesh: Mesh, topology: Topology) -> float:
    """Time of putting together what devices find in their pieces, memory traffic included."""
    seconds = 0.0
    for merge in rule.merges:
        axes = assignment[merge.factor]
        if not axes:
            continue
        own = sum(
            type_.bytes // mesh.extent(a for dim in dims for f in dim for a in assignment[f])
            for type_, dims in merge.tensors
        )
        devices = mesh.extent(axes)
        kind, after, times = "all_gather", own * devices, 1
        if merge.network:
            kind, after, times = "collective_permute", own, len(rounds(devices))
        wire = collective_seconds(kind, axes, own, after, mesh, topology)
        seconds += times * (wire + (own + after) / topology.hbm_bandwidth)
    return seconds


def local_bytes(kind: OpKind, rule: Rule, assignment: Assignment, mesh: Mesh) -> float:
    """Bytes that one device reads and writes."""
    types, dims = (*kind.operands, *kind.results), rule.values
    sizes = [t.size * dtype_bits(t.dtype) / 8 for t in types]
    if kind.about.bytes_read is not None:
        sizes[: len(kind.operands)] = kind.about.bytes_read(kind)
    total = 0.0
    for i in _moved(kind):
        split = mesh.extent(a for dim in dims[i] for f in dim for a in assignment[f])
        total += sizes[i] / split
    return total


def _moved(kind: OpKind) -> Iterable[int]:
    """Positions among operands and results of what goes through memory, in so many bytes."""
    count, traffic = len(kind.operands), kind.about.traffic
    if traffic == Traffic.NOTHING:
        return ()
    if traffic == Traffic.RESULTS:
        return range(count, count + len(kind.results))
    if traffic == Traffic.PIECE:
        return (count, count)
    if traffic == Traffic.UPDATE and len(kind.results) == 1:
        piece = count - 1 if kind.about.is_scatter else 1
        return (piece, piece)
    return range(count + len(kind.results))
