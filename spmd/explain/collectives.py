"""The collectives of a local program: what each is, what it moves, why it is there; and sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.ir.index import Index
from spmd.ir.program import Op, Region
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axis_refs
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds, group_size, wire_bytes


class Collective(NamedTuple):
    """One collective of the program.

    Attributes:
      kind: as in `spmd.reshard.comm.KINDS`.
      axes: the mesh axes (or sub-axes) along which devices exchange.
      bytes: bytes that one device sends in one execution.
      count: executions in one run of the program (loops multiply).
      source: the user's source line, and its caller's.
      reason: a sentence: which use wanted what, or that the user wrote it.
      seconds: predicted time of one execution.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: str
    reason: str
    seconds: float


def list_collectives(partitioned: Partitioned, topology: Topology) -> tuple[Collective, ...]:
    """Every collective of a local program, in program order."""
    program, mesh = partitioned.program, partitioned.mesh
    index = Index(program)
    found: list[Collective] = []

    def visit(region: Region, times: int) -> None:
        for op in region.ops:
            if op.regions:
                for inner in op.regions:
                    visit(inner, times * index.runs(op))
            elif op.collective and "axes" in op.kind.attrs:
                found.append(record(op, times))

    def record(op: Op, times: int) -> Collective:
        kind = op.collective
        axes = op.kind.attrs["axes"]
        sent = sum(t.bytes for t in op.kind.operands)
        received = sum(t.bytes for t in op.kind.results)
        return Collective(
            kind,
            tuple(str(ref) for ref in axis_refs(axes, mesh)),
            sent_bytes(op, mesh),
            times,
            op.loc.trail,
            op.loc.note,
            collective_seconds(kind, axes, sent, received, mesh, topology),
        )

    visit(program.body, 1)
    return tuple(found)


def sent_bytes(op: Op, mesh: Mesh) -> int:
    """What one device sends in one run of a collective."""
    sent = sum(t.bytes for t in op.kind.operands)
    received = sum(t.bytes for t in op.kind.results)
    kind = op.name.removeprefix("stablehlo.")
    return wire_bytes(kind, group_size(op.kind.attrs, mesh), sent, received)


class CollectiveRow(NamedTuple):
    """Equal collectives of the program.

    Attributes:
      kind, axes, bytes, count, source, reason: as in `Collective`, of each of them.
      ops: how many ops of the program are like this.
      total_bytes: bytes that one device sends for all of them in one run.
      seconds: predicted seconds of all of them in one run.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: str
    reason: str
    ops: int
    total_bytes: int
    seconds: float


def collective_rows(collectives: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
    """Equal collectives together; most bytes first, then most time."""
    rows: dict[Collective, int] = {}
    for collective in collectives:
        rows[collective] = rows.get(collective, 0) + 1
    made = [
        CollectiveRow(
            *c[:6], ops=n, total_bytes=c.bytes * c.count * n, seconds=c.seconds * c.count * n
        )
        for c, n in rows.items()
    ]
    return tuple(sorted(made, key=lambda row: (-row.total_bytes, -row.seconds)))


class Traffic(NamedTuple):
    """All collectives of one kind over the same axes: ops, runs of them, bytes and seconds."""

    kind: str
    axes: tuple[str, ...]
    ops: int
    runs: int
    bytes: int
    seconds: float


def traffic(collectives: Iterable[Collective], by_axes: bool = True) -> tuple[Traffic, ...]:
    """Totals per kind and axes (or per kind alone), most bytes first."""
    totals: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for c in collectives:
        key = (c.kind, c.axes if by_axes else ())
        old = totals.get(key, Traffic(*key, 0, 0, 0, 0.0))
        totals[key] = Traffic(
            *key,
            old.ops + 1,
            old.runs + c.count,
            old.bytes + c.bytes * c.count,
            old.seconds + c.seconds * c.count,
        )
    return tuple(sorted(totals.values(), key=lambda t: (-t.bytes, -t.seconds, t.kind)))
