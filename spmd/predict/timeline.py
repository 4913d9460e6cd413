"""Predicted time of one run: a list-schedule of the local program.

Arithmetic runs on one lane, collectives on one lane for each class of links: a collective starts
when its operands are there and its links are free, and ops that read its result start after it.
While arithmetic waits, a later op whose operands are there goes first, as in XLA's own schedulers.
So communication that independent arithmetic can hide costs nothing but the rest of it. Collectives
during which a backend computes nothing (`XlaBackend.waits_for`) take the lane of arithmetic, too.

    before: g = all_gather w; y = dot x, x; z = dot y, g
    after:  compute | dot ..... | dot ... |
            data    | all_gather ..|           (hidden but for what is longer than the first dot)
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from spmd.errors import seconds_text
from spmd.ir.control_flow import Index
from spmd.ir.description import Role
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.types import DotDims, dtype_bits
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axis_refs
from spmd.mesh.topology import Topology
from spmd.predict.backends import backend_of
from spmd.predict.fusion import stored_values
from spmd.predict.ops import RAGGED, Transfer, arithmetic_seconds, bytes_moved, memory_seconds

COMPUTE = "compute"
MOVES = "the host's memory"
"""The kind of what moves values there and back; no arithmetic is predicted to hide it."""


class Slot(NamedTuple):
    """The lane on which an op or a loop is predicted to run, and its start and end in seconds."""

    op: Op
    lane: str  # `compute`, or the mesh axes whose links it uses, as `data` or `data, model`
    start: float  # seconds from the start of the run; inside a loop, of its first iteration
    end: float
    trips: int = 1  # how often it runs, as the loops around it say; 1 outside of loops
    depth: int = 0  # how many loops it is inside of
    runs: int | None = 1  # for a loop, its trip count; None if unknown (16 are counted)

    @property
    def seconds(self) -> float:
        """The seconds that it takes each time it runs; for a loop, those of all its iterations."""
        return self.end - self.start

    @property
    def kind(self) -> str:
        """`compute`, `MOVES`, or the kind of a collective: `all_gather`."""
        if self.op.kind.about.between_memories:
            return MOVES
        return COMPUTE if self.lane == COMPUTE else self.op.collective or RAGGED


class Timeline(NamedTuple):
    """When each op and loop of one device's program is predicted to run, and the whole's times."""

    # In program order, a loop before what is inside it; as if `Chip.overlap` were 1.
    slots: tuple[Slot, ...]
    seconds: float  # when everything is done
    compute_seconds: float  # arithmetic alone
    comm_seconds: float  # collectives alone, one after another
    exposed_seconds: float  # how long arithmetic waits for communication

    def __repr__(self) -> str:
        whole, compute, sent, waits = map(seconds_text, self[1:])
        parts = f"compute {compute}, collectives {sent}, {waits} of them waited for"
        return f"<Timeline: {whole} ({parts}; {len(self.slots)} slots)>"

    @property
    def scheduled_seconds(self) -> float:
        """Seconds at which the last slot ends: `seconds` if overlap slows nothing down."""
        return max((slot.end for slot in self.slots if slot.depth == 0), default=0.0)


def predict_timeline(
    program: Program, mesh: Mesh, topology: Topology, *, least: bool = False
) -> Timeline:
    """Returns when each op of a local program is predicted to run, and the time of one run.

    With `least` it takes the shortest branch of every case, not the longest.
    """
    run = _Schedule(program, mesh, topology, least)
    end = run.region(program.body, 0.0, 1, 0)
    parts = [slot for slot in run.slots if not slot.op.regions]
    compute = sum(slot.seconds * slot.trips for slot in parts if slot.lane == COMPUTE)
    comm = sum(slot.seconds * slot.trips for slot in parts if slot.lane != COMPUTE)
    # 10 s of arithmetic and 6 s of communication in a schedule of 11 s hide 5 s of each other. With
    # an overlap of 0.2 only 1 s of these is won, and the run takes 11 + 0.8 * 5 = 15 s.
    hidden = max(0.0, compute + comm - end)
    end += (1 - topology.chip.overlap) * hidden
    return Timeline(tuple(run.slots), end, compute, comm, max(0.0, end - compute))


def least_seconds(index: Index, mesh: Mesh, topology: Topology) -> float:
    """Returns the seconds that no plan can beat: a program's arithmetic, split over all devices."""

    def region(ops: Iterable[Op]) -> float:
        total = 0.0
        for op in ops:
            inside = [region(inner.ops) for inner in op.regions]
            if op.is_loop:
                total += sum(inside) * index.runs(op)
            else:
                total += max(inside) if inside else arithmetic_seconds(op.kind, topology)
        return total

    return region(index.program.body.ops) / mesh.size


class _Schedule:
    def __init__(self, program: Program, mesh: Mesh, topology: Topology, least: bool) -> None:
        self.mesh, self.topology, self.index = mesh, topology, Index(program)
        self.least = least
        self.local = LocalTimes(program, topology, self.index)
        self.waits_for = backend_of(topology.platform).waits_for
        self.ready: dict[Value, float] = {}  # when each value is there
        self.free: dict[str, float] = {}  # from when on each lane is
        self.gaps: list[tuple[float, float]] = []  # times at which no arithmetic runs before that
        self.slots: list[Slot] = []

    def region(self, region: Region, start: float, trips: int, depth: int) -> float:
        # A region has lanes of its own: control flow starts when those around it are through, and
        # nothing runs beside it.
        end = start
        outer, self.free = self.free, {}
        gaps, self.gaps = self.gaps, []
        for op in region.ops:
            schedule = self.control_flow if op.regions else self.op
            end = max(end, schedule(op, start, trips, depth))
        self.free, self.gaps = outer, gaps
        return end

    def op(self, op: Op, start: float, trips: int, depth: int) -> float:
        known = self.ready
        ready = max([known.get(v, start) for v in op.operands], default=start)
        costs, transfer = self.local.copies(op), Transfer.of(op, self.mesh)
        if transfer is not None:
            lane = ", ".join(sorted(str(ref) for ref in axis_refs(transfer.axes, self.mesh)))
            costs.append((op, lane, transfer.seconds(self.mesh, self.topology)))
        if not op.collective or transfer is None:  # a composite may exchange first
            costs.append((op, COMPUTE, self.local.seconds(op)))
        for part, lane, seconds in costs:
            if seconds:
                if lane != COMPUTE and part.collective in self.waits_for:
                    ready = max(ready, self.free.get(lane, start))
                    begin = self.begin(COMPUTE, ready, seconds, start)
                    self.free[lane] = begin + seconds
                else:
                    begin = self.begin(lane, ready, seconds, start)
                ready = begin + seconds
                self.slots.append(Slot(part, lane, begin, ready, trips, depth))
        for value in op.results:
            known[value] = ready
        return ready

    def begin(self, lane: str, ready: float, seconds: float, start: float) -> float:
        """Reserves `seconds` of a lane, not before `ready`; returns when they begin."""
        free = self.free.get(lane, start)
        if lane == COMPUTE:
            first = bisect_right(self.gaps, ready, key=lambda gap: gap[1])
            for i in range(first, len(self.gaps)):
                opened, closed = self.gaps[i]
                begin = max(opened, ready)
                if begin + seconds <= closed:
                    left = (opened, begin), (begin + seconds, closed)
                    self.gaps[i : i + 1] = [gap for gap in left if gap[1] > gap[0]]
                    return begin
            if ready > free:
                self.gaps.append((free, ready))
        begin = max(ready, free)
        self.free[lane] = begin + seconds
        return begin

    def control_flow(self, op: Op, start: float, trips: int, depth: int) -> float:
        """Schedules a loop (an iteration times its trips) or a case (one branch, as `least` says).

        Nothing else runs meanwhile. Of a case only that branch has slots. Returns when it ends.
        """
        begin = max([start, *self.free.values(), *(self.ready.get(v, start) for v in op.operands)])
        place, inner = len(self.slots), self.index.runs(op)
        runs = self.index.trips[op.results[0]] if op.is_loop else 1
        if op.is_loop:
            end = begin
            for region in op.regions:  # the condition, then the body
                end = self.region(region, end, trips * inner, depth + 1)
            seconds = inner * (end - begin)
        else:
            seconds, mark = math.inf if self.least else 0.0, place
            for region in op.regions:  # only the slots of the branch that counts stay
                took = self.region(region, begin, trips, depth + 1) - begin
                if took < seconds if self.least else took > seconds:
                    del self.slots[place:mark]
                    seconds = took
                else:
                    del self.slots[mark:]
                mark = len(self.slots)
        self.slots.insert(place, Slot(op, COMPUTE, begin, begin + seconds, trips, depth, runs))
        self.free = dict.fromkeys([*self.free, COMPUTE], begin + seconds)
        self.ready.update(dict.fromkeys(op.results, begin + seconds))
        return begin + seconds


class LocalTimes:
    """Seconds of a local program's ops on one device: the longer of arithmetic and memory traffic.

    What is computed inside its readers takes no time of its own: these read what it is made of.
    """

    def __init__(self, program: Program, topology: Topology, index: Index) -> None:
        self.topology = topology
        self.stored = stored = stored_values(program)  # the values that lie in memory
        self._known: dict[OpKind, float] = {}
        self._copied: set[Value] = set()
        # What is computed inside its readers -> the bytes that are read for it, by stored value.
        self._reads: dict[Value, dict[Value, float]] = {}
        for value, op in index.producers.items():  # operands before what is made of them
            if value not in stored and not op.regions:
                self._reads[value] = self._bytes_read(op)

    def seconds(self, op: Op) -> float:
        """Returns the time of an op that is no collective or control flow; 0 if it is fused."""
        if self.stored.isdisjoint(op.results):
            return 0.0
        is_plain = len(op.operands) == len(set(op.operands))
        is_plain &= self._reads.keys().isdisjoint(op.operands)
        if is_plain and op.kind in self._known:
            return self._known[op.kind]
        moved = sum(self._bytes_read(op).values()) + _moves(op.kind)[1]
        memory = memory_seconds(op.kind, moved, self.topology)
        found = max(arithmetic_seconds(op.kind, self.topology), memory)
        if is_plain:
            self._known[op.kind] = found
        return found

    def copies(self, op: Op) -> list[tuple[Op, str, float]]:
        """Returns (op, lane, seconds) of the transposes that a dot of 8-bit operands needs first.

        Tensor cores read these with contracted dims innermost only. A value is transposed once.
        """
        kind, rate = op.kind, self.topology.chip.byte_transpose
        if not rate or kind.about.reads != "matrices" or dtype_bits(kind.operands[0].dtype) != 8:
            return []
        dims: DotDims = kind.attrs["dot_dimension_numbers"]
        contracted = dims.lhs_contract, dims.rhs_contract
        made = []
        for value, type_, inner in zip(op.operands, kind.operands, contracted, strict=True):
            is_innermost = sorted(inner) == [*range(type_.rank - len(inner), type_.rank)]
            if not is_innermost and value not in self._copied:
                self._copied.add(value)
                b = Builder()
                b.begin()
                b.transpose(b.value(type_), tuple(reversed(range(type_.rank))))
                copy = b.last._replace(operands=(value,), loc=op.loc)
                made.append((copy, COMPUTE, 2 * type_.bytes / rate))
        return made

    def _bytes_read(self, op: Op) -> dict[Value, float]:
        """Returns stored value -> bytes of it that an op, with what is fused into it, reads."""
        # Each stored value is read once, at the largest size that anything inside wants.
        found: dict[Value, float] = {}
        for value, (size, whole) in zip(op.operands, _moves(op.kind)[0], strict=False):
            for root, most in self._reads.get(value, {value: size}).items():
                # No more than the op reads of what is made there.
                read = size if size < most and size < whole else most
                if read > found.get(root, -1):
                    found[root] = read
        return found


def _moves(kind: OpKind) -> tuple[list[tuple[float, int]], float]:
    """Returns (bytes read, size in bytes) of each operand, and the bytes that are written."""
    moves: tuple[list[tuple[float, int]], float] | None = kind._cache.get("moves")
    if moves is None:
        sizes = [type_.bytes for type_ in (*kind.operands, *kind.results)]
        moved, count = bytes_moved(kind, sizes), len(kind.operands)
        read = sizes if kind.about.role == Role.ALIAS else moved
        moves = list(zip(read[:count], sizes[:count], strict=True)), sum(moved[count:])
        kind._cache["moves"] = moves
    return moves
