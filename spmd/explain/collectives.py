"""The collectives of a local program: what each is, what it moves, and why it is there."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.control_flow import UNKNOWN_TRIPS, producers_of, trip_count
from spmd.ir.legality import COLLECTIVES
from spmd.ir.program import Op, Region
from spmd.lowering.partition import Partitioned
from spmd.mesh.sharding import axis_refs
from spmd.mesh.topology import Topology
from spmd.planning.comm import collective_seconds, group_size, wire_bytes

KINDS = tuple(name.removeprefix("stablehlo.") for name in COLLECTIVES)


class Collective(NamedTuple):
    """One collective of the program.

    Attributes:
      kind: one of `KINDS`.
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
    producers = producers_of(program)
    found: list[Collective] = []

    def visit(region: Region, times: int) -> None:
        for op in region.ops:
            if op.regions:
                trips = None
                if op.name == "stablehlo.while":
                    trips = trip_count(program, op, producers)
                    trips = UNKNOWN_TRIPS if trips is None else trips
                for inner in op.regions:
                    visit(inner, times * (1 if trips is None else trips))
            elif op.name.removeprefix("stablehlo.") in KINDS and "axes" in op.kind.attrs:
                found.append(record(op, times))

    def record(op: Op, times: int) -> Collective:
        kind = op.name.removeprefix("stablehlo.")
        axes = op.kind.attrs["axes"]
        sent = sum(t.bytes for t in op.kind.operands)
        received = sum(t.bytes for t in op.kind.results)
        return Collective(
            kind,
            tuple(str(ref) for ref in axis_refs(axes, mesh)),
            wire_bytes(kind, group_size(op.kind.attrs, mesh), sent, received),
            times,
            op.loc.trail,
            op.loc.note,
            collective_seconds(kind, axes, sent, received, mesh, topology),
        )

    visit(program.body, 1)
    return tuple(found)
