"""Rewrite: small collectives of one kind over the same axes travel together, as one flat buffer.

before: `%3 = all_reduce %1 {data}; ...; %9 = all_reduce %8 {data}`
after:  `...; %20 = all_reduce concatenate(flat %1, flat %8) {data}; %3, %9 = slices of %20`

A small collective costs latency, not bytes: one for all costs it once. A reduction moves up to
where its operand is made, and waits there until one of those that wait with it is read. A gather
comes where the first of those that travel together is read; the others' operands must be there by
then. Nothing waits, or comes early, across so much arithmetic that each collective would have been
hidden behind it alone, and what is together at a time is bounded in bytes: that is the memory that
the flat buffer takes.

A reduction of a few bytes keeps its links busy with nothing but its start, hidden or not. It waits
for as long as nobody needs it, and so do ops of a few bytes that only put it somewhere: a step's
maxima and norms travel at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from spmd.ir.description import RESHAPE, Role
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values
from spmd.lowering.rewrites.clock import Clock
from spmd.lowering.rewrites.moves import pieces_of

MEMBERS = 4  # a bucket has room for at least so many collectives; larger ones travel alone
PATIENCE = 16  # a collective waits, or comes early, for at most so many times its own duration
FEW_BYTES = 1 << 16  # what an op reads and writes that waits with the reduction that it reads

COMBINED = ("all_gather", "all_reduce", "reduce_scatter")  # kinds that can be combined

_Key = tuple[object, ...]  # what collectives have to share in order to travel together


class _Bucket:
    """Collectives to combine; `until` is when enough arithmetic has passed to hide each alone."""

    def __init__(self, now: float) -> None:
        self.ops: list[Op] = []
        self.bytes = 0
        self.until = now

    def add(self, op: Op, seconds: float) -> None:
        self.ops.append(op)
        self.bytes += _bytes(op)
        self.until += PATIENCE * seconds


class _Waiting:
    """A block's reductions that wait in buckets to be combined, and small ops put off with them.

    A bucket is flushed, and becomes a collective, in front of the first op that reads a member,
    when it is full, or when `until` is over:

        %1 = all_reduce %0    waits in bucket {data}
        %2 = dot %0, %0
        %4 = all_reduce %2    joins it
        %5 = tanh %1          reads a member: the collective for %1 and %4 goes in front of it

    A member that reads another member's result flushes the bucket too, so that no collective ever
    needs its own result. An op that only moves a member's few bytes counts as no reader: it is put
    off until its own result is read.
    """

    def __init__(self, b: Builder) -> None:
        self._b = b
        self.buckets: dict[_Key, _Bucket] = {}
        self.key_of: dict[Value, _Key] = {}
        self.late: dict[Value, tuple[int, Op]] = {}  # the op, and its place

    def add(self, op: Op, now: float, seconds: float, most: int) -> None:
        """Puts a reduction that takes `seconds` alone in its bucket, of at most `most` bytes."""
        key = _key(op)
        if key in self.buckets and self.buckets[key].bytes + _bytes(op) > most:
            self.flush(key)
        self.buckets.setdefault(key, _Bucket(now)).add(op, seconds)
        self.key_of[op.results[0]] = key

    def make(self, values: Iterable[Value]) -> None:
        """Appends the waiting collectives and late ops that `values` come from, directly or not."""
        ask, needed = [*values], set[Value]()
        while ask:
            value = ask.pop()
            if value not in needed:
                needed.add(value)
                ask += self.late[value][1].operands if value in self.late else ()
        for key in dict.fromkeys(self.key_of[v] for v in sorted(needed) if v in self.key_of):
            self.flush(key)
        late = {self.late.pop(v) for v in needed if v in self.late}
        for _, op in sorted(late, key=itemgetter(0)):
            self._b.append(op)

    def flush(self, key: _Key) -> None:
        bucket = self.buckets.pop(key)
        for member in bucket.ops:
            del self.key_of[member.results[0]]
        _combined(self._b, bucket.ops)


def combine(program: Program, clock: Clock, target: int) -> Program:
    """Combines small collectives within each block, in buffers of `target` bytes at most."""
    run = _Combiner(program, clock, target)
    body = run.region(program.body)
    return program._replace(types=tuple(run.b.types), body=body)


class _Combiner:
    def __init__(self, program: Program, clock: Clock, target: int) -> None:
        self.clock, self.target = clock, target
        self.b = Builder(program.types)

    def region(self, old: Region) -> Region:
        inside = {id(op): tuple(map(self.region, op.regions)) for op in old.ops if op.regions}
        self.b.begin(isolated=True)
        starts = self.clock.starts(old)
        start_of = {id(op): start for op, start in zip(old.ops, starts, strict=True)}
        together = self.gathers(old, starts)
        waiting = _Waiting(self.b)
        for place, op in enumerate(self.started_early(old)):
            group = together.get(id(op), [op])
            reads = [v for member in group for v in member.operands]
            reads += [v for r in op.regions for v in free_values(r)]
            if any(v in waiting.key_of or v in waiting.late for v in reads):
                about = op.kind.about
                moves = about.role in (Role.INSIDE, Role.ALIAS) and not op.collective
                moved = sum(t.bytes for t in (*op.kind.operands, *op.kind.results))
                if moves and not about.has_effect and moved <= FEW_BYTES:  # it may as well be late
                    waiting.late.update((result, (place, op)) for result in op.results)
                    continue
                waiting.make(reads)
            now = start_of[id(op)]
            for key, bucket in list(waiting.buckets.items()):
                if now > bucket.until and bucket.bytes > FEW_BYTES:  # it has waited long enough
                    waiting.flush(key)
            if op.regions:
                self.b.append(op._replace(regions=inside[id(op)]))
            elif self.is_small(op) and op.collective != "all_gather":
                waiting.add(op, now, self.clock.exchange(op), self.target)
            elif group:
                _combined(self.b, group)
        for key in list(waiting.buckets):
            waiting.flush(key)
        waiting.make(list(waiting.late))
        return self.b.end(old.args, old.results)

    # What may travel together.

    def is_small(self, op: Op) -> bool:
        if op.collective not in COMBINED or len(op.operands) != 1 or "axes" not in op.kind.attrs:
            return False
        if not 0 < _bytes(op) <= self.target // MEMBERS:
            return False
        copies = 4 * _bytes(op) / self.clock.topology.hbm_bandwidth
        return copies < self.clock.exchange(op, sent=False)

    def gathers(self, region: Region, starts: Sequence[float]) -> dict[int, list[Op]]:
        """Returns groups of gathers to combine, by the first one's `id`; [] at other `id`s."""
        # All members start where the first one stood, so their operands have to be there by then:
        # `made_at` of each is in front of the first member (arguments count as -1).
        made_at = {v: i for i, op in enumerate(region.ops) for v in op.results}
        places: dict[_Key, list[int]] = {}
        for i, op in enumerate(region.ops):
            if op.collective == "all_gather" and self.is_small(op):
                places.setdefault(_key(op), []).append(i)
        together: dict[int, list[Op]] = {}
        for alike in places.values():
            for number, i in enumerate(alike):
                op = region.ops[i]
                if id(op) in together:
                    continue
                bucket, seconds = _Bucket(starts[i]), self.clock.exchange(op)
                bucket.add(op, seconds)
                until = bucket.until
                for j in alike[number + 1 :]:
                    other = region.ops[j]
                    if starts[j] > until or bucket.bytes + _bytes(other) > self.target:
                        break
                    if id(other) not in together and made_at.get(other.operands[0], -1) < i:
                        bucket.add(other, seconds)
                        together[id(other)] = []
                together[id(op)] = bucket.ops
        return together

    def started_early(self, region: Region) -> list[Op]:
        """Returns a block's ops, small reductions right behind the makers of their operands."""
        early: dict[Value, list[Op]] = {}
        made = {result for op in region.ops for result in op.results}
        for op in region.ops:
            reduces = op.collective != "all_gather"
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


def _key(op: Op) -> _Key:
    attrs = op.kind.attrs
    dtype = op.kind.operands[0].dtype
    return op.name, attrs["axes"], attrs.get("groups"), attrs.get("body"), dtype


def _bytes(op: Op) -> int:
    """Returns the bytes of a flat buffer that a collective takes up: those of its larger side."""
    return max(op.kind.operands[0].bytes, op.kind.results[0].bytes)


def _combined(b: Builder, group: Sequence[Op]) -> None:
    """Appends one collective in place of several that share a `_key`, and slices their results.

    before: `%3 = all_gather %1 dim=0; %4 = all_gather %2 dim=1`
    after:  `%5 = concatenate(flat %1, flat %2); %6 = all_gather %5: one row a device`
            `%3, %4 =` columns of `%6`, each device's part where it belongs

    (StableHLO's variadic collectives would say the same without copies, but XLA 0.10's export
    rejects a variadic all_reduce inside a manually partitioned loop: "Sharding is tuple-shaped but
    validation shape is not".)
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
    """Reshapes an operand to rows: for a reduce-scatter one for each device, else a single one."""
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
