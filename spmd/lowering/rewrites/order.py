"""Rewrite: communication is issued early enough to be hidden, and not much earlier.

before: `%2 = dot %0, %0; %3 = all_gather %1; %4 = dot %2, %3; ...; %7 = reduce_scatter %2`
after:  `%3 = all_gather %1; %2 = dot %0, %0; %7 = reduce_scatter %2; %4 = dot %2, %3; ...`

A block's arithmetic keeps its order; its collectives move up, with the cheap ops that feed them.

- What makes nothing larger (reductions, exchanges) starts as soon as its operand is there: a
  gradient's sum does not wait for the optimizer that reads it, and takes no more memory meanwhile.
- A gather, or an exchange of what was there from the start (a weight), starts as late as it can be
  hidden behind the arithmetic in front of its first use, after the gathers over the same links
  that are needed before it. It never starts before the use of the
  gather that is so many places (`prefetch`) ahead of it, nor before a loop: that bounds the memory.

Predictions of time and memory go by this order. Backends with a latency-hiding scheduler (TPUs;
GPUs with `xla_gpu_enable_latency_hiding_scheduler`) look for one of their own; XLA's CPU backend
schedules for memory alone and comes to the same schedule from any order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import Role
from spmd.ir.program import Op, OpKind, Program, Region, Value, reads
from spmd.lowering.rewrites.clock import Clock, Room

_NEVER = float("inf")


class _Traits(NamedTuple):
    """What the order depends on for a kind of op: collectives move up, and cheap ops with them."""

    is_cheap: bool  # whether it is computed inside its readers, or only another name
    can_move: bool
    grows: bool  # whether it is a collective that makes more than it takes
    links: frozenset[int]  # the atoms over which a collective runs


def order(program: Program, clock: Clock, prefetch: int, room: Room) -> Program:
    """Issues collectives early, at most `prefetch` gathers over the same links ahead of their use.

    The given order stays if the new one does not fit in `room` and needs more memory.
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
    """Returns each op's place in the new order: 2.5 is behind op 2 and in front of op 3."""
    ops, starts = region.ops, clock.starts(region)
    of_kind: dict[OpKind, _Traits] = {}
    for kind in dict.fromkeys(op.kind for op in ops):
        is_cheap, moves = kind.about.role in (Role.INSIDE, Role.ALIAS), bool(kind.about.collective)
        grows = moves and kind.results[0].bytes > kind.operands[0].bytes
        links = frozenset(kind.attrs.get("axes", ()))
        of_kind[kind] = _Traits(is_cheap, is_cheap or moves, grows, links)
    traits = [of_kind[op.kind] for op in ops]

    # `ready`: the last op in front of each op that it must stay behind; -1 if there is none. Cheap
    # ops and collectives that make its operands move along with it, so what makes theirs counts.
    ready: list[int] = []
    made: dict[Value, int] = {}
    for i, (op, its) in enumerate(zip(ops, traits, strict=True)):
        ready.append(max([made.get(v, -1) for v in op.operands], default=-1))
        made.update((v, ready[i] if its.can_move else i) for v in op.results)
    # Whether its result takes memory from when it starts: it is a collective that makes more than
    # it takes, or of something that is kept in any case.
    is_gather = [
        its.grows or (bool(op.collective) and last < 0)
        for op, its, last in zip(ops, traits, ready, strict=True)
    ]
    earliest = _earliest(ops, traits, is_gather, prefetch)

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
    for i, op in reversed(list(enumerate(ops))):
        place = min([found[i], *(needed.get(v, _NEVER) for v in op.results)])
        use = min([used.get(v, _NEVER) for v in op.results], default=_NEVER)
        if is_gather[i]:
            # As late as the arithmetic in front of its use still hides it. Later gathers were
            # placed first, and keep the links busy from `links_free` on: this one has to end by
            # then. Its place is in front of the op that runs when it has to start.
            links, reader = traits[i].links, math.ceil(min(use, len(ops) - 1))
            end = min(starts[max(0, reader)], links_free.get(links, _NEVER))
            links_free[links] = start = end - clock.exchange(op)
            wanted = max(bisect_right(starts, start) - 1.5, float(earliest[i]))
            place = min(place, max(wanted, ready[i] + 0.5))
        elif op.collective:
            place = min(place, ready[i] + 0.5)
        found[i] = place
        use = use if traits[i].is_cheap else place
        for v in reads(op):
            needed[v] = min(place, needed.get(v, _NEVER))
            used[v] = min(use, used.get(v, _NEVER))
    return found


def _earliest(
    ops: Sequence[Op], traits: Sequence[_Traits], is_gather: Sequence[bool], prefetch: int
) -> dict[int, int]:
    """Returns, for each gather, the op that it must not start in front of; -1 if there is none.

    That is the later one of the last loop before it and the use of the gather `prefetch` uses
    before.
    """
    # Gathers over the same links with uses at ops 4, 8 and 12, and prefetch = 2: the third one
    # waits for op 4. At most two of their results exist at any time.
    loop, loops = -1, []
    for i, op in enumerate(ops):
        loop = i if op.regions else loop
        loops.append(loop)
    used: dict[Value, int] = {}
    gathers: dict[frozenset[int], list[tuple[int, int]]] = {}
    for i, op in reversed(list(enumerate(ops))):
        use = i
        if traits[i].can_move:
            use = min([used.get(v, len(ops)) for v in op.results], default=i)
        if is_gather[i]:
            gathers.setdefault(traits[i].links, []).append((use, i))
        for v in reads(op):
            used[v] = min(use, used.get(v, len(ops)))
    found = {}
    for uses in gathers.values():
        in_order = sorted(uses)
        for number, (_, i) in enumerate(in_order):
            before = in_order[number - prefetch][0] if number >= prefetch else -1
            found[i] = max(loops[i], before)
    return found
