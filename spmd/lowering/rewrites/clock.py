"""`Clock` and `Room`: for rewrites, how long ops take and how much memory is left."""

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
    """Predicts the seconds of a program's ops; ops that rewrites add to it take none."""

    def __init__(self, program: Program, mesh: Mesh, topology: Topology) -> None:
        self.program, self.mesh, self.topology = program, mesh, topology
        self.index = Index(program)
        self.local = LocalTimes(program, topology, self.index)
        self.stored = self.local.stored
        self._known: dict[Value, float] = {}

    def starts(self, region: Region) -> list[float]:
        """Returns, for each op of a block, the seconds of arithmetic in front of it."""
        found, now = [], 0.0
        for op in region.ops:
            found.append(now)
            now += self.arithmetic(op)
        return found

    def arithmetic(self, op: Op) -> float:
        """Returns the seconds of an op's arithmetic, regions included; 0 for a collective."""
        if op.collective or not op.results:
            return 0.0
        seconds = self._known.get(op.results[0])
        if seconds is None:
            inside = sum(self.arithmetic(inner) for r in op.regions for inner in r.ops)
            seconds = self.index.runs(op) * inside if op.regions else self.local.seconds(op)
            self._known[op.results[0]] = seconds
        return seconds

    def exchange(self, op: Op, sent: bool = True) -> float:
        """Returns the seconds of a collective; without `sent`, its latency alone."""
        before, after = op.kind.operands[0].bytes * sent, op.kind.results[0].bytes * sent
        axes = op.kind.attrs["axes"]
        return collective_seconds(op.label, axes, before, after, self.mesh, self.topology)


class Room(NamedTuple):
    """The memory of one device: its bytes, and the arguments, by position, that are donated."""

    bytes: int
    donated: tuple[int, ...] = ()

    def left(self, program: Program) -> int:
        """Returns the bytes that a program leaves free at its predicted peak; negative if too big.

        If its values before fusion take less than three quarters of the memory, it is not looked at
        more closely: a quarter is returned.
        """
        if 4 * (alive_bytes(program) + constant_bytes(program)) < 3 * self.bytes:
            return self.bytes // 4
        return self.bytes - peak_memory(program, self.donated).peak
