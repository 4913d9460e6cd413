"""Rewrites that decide when collectives run: `combine` joins small ones, `order` starts all early.

`combine`: small collectives of one kind over the same axes become one, of one flat buffer.

before: `%3 = all_reduce %1 {data}; ...; %9 = all_reduce %8 {data}`
after:  `...; %20 = all_reduce concatenate(flat %1, flat %8) {data}; %3, %9 = slices of %20`

A small collective takes its latency, whatever its bytes; a combined one takes that once. Reductions
are collected in a bucket from the place where their operands are made on, and combined in front of
the first op that reads one of their results. Gathers are combined where the first of them is, if
the operands of the others are made before. No collective moves across so much arithmetic that each
would have been hidden behind it alone. A flat buffer has a maximum of bytes, since it takes memory.

Reductions of a few bytes block their links for their latency, hidden or not. They are combined as
late as an op needs one of them, and so are moved small ops that only move such a result: the maxima
and norms of a training step are reduced together at its end.

`order`: collectives start early enough to be hidden, and not much earlier.

before: `%2 = dot %0, %0; %3 = all_gather %1; %4 = dot %2, %3; ...; %7 = reduce_scatter %2`
after:  `%3 = all_gather %1; %2 = dot %0, %0; %7 = reduce_scatter %2; %4 = dot %2, %3; ...`

A block's arithmetic keeps its order; its collectives move up, with the cheap ops that feed them.

- A collective whose result is no larger than its operand (a reduction, an all-to-all) starts right
  after its operand is made. That takes no more memory, even if a gradient's sum is read much later.
- A gather, or any collective of an argument (a weight), starts as late as it is still hidden by the
  arithmetic in front of its first use, after gathers over the same links that are needed before. To
  bound the memory, it never starts before the use of the gather over these links that is `prefetch`
  uses ahead of it, nor before a loop that it comes after.

Predictions of time and memory go by this order. Backends with a latency-hiding scheduler (TPUs;
GPUs with `xla_gpu_enable_latency_hiding_scheduler`) find one of their own; XLA's CPU backend
schedules for memory alone and comes to the same schedule from any order.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.description import RESHAPE, Role
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values, reads
from spmd.lowering.rewrites.two_level import IN_PIECES, two_level
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.memory import alive_bytes, constant_bytes, peak_memory
from spmd.predict.timeline import LocalTimes
from spmd.reshard.comm import collective_seconds


class Clock:
    """Predicts the seconds of a program's ops; arithmetic that rewrites add later counts as 0."""

    def __init__(self, program: Program, mesh: Mesh, topology: Topology) -> None:
        self.mesh, self.topology = mesh, topology
        self.index = Index(program)
        self.local = LocalTimes(program, topology, self.index)
        self.stored = self.local.stored
        self._known: dict[Value, float] = {}

    def starts(self, region: Region) -> list[float]:
        """Returns, for each op of a region, the seconds of all arithmetic in front of it."""
        return list(accumulate(map(self.arithmetic, region.ops), initial=0.0))[:-1]

    def arithmetic(self, op: Op) -> float:
        """Returns the seconds of an op's arithmetic, a loop's of all trips; 0 for a collective."""
        if op.collective or not op.results:
            return 0.0
        seconds = self._known.get(op.results[0])
        if seconds is None:
            inside = sum(self.arithmetic(inner) for r in op.regions for inner in r.ops)
            seconds = self.index.runs(op) * inside if op.regions else self.local.seconds(op)
            self._known[op.results[0]] = seconds
        return seconds

    def exchange(self, op: Op, sent: bool = True) -> float:
        """Returns the seconds of a collective; those of its latency alone if `sent` is False."""
        before, after = op.kind.operands[0].bytes * sent, op.kind.results[0].bytes * sent
        axes = op.kind.attrs["axes"]
        return collective_seconds(op.label, axes, before, after, self.mesh, self.topology)


class Room(NamedTuple):
    """The bytes of one device's memory, and the positions of arguments that are donated."""

    bytes: int
    donated: tuple[int, ...] = ()

    def left(self, program: Program) -> int:
        """Returns the bytes that a program leaves free at its predicted peak; negative if too big.

        If a quick estimate of the peak is below three quarters of the memory, a quarter of the
        memory is returned without a prediction.
        """
        if 4 * (alive_bytes(program) + constant_bytes(program)) < 3 * self.bytes:
            return self.bytes // 4
        return self.bytes - peak_memory(program, self.donated).peak


def schedule(
    program: Program, mesh: Mesh, topology: Topology, combine_bytes: int, prefetch: int, room: Room
) -> Program:
    """Applies `combine` (`combine_bytes`), `two_level`, `order` (`prefetch`, `room`) in turn."""
    # A flat buffer is split in levels, not each small collective in it. `order` comes last, since
    # every other rewrite changes what there is to be ordered.
    clock = Clock(program, mesh, topology)
    program = combine(program, clock, combine_bytes)
    program = two_level(program, mesh, topology)
    return order(program, clock, prefetch, room)


# Small collectives together.

MEMBERS = 4  # a flat buffer has room for at least so many collectives; larger ones stay alone
PATIENCE = 16  # a collective is moved across at most so many times its own seconds
FEW_BYTES = 1 << 16  # up to so many, ops are delayed with their operand, buckets have no `until`

_Key = tuple[object, ...]  # what collectives have to share in order to be combined


class _Bucket:
    """Collectives to combine, their bytes, and the latest time for it, in seconds of arithmetic."""

    def __init__(self, now: float) -> None:
        self.ops: list[Op] = []
        self.bytes = 0
        self.until = now

    def add(self, op: Op, seconds: float) -> None:
        self.ops.append(op)
        self.bytes += _bytes(op)
        self.until += PATIENCE * seconds


def combine(program: Program, clock: Clock, target: int) -> Program:
    """Combines small collectives within each region, in flat buffers of at most `target` bytes."""
    b = Builder(program.types)
    body = _Block(clock, b, target).rewritten(program.body)
    return program._replace(types=tuple(b.types), body=body)


class _Block:
    """Combines the small collectives of one region, and moves small ops on their results down.

    A reduction goes into a bucket. That becomes one collective in front of the first op that reads
    a member's result, when it is full, or at its time `until`:

        %1 = all_reduce %0    waits in bucket {data}
        %2 = dot %0, %0
        %4 = all_reduce %2    joins it
        %5 = tanh %1          reads a member: the collective for %1 and %4 goes in front of it

    A member that reads another member's result flushes the bucket too, so that no collective ever
    needs its own result. An op that only moves a member's few bytes counts as no reader: it is
    moved down to the first op that reads its own result.
    """

    def __init__(self, clock: Clock, b: Builder, target: int) -> None:
        self.clock, self.b, self.target = clock, b, target
        self.buckets: dict[_Key, _Bucket] = {}
        self.key_of: dict[Value, _Key] = {}
        self.late: dict[Value, tuple[int, Op]] = {}  # the op, and its place

    def rewritten(self, old: Region) -> Region:
        inside = {
            id(op): tuple(_Block(self.clock, self.b, self.target).rewritten(r) for r in op.regions)
            for op in old.ops
            if op.regions
        }
        self.b.begin(isolated=True)
        starts = self.clock.starts(old)
        start_of = {id(op): start for op, start in zip(old.ops, starts, strict=True)}
        together = self.gathers(old, start_of)
        for place, op in enumerate(self.started_early(old)):
            group = together.get(id(op), [op])
            read = [v for member in group for v in member.operands]
            read += [v for r in op.regions for v in free_values(r)]
            if any(v in self.key_of or v in self.late for v in read):
                about = op.kind.about
                moves = about.role in (Role.INSIDE, Role.ALIAS) and not op.collective
                moved = sum(t.bytes for t in (*op.kind.operands, *op.kind.results))
                if moves and not about.has_effect and moved <= FEW_BYTES:  # it may as well be late
                    self.late.update((result, (place, op)) for result in op.results)
                    continue
                self.make(read)
            now = start_of[id(op)]
            for key, bucket in list(self.buckets.items()):
                if now > bucket.until and bucket.bytes > FEW_BYTES:  # it has waited long enough
                    self.flush(key)
            if op.regions:
                self.b.append(op._replace(regions=inside[id(op)]))
            elif self.may_wait(op):
                key = _key(op)
                if key in self.buckets and self.buckets[key].bytes + _bytes(op) > self.target:
                    self.flush(key)
                self.buckets.setdefault(key, _Bucket(now)).add(op, self.clock.exchange(op))
                self.key_of[op.results[0]] = key
            elif group:
                _combined(self.b, group)
        for key in list(self.buckets):
            self.flush(key)
        self.make(list(self.late))
        return self.b.end(old.args, old.results)

    def make(self, values: Iterable[Value]) -> None:
        """Appends the collectives in buckets and the late ops that `values` depend on."""
        ask, needed = [*values], set[Value]()
        while ask:
            value = ask.pop()
            if value not in needed:
                needed.add(value)
                ask += self.late[value][1].operands if value in self.late else ()
        for key in dict.fromkeys(self.key_of[v] for v in sorted(needed) if v in self.key_of):
            self.flush(key)
        for _, op in sorted({self.late[v] for v in needed if v in self.late}, key=itemgetter(0)):
            self.b.append(op)
            for result in op.results:  # also those that are not needed yet
                del self.late[result]

    def flush(self, key: _Key) -> None:
        bucket = self.buckets.pop(key)
        for member in bucket.ops:
            del self.key_of[member.results[0]]
        _combined(self.b, bucket.ops)

    # What may travel together.

    def is_small(self, op: Op) -> bool:
        if op.collective not in IN_PIECES or len(op.operands) != 1 or "axes" not in op.kind.attrs:
            return False
        fits = 0 < _bytes(op) <= self.target // MEMBERS
        copies = 4 * _bytes(op) / self.clock.topology.hbm_bandwidth
        return fits and copies < self.clock.exchange(op, sent=False)

    def may_wait(self, op: Op) -> bool:
        return op.collective != "all_gather" and self.is_small(op)

    def gathers(self, region: Region, start_of: Mapping[int, float]) -> dict[int, list[Op]]:
        """Maps `id` of each small gather to ops to combine there: all at the first, else []."""
        # All members start where the first one stood, so their operands have to be there by then:
        # `made_at` of each is in front of the first member (arguments count as -1).
        made_at = {v: i for i, op in enumerate(region.ops) for v in op.results}
        alike: dict[_Key, list[tuple[int, Op]]] = {}
        for i, op in enumerate(region.ops):
            if op.collective == "all_gather" and self.is_small(op):
                alike.setdefault(_key(op), []).append((i, op))
        together: dict[int, list[Op]] = {}
        for gathers in alike.values():
            for number, (i, op) in enumerate(gathers, 1):
                if id(op) in together:
                    continue
                bucket, seconds = _Bucket(start_of[id(op)]), self.clock.exchange(op)
                bucket.add(op, seconds)
                until = bucket.until
                for _, other in gathers[number:]:
                    is_full = bucket.bytes + _bytes(other) > self.target
                    if is_full or start_of[id(other)] > until:
                        break
                    if id(other) not in together and made_at.get(other.operands[0], -1) < i:
                        bucket.add(other, seconds)
                        together[id(other)] = []
                together[id(op)] = bucket.ops
        return together

    def started_early(self, region: Region) -> list[Op]:
        """Returns a region's ops, each small reduction right behind its operand's producer."""
        early: dict[Value, list[Op]] = {}
        made = {result for op in region.ops for result in op.results}
        for op in region.ops:
            if self.may_wait(op) and op.operands[0] in made:
                early.setdefault(op.operands[0], []).append(op)
        moved = {id(op) for ops in early.values() for op in ops}
        ordered: list[Op] = []
        for op in region.ops:
            ready = [op] if id(op) not in moved else []
            while ready:  # a reduction may feed another one over other axes
                ordered.append(ready.pop(0))
                ready += [op for v in ordered[-1].results for op in early.get(v, ())]
        return ordered


def _key(op: Op) -> _Key:
    attrs = op.kind.attrs
    return op.name, attrs["axes"], attrs.get("groups"), attrs.get("body"), op.kind.operands[0].dtype


def pieces_of(op: Op) -> int:
    """Returns how many pieces, one of each device, a gather joins or a reduce-scatter cuts."""
    dim = op.kind.attrs[op.kind.about.along]
    sizes = op.kind.operands[0].shape[dim], op.kind.results[0].shape[dim]
    return max(sizes) // min(sizes)


def _bytes(op: Op) -> int:
    """Returns the bytes of a collective's operand or result, whichever is larger."""
    return max(op.kind.operands[0].bytes, op.kind.results[0].bytes)


def _combined(b: Builder, group: Sequence[Op]) -> None:
    """Appends one collective in place of several that share a `_key`, and slices for their results.

    before: `%3 = all_gather %1 dim=0; %4 = all_gather %2 dim=1`
    after:  `%5 = concatenate(flat %1, flat %2); %6 = all_gather %5: one row a device`
            `%3, %4 =` columns of `%6`, each device's part where it belongs

    (Variadic collectives would need no copies, but XLA 0.10's export rejects such an all_reduce in
    a manually partitioned loop: "Sharding is tuple-shaped but validation shape is not".)
    """
    if len(group) == 1:
        b.append(group[0])
        return
    # Each operand is a row, or has one for each device that gets a part. Rows are side by side, and
    # collectives have columns of their own. Two reduce-scatters over 2 devices, f32[4] and f32[6]:
    #   a0 a1 | b0 b1 b2        row for device 0      -> one reduce-scatter of f32[2, 5] along dim 0
    #   a2 a3 | b3 b4 b5        row for device 1
    first, attr = group[0], group[0].kind.about.along
    b.loc = first.loc._replace(note=f"{first.loc.note} (and {len(group) - 1} more with it)".strip())
    rows = [_rows(b, op) for op in group]
    joined = b.concatenate(rows, 1)
    count, width = b.types[joined].shape
    parts = pieces_of(first) if attr else 1
    after = parts * count if first.collective == "all_gather" else count // parts
    attrs = {**first.kind.attrs, attr: 0} if attr else first.kind.attrs
    type_ = b.types[joined].with_shape((after, width))
    (moved,) = b.op(first.name, (joined,), (type_,), attrs)
    start = 0
    for op, row in zip(group, rows, strict=True):
        size = b.types[row].shape[1]
        b.loc = op.loc
        _unpacked(b, op, b.slice_dim(moved, 1, start, start + size))
        start += size


def _rows(b: Builder, op: Op) -> Value:
    """Reshapes an op's operand to a matrix: one row a device for a reduce-scatter, else one row."""
    (x,) = op.operands
    type_ = op.kind.operands[0]
    if op.collective != "reduce_scatter":
        return b.reshape(x, (1, type_.size))
    dim, parts = op.kind.attrs["scatter_dimension"], pieces_of(op)
    before, after = type_.shape[:dim], type_.shape[dim + 1 :]
    x = _turned(b, x, (math.prod(before), parts, type_.shape[dim] // parts * math.prod(after)))
    return b.reshape(x, (parts, type_.size // parts))


def _turned(b: Builder, x: Value, shape: tuple[int, int, int]) -> Value:
    return x if 1 in shape[:2] else b.transpose(b.reshape(x, shape), (1, 0, 2))


def _unpacked(b: Builder, op: Op, part: Value) -> None:
    # Gathers join rows, one a device. For f32[2, 3] along dim 1 over 4 devices that is f32[4, 6]:
    # as (4 devices, 2, 3) with the first two swapped, it is the f32[2, 12] that was asked for.
    if op.collective == "all_gather":
        type_, dim = op.kind.operands[0], op.kind.attrs["all_gather_dim"]
        before = math.prod(type_.shape[:dim])
        part = _turned(b, part, (pieces_of(op), before, math.prod(type_.shape[dim:])))
    kind = OpKind(RESHAPE, (b.types[part],), op.kind.results, {})
    b.append(Op(kind, (part,), op.results, (), op.loc))


# Collectives early.

_NEVER = float("inf")


class _Spot(NamedTuple):
    """An op and what `order` goes by: is it cheap, a gather; its atoms; ops that it must follow."""

    op: Op
    is_cheap: bool  # whether it is computed inside its readers, or only another name
    # whether its result takes memory from when it starts: it is a collective that makes more than
    # it takes, or of something that is kept in any case
    is_gather: bool
    links: frozenset[int]  # the atoms over which a collective runs
    # the last op in front of it that it must stay behind, -1 if there is none: cheap ops and
    # collectives that make its operands move along with it, so what makes theirs counts
    ready: int
    loop: int  # the last op with regions up to it, -1 if there is none

    @property
    def can_move(self) -> bool:
        return self.is_cheap or bool(self.op.collective)


def order(program: Program, clock: Clock, prefetch: int, room: Room) -> Program:
    """Moves collectives up; at most `prefetch` gathers over the same links then wait for their use.

    The given order stays if `prefetch` is 0, or if the new one exceeds `room` and takes more memory
    than the given one.
    """
    if prefetch == 0 or not any(op.collective for op in program.walk()):
        return program

    def region(old: Region) -> Region:
        ops = tuple(
            op._replace(regions=tuple(map(region, op.regions))) if op.regions else op
            for op in old.ops
        )
        places = _places(old, clock, prefetch)
        ranked = sorted(range(len(ops)), key=places.__getitem__)  # ties keep the old order
        return old._replace(ops=tuple(ops[i] for i in ranked))

    ordered = program._replace(body=region(program.body))
    left = room.left(ordered)
    return ordered if left >= 0 or left >= room.left(program) else program


def _places(region: Region, clock: Clock, prefetch: int) -> list[float]:
    """Returns each op's place in the new order, to sort by: 2.5 is between ops 2 and 3."""
    ops, starts = region.ops, clock.starts(region)
    spots: list[_Spot] = []
    made: dict[Value, int] = {}
    loop = -1
    for i, op in enumerate(ops):
        is_cheap = op.kind.about.role in (Role.INSIDE, Role.ALIAS)
        links = frozenset(op.kind.attrs.get("axes", ()))
        ready = max([made.get(v, -1) for v in op.operands], default=-1)
        grows = op.collective and op.kind.results[0].bytes > op.kind.operands[0].bytes
        is_gather = bool(grows or (op.collective and ready < 0))
        loop = i if op.regions else loop
        spots.append(_Spot(op, is_cheap, is_gather, links, ready, loop))
        made.update((v, ready if spots[i].can_move else i) for v in op.results)
    earliest = _earliest(spots, prefetch)

    # The walk goes backwards, so that the readers of a value have their places before its maker:
    # an op then stands no later than its first reader, and data flow stays in order. Products of
    # 42 us each, a gather of 40 us, and `abs` on the way to the gather:
    #
    #   op       0 dot   1 dot   2 dot   3 abs   4 gather   5 dot (reads 4)
    #   starts   0       42      84      126     127        127 us
    #   5        stays at 5: arithmetic keeps its order
    #   4        is used at 127, so it starts at 127 - 40 = 87, while op 2 runs: its place is 1.5
    #   3        is needed by 4, so its place is 1.5 too; ties keep the old order
    #   result   0 1 3 4 2 5, the gather beside op 2
    found = [float(i) for i in range(len(ops))]
    # the first place at which something, or arithmetic behind cheap ops, reads a value; and the
    # time from which links of some axes are busy with later gathers
    needed: dict[Value, float] = {}
    used: dict[Value, float] = {}
    links_free: dict[frozenset[int], float] = {}
    for i, (op, is_cheap, is_gather, links, ready, _) in reversed(list(enumerate(spots))):
        place = min([found[i], *(needed.get(v, _NEVER) for v in op.results)])
        use = min([used.get(v, _NEVER) for v in op.results], default=_NEVER)
        if is_gather:
            # As late as the arithmetic in front of its use still hides it. Later gathers were
            # placed first, and keep the links busy from `links_free` on: this one has to end by
            # then. Its place is in front of the op that runs when it has to start.
            reader = math.ceil(min(use, len(ops) - 1))
            end = min(starts[max(0, reader)], links_free.get(links, _NEVER))
            links_free[links] = start = end - clock.exchange(op)
            wanted = max(bisect_right(starts, start) - 1.5, float(earliest[i]))
            place = min(place, max(wanted, ready + 0.5))
        elif op.collective:
            place = min(place, ready + 0.5)
        found[i] = place
        use = use if is_cheap else place
        for v in reads(op):
            needed[v] = min(place, needed.get(v, _NEVER))
            used[v] = min(use, used.get(v, _NEVER))
    return found


def _earliest(spots: Sequence[_Spot], prefetch: int) -> dict[int, int]:
    """Maps the number of each gather to that of the op that it must not start before, or -1.

    That is the last op with regions before it, or the use of the gather that is `prefetch` uses
    before its own, whichever is later.
    """
    # Gathers over the same links with uses at ops 4, 8 and 12, and prefetch = 2: the third one
    # waits for op 4. At most two of their results exist at any time.
    used: dict[Value, int] = {}
    gathers: dict[frozenset[int], list[tuple[int, int]]] = {}
    for i, spot in reversed(list(enumerate(spots))):
        made = spot.op.results if spot.can_move else ()
        use = min([used.get(v, len(spots)) for v in made], default=i)
        if spot.is_gather:
            gathers.setdefault(spot.links, []).append((use, i))
        for v in reads(spot.op):
            used[v] = min(use, used.get(v, len(spots)))
    found = {}
    for uses in map(sorted, gathers.values()):
        for number, (_, i) in enumerate(uses):
            found[i] = max(spots[i].loop, uses[number - prefetch][0] if number >= prefetch else -1)
    return found
