"""What an op of one device's program sends to other devices: a collective, or a composite."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.dialect.composites import AXES, SENT
from spmd.ir.program import Op
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds, group_size, run_as, wire_bytes

RAGGED = "ragged_all_to_all"
"""The kind of what composites exchange."""


class Transfer(NamedTuple):
    """What an op brings from device to device.

    Attributes:
      kind: as in `spmd.reshard.comm.KINDS`.
      axes: the atoms along which devices exchange.
      put, got: bytes that a device puts in, and that it gets.
      group: how many devices exchange with one another.
    """

    kind: str
    axes: Axes
    put: int
    got: int
    group: int

    @staticmethod
    def of(op: Op, mesh: Mesh) -> Transfer | None:
        """That of an op along axes of the mesh; None if it is none."""
        attrs = op.kind.attrs
        if AXES in attrs:
            axes, sent = attrs[AXES], attrs[SENT]
            return Transfer(RAGGED, axes, sent, sent, mesh.extent(axes))
        if not op.collective or "axes" not in attrs:
            return None
        put, got = (sum(t.bytes for t in x) for x in (op.kind.operands, op.kind.results))
        return Transfer(op.collective, attrs["axes"], put, got, group_size(attrs, mesh))

    def seconds(self, mesh: Mesh, topology: Topology) -> float:
        """Predicted time."""
        return collective_seconds(self.kind, self.axes, self.put, self.got, mesh, topology)

    def sent_bytes(self, mesh: Mesh, topology: Topology) -> int:
        """What one device sends, in the way in which the backend runs it."""
        kind = run_as(self.kind, self.axes, mesh, topology)
        return wire_bytes(kind, self.group, self.put, self.got)
