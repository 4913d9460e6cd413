"""What rewrites ask of the machine: how long ops take, and how much memory is left."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.program import Op, Program, Region, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.memory import alive_bytes, constant_bytes, peak_memory
from spmd.predict.timeline import LocalTimes
from spmd.reshard.comm import collective_seconds


class Clock:
    """Predicted seconds of a program's ops; ops that rewrites add to it take none."""

    def __init__(self, program: Program, mesh: Mesh, topology: Topology) -> None:
        self.program, self.mesh, self.topology = program, mesh, topology
        self.index = Index(program)
        self.local = LocalTimes(program, topology, self.index)
        self.stored = self.local.stored
        self._known: dict[Value, float] = {}

    def starts(self, region: Region) -> list[float]:
        """For each op of a block, the seconds of arithmetic in front of it."""
        found, now = [], 0.0
        for op in region.ops:
            found.append(now)
            now += self.arithmetic(op)
        return found

    def arithmetic(self, op: Op) -> float:
        """Seconds of an op's arithmetic, and of all that is inside it."""
        if op.collective or not op.results:
            return 0.0
        seconds = self._known.get(op.results[0])
        if seconds is None:
            inside = sum(self.arithmetic(inner) for r in op.regions for inner in r.ops)
            seconds = self.index.runs(op) * inside if op.regions else self.local.seconds(op)
            self._known[op.results[0]] = seconds
        return seconds

    def exchange(self, op: Op, sent: bool = True) -> float:
        """Seconds of a collective, with or without those that depend on its bytes."""
        before, after = op.kind.operands[0].bytes * sent, op.kind.results[0].bytes * sent
        axes = op.kind.attrs["axes"]
        return collective_seconds(op.label, axes, before, after, self.mesh, self.topology)


class Room(NamedTuple):
    """The memory of one device: bytes, and the arguments by position that may be overwritten."""

    bytes: int
    donated: tuple[int, ...] = ()

    def left(self, program: Program) -> int:
        """Predicted bytes that a program leaves free at its peak; negative if it is too large.

        A program whose values before fusion take less than three quarters of the memory needs no
        closer look: a quarter is returned.
        """
        if 4 * (alive_bytes(program) + constant_bytes(program)) < 3 * self.bytes:
            return self.bytes // 4
        return self.bytes - peak_memory(program, self.donated).peak
