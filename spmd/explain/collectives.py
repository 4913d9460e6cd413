"""The collectives of a local program: what each is, what it moves, why it is there; and sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.program import Op, Region
from spmd.lowering.partition import Partitioned
from spmd.measure.labels import layer_of
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axis_refs
from spmd.mesh.topology import Topology
from spmd.predict.ops import Transfer


class Collective(NamedTuple):
    """One collective of the program.

    Attributes:
      kind: as in `spmd.reshard.comm.KINDS`.
      axes: the mesh axes (or sub-axes) along which devices transfer.
      bytes: bytes that one device sends in one execution, in the way in which the backend runs it.
      count: executions in one run of the program (loops multiply).
      source: the user's source line, and its caller's.
      reason: a sentence: which use wanted what, or that the user wrote it.
      seconds: predicted time of one execution.
      layer: the part of the user's model; see `spmd.measure.labels.layer_of`.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: str
    reason: str
    seconds: float
    layer: str


def list_collectives(partitioned: Partitioned, topology: Topology) -> tuple[Collective, ...]:
    """Every collective of a local program, in program order."""
    program, mesh = partitioned.program, partitioned.mesh
    index = Index(program)

    def found(region: Region, times: int) -> Iterator[Collective]:
        for op in region.ops:
            for inner in op.regions:
                yield from found(inner, times * index.runs(op))
            if (transfer := Transfer.of(op, mesh)) is not None:
                yield _collective(op, transfer, times, mesh, topology)

    return tuple(found(program.body, 1))


def _collective(
    op: Op, transfer: Transfer, times: int, mesh: Mesh, topology: Topology
) -> Collective:
    return Collective(
        transfer.kind,
        tuple(str(ref) for ref in axis_refs(transfer.axes, mesh)),
        transfer.sent_bytes(mesh, topology),
        times,
        op.loc.trail,
        op.loc.note if op.collective else f"{op.label} is split over what splits its rows, too",
        transfer.seconds(mesh, topology),
        layer_of(op.loc),
    )


def sent_bytes(op: Op, mesh: Mesh, topology: Topology) -> int:
    """What one device sends in one run of an op; 0 if it exchanges nothing."""
    transfer = Transfer.of(op, mesh)
    return transfer.sent_bytes(mesh, topology) if transfer else 0


class Total(NamedTuple):
    """Collectives that are alike, together.

    Attributes:
      like: the first of them.
      ops: how many ops of the program are like this.
      runs: how often they run in one run of the program.
      bytes: bytes that one device sends for all of them in one run.
      seconds: predicted seconds of all of them in one run.
    """

    like: Collective
    ops: int
    runs: int
    bytes: int
    seconds: float


def collective_rows(collectives: Iterable[Collective]) -> tuple[Total, ...]:
    """Equal collectives together; most bytes first, then most time."""
    return _totals(collectives, lambda c: c._replace(layer=""))


def traffic(collectives: Iterable[Collective], by_axes: bool = True) -> tuple[Total, ...]:
    """Totals per kind and axes (or per kind alone), most bytes first, then most time."""
    ordered = sorted(collectives, key=lambda c: c.kind)
    return _totals(ordered, lambda c: (c.kind, c.axes if by_axes else ()))


def _totals(
    collectives: Iterable[Collective], look: Callable[[Collective], Hashable]
) -> tuple[Total, ...]:
    """The totals of collectives that have the same look."""
    totals: dict[Hashable, Total] = {}
    for c in collectives:
        like, ops, runs, sent, seconds = totals.get(look(c), Total(c, 0, 0, 0, 0.0))
        sent, seconds = sent + c.bytes * c.count, seconds + c.seconds * c.count
        totals[look(c)] = Total(like, ops + 1, runs + c.count, sent, seconds)
    return tuple(sorted(totals.values(), key=lambda total: (-total.bytes, -total.seconds)))
