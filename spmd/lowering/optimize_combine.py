"""Rewrite: small collectives of one kind over the same axes travel together, as one flat buffer.

before: `%3 = all_reduce %1 {data}; ...; %9 = all_reduce %8 {data}`
after:  `...; %20 = all_reduce concatenate(flat %1, flat %8) {data}; %3, %9 = slices of %20`

A small collective costs latency, not bytes: one for all costs it once. A reduction moves up to
where its operand is made, and waits there until one of those that wait with it is read. A gather
comes where the first of those that travel together is read; the others' operands must be there by
then. Nothing waits, or comes early, across so much arithmetic that each collective would have been
hidden behind it alone, and what is together at a time is bounded in bytes: that is the memory that
the flat buffer takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spmd.ir.builder import Builder
from spmd.ir.control_flow import UNKNOWN_TRIPS, producers_of, trip_count
from spmd.ir.legality import COLLECTIVES
from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.lowering.flat import DIMS, combined
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.planning.comm import collective_seconds
from spmd.planning.memory import stored_values
from spmd.planning.timeline import local_seconds

MEMBERS = 4
"""A bucket has room for at least so many: larger collectives are worth their own start."""

PATIENCE = 16
"""A collective waits, or comes early, for so many times as long as it takes."""


class _Key(NamedTuple):
    name: str
    axes: tuple[int, ...]
    groups: object
    body: object
    dtype: str


class _Bucket(NamedTuple):
    """Collectives that travel together; `since` is when the first was ready."""

    ops: list[Op]
    since: float


def combine(program: Program, mesh: Mesh, topology: Topology, target: int) -> Program:
    """Combines small collectives within each block.

    Args:
      program: a local program.
      mesh: its mesh.
      topology: the machine, which says what a start costs and what a copy.
      target: bytes of a flat buffer.
    """
    run = _Combiner(program, mesh, topology, target)
    body = run.region(program.body)
    return program._replace(types=tuple(run.b.types), body=body)


class _Combiner:
    def __init__(self, program: Program, mesh: Mesh, topology: Topology, target: int) -> None:
        self.program, self.mesh, self.topology, self.target = program, mesh, topology, target
        self.b = Builder()
        self.b.types = list(program.types)
        self.stored = stored_values(program)
        self.producers = producers_of(program)

    def region(self, old: Region) -> Region:
        """A block with its collectives combined."""
        inside = {id(op): tuple(map(self.region, op.regions)) for op in old.ops if op.regions}
        self.b.begin(isolated=True)
        clock = self.clock(old)
        together = self.gathers(old, clock)
        waiting: dict[_Key, _Bucket] = {}
        bucket_of: dict[Value, _Key] = {}

        def flush(key: _Key) -> None:
            bucket = waiting.pop(key)
            for member in bucket.ops:
                del bucket_of[member.results[0]]
            combined(self.b, bucket.ops)

        for op in self.started_early(old):
            group = together.get(id(op), [op])
            reads = [v for member in group for v in member.operands]
            reads += [v for r in op.regions for v in free_values(r)]
            for key in dict.fromkeys(bucket_of[v] for v in reads if v in bucket_of):
                if key in waiting:
                    flush(key)
            now = clock[id(op)]
            for key in [k for k, bucket in waiting.items() if self.is_late(bucket, now)]:
                flush(key)
            if op.regions:
                self.b.append(op._replace(regions=inside[id(op)]))
            elif self.is_small(op) and op.name != "stablehlo.all_gather":
                key = _key(op)
                if key in waiting and self.is_full(waiting[key].ops, op):
                    flush(key)
                waiting.setdefault(key, _Bucket([], now)).ops.append(op)
                bucket_of[op.results[0]] = key
            elif group:
                combined(self.b, group)
        for key in list(waiting):
            flush(key)
        return self.b.end(old.args, old.results)

    # What may travel together.

    def is_small(self, op: Op) -> bool:
        """Whether a collective's start costs more than the copies that save it."""
        if op.name not in DIMS or len(op.operands) != 1 or "axes" not in op.kind.attrs:
            return False
        if not 0 < _bytes(op) <= self.target // MEMBERS:
            return False
        copies = 4 * _bytes(op) / self.topology.hbm_bandwidth
        return copies < self.seconds(op, sent=False)

    def is_full(self, ops: list[Op], op: Op) -> bool:
        return sum(map(_bytes, ops)) + _bytes(op) > self.target

    def is_late(self, bucket: _Bucket, now: float) -> bool:
        """Whether enough arithmetic has passed to hide what waits."""
        return now - bucket.since > PATIENCE * sum(self.seconds(op) for op in bucket.ops)

    def gathers(self, region: Region, clock: Mapping[int, float]) -> dict[int, list[Op]]:
        """For each gather what it travels with: in full for the first of them, else nothing."""
        made_at = {v: i for i, op in enumerate(region.ops) for v in op.results}
        places: dict[_Key, list[int]] = {}
        for i, op in enumerate(region.ops):
            if op.name == "stablehlo.all_gather" and self.is_small(op):
                places.setdefault(_key(op), []).append(i)
        together: dict[int, list[Op]] = {}
        for key_places in places.values():
            for number, i in enumerate(key_places):
                op = region.ops[i]
                if id(op) in together:
                    continue
                group, until = [op], clock[id(op)] + PATIENCE * self.seconds(op)
                for j in key_places[number + 1 :]:
                    other = region.ops[j]
                    if clock[id(other)] > until or self.is_full(group, other):
                        break
                    if id(other) not in together and made_at.get(other.operands[0], -1) < i:
                        group.append(other)
                        together[id(other)] = []
                together[id(op)] = group
        return together

    def started_early(self, region: Region) -> list[Op]:
        """The ops of a block with every small reduction right behind the op of its operand."""
        early: dict[Value, list[Op]] = {}
        made = {result for op in region.ops for result in op.results}
        for op in region.ops:
            reduces = op.name != "stablehlo.all_gather"
            if reduces and self.is_small(op) and op.operands[0] in made:
                early.setdefault(op.operands[0], []).append(op)
        moved = {id(op) for ops in early.values() for op in ops}
        ordered: list[Op] = []
        for op in region.ops:
            if id(op) in moved:
                continue
            ordered.append(op)
            ready = list(op.results)
            while ready:  # a reduction may feed another one over other axes
                for follower in early.get(ready.pop(0), ()):
                    ordered.append(follower)
                    ready += follower.results
        return ordered

    # Time.

    def clock(self, region: Region) -> dict[int, float]:
        """Seconds of arithmetic in front of each op of a block."""
        found, now = {}, 0.0
        for op in region.ops:
            found[id(op)] = now
            now += self.arithmetic(op)
        return found

    def arithmetic(self, op: Op) -> float:
        """Seconds of an op's arithmetic, and of all that is inside it."""
        if op.regions:
            trips = 1
            if op.name == "stablehlo.while":
                count = trip_count(self.program, op, self.producers)
                trips = UNKNOWN_TRIPS if count is None else count
            return trips * sum(self.arithmetic(inner) for r in op.regions for inner in r.ops)
        if op.name in COLLECTIVES:
            return 0.0
        return local_seconds(op, self.stored, self.topology, self.producers)

    def seconds(self, op: Op, sent: bool = True) -> float:
        """Seconds of a collective, with or without those that depend on its bytes."""
        sizes = [op.kind.operands[0].bytes, op.kind.results[0].bytes] if sent else [0, 0]
        axes = op.kind.attrs["axes"]
        return collective_seconds(op.label, axes, sizes[0], sizes[1], self.mesh, self.topology)


def _key(op: Op) -> _Key:
    attrs = op.kind.attrs
    dtype = op.kind.operands[0].dtype
    return _Key(op.name, attrs["axes"], attrs.get("groups"), attrs.get("body"), dtype)


def _bytes(op: Op) -> int:
    """Bytes that a collective takes of a flat buffer, on its larger side."""
    return max(op.kind.operands[0].bytes, op.kind.results[0].bytes)
