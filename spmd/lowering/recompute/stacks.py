"""What a loop collects, one piece in each trip, and a later loop reads again piece by piece.

    %5 = while(%i = 0, %a = zeros) { %p = tanh ...; return %i + 1, dynamic_update_slice %a, %p, %i }
    %9 = while(%j = 3, %c = %5) { %q = dynamic_slice %c, %j; ...; return %j - 1, %c }

So the gradient of a scan keeps what its forward loop made: %q in one loop is %p in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import integer_of
from spmd.ir.description import Role
from spmd.ir.index import Index
from spmd.ir.program import Op, Region, Value
from spmd.predict.fusion import is_untouched


class Stack(NamedTuple):
    """Pieces of one value.

    Attributes:
      written: the number of the forward loop's carry.
      read: the number of the backward loop's carry.
      piece: what the forward loop writes in each trip.
      slices: the ops of the backward loop that read one piece.
    """

    written: int
    read: int
    piece: Value
    slices: tuple[Op, ...]


class Pair(NamedTuple):
    """Two loops with stacks between them.

    Attributes:
      forward, backward: the loops.
      trips: how often the forward loop runs: the length of every stack.
      place: in the forward loop's body, where it writes.
      read_at: in the backward loop's body, where it reads.
      stacks: what lies between them.
    """

    forward: Op
    backward: Op
    trips: int
    place: Value
    read_at: Value
    stacks: tuple[Stack, ...]


def pairs_of(region: Region, index: Index) -> list[Pair]:
    """The pairs of loops of a region; no loop is in two of them.

    Args:
      region: of the program that the index is of.
      index: lookups.
    """
    loops = {op.results[0]: op for op in region.ops if op.is_loop and op.results}
    found: list[Pair] = []
    taken: set[Value] = set()
    for forward in loops.values():
        if forward.results[0] in taken:
            continue
        for backward, place, read_at, stacks in _between(forward, loops, index):
            if backward.results[0] not in taken:
                trips = index.trips[forward.results[0]] or 0
                found.append(Pair(forward, backward, trips, place, read_at, stacks))
                taken.update((forward.results[0], backward.results[0]))
                break
    return found


def _between(
    forward: Op, loops: Mapping[Value, Op], index: Index
) -> list[tuple[Op, Value, Value, tuple[Stack, ...]]]:
    """The loops that read a loop's stacks, those with the most stacks first."""
    found: dict[tuple[Value, Value, Value], list[Stack]] = {}
    for number in range(len(forward.results)):
        piece = _written(forward, number, index)
        reader = _reader(forward.results[number], loops, index)
        if piece is None or reader is None:
            continue
        (update, place), (backward, read) = piece, reader
        slices = _slices(backward, read, index)
        places = {op.operands[1] for op in slices}
        if len(places) == 1:
            at = places.pop()
            within = _places(backward, at, index)
            if within is not None and set(within) <= set(range(update.kind.results[0].shape[0])):
                stack = Stack(number, read, update.operands[1], slices)
                found.setdefault((backward.results[0], place, at), []).append(stack)
    order = sorted(found.items(), key=lambda item: -len(item[1]))
    return [(loops[key[0]], key[1], key[2], tuple(stacks)) for key, stacks in order]


def _written(loop: Op, number: int, index: Index) -> tuple[Op, Value] | None:
    """The update that fills a carry, one place after the other, and the value that says where."""
    body = loop.regions[1]
    carry = body.args[number]
    update = index.producers.get(body.results[number])
    if update is None or update.kind.about.is_scatter or update.kind.about.role != Role.UPDATE:
        return None
    if update.operands[0] != carry or not _is_only_read_by(carry, (update,), index):
        return None
    if index.users.get(loop.regions[0].args[number]):
        return None
    shape, piece = (t.shape for t in update.kind.operands[:2])
    place = update.operands[2]
    if piece != (1, *shape[1:]):
        return None
    places = _places(loop, place, index)
    fills = places is not None and sorted(places) == list(range(shape[0]))
    return (update, place) if fills else None


def _is_only_read_by(value: Value, ops: Sequence[Op], index: Index) -> bool:
    return all(any(user is op for op in ops) for user, _ in index.users.get(value, ()))


def _reader(value: Value, loops: Mapping[Value, Op], index: Index) -> tuple[Op, int] | None:
    """The loop that alone reads a value and hands it on as it is, and the number of its carry."""
    uses = index.users.get(value, ())
    if len(uses) != 1:
        return None
    (op, number) = uses[0]
    if op is None or not op.is_loop or not is_untouched(op, number):
        return None
    if loops.get(op.results[0]) is not op or index.users.get(op.results[number]):
        return None
    return None if index.users.get(op.regions[0].args[number]) else (op, number)


def _slices(loop: Op, number: int, index: Index) -> tuple[Op, ...]:
    """The ops that read one piece each of a carry; none if anything else reads it."""
    body = loop.regions[1]
    uses = index.users.get(body.args[number], ())
    ops = tuple(
        op for op, place in uses if op is not None and op.kind.about.is_dynamic_slice and place == 0
    )
    for op in ops:
        shape = op.kind.operands[0].shape
        if op.kind.results[0].shape != (1, *shape[1:]):
            return ()
    own = {op.results[0] for op in body.ops if op.results}
    inside = all(op.results[0] in own for op in ops)
    # The carry is handed on by the body's return as well.
    return ops if inside and len(uses) == len(ops) + 1 else ()


def _places(loop: Op, value: Value, index: Index) -> list[int] | None:
    """A scalar of a loop's body in each trip, where that can be told."""
    trips = index.trips.get(loop.results[0])
    if not trips:
        return None
    found = _Counted(loop, trips, index).of(value)
    return None if found is None else [int(i) for i in np.broadcast_to(found, (trips,))]


class _Counted:
    """Integers of a loop's body, all trips at once, from what counts the trips."""

    def __init__(self, loop: Op, trips: int, index: Index) -> None:
        self.loop, self.trips, self.index = loop, trips, index

    def of(self, value: Value) -> np.ndarray | None:
        body = self.loop.regions[1]
        if value in body.args:
            return self.counter(body.args.index(value))
        op = self.index.producers.get(value)
        if op is None or op.regions or op.kind.results[0].rank:
            return None
        if op.kind.about.is_constant:
            known = integer_of(self.index.producers, value)
            return None if known is None else np.array(known)
        if op.kind.about.is_convert:
            return self.of(op.operands[0])
        sign = _sign(op)
        if not sign:
            return None
        left, right = (self.of(operand) for operand in op.operands)
        return None if left is None or right is None else left + sign * right

    def counter(self, number: int) -> np.ndarray | None:
        """A carry that begins at a constant and grows by a constant."""
        body = self.loop.regions[1]
        begin = integer_of(self.index.producers, self.loop.operands[number])
        step = self.index.producers.get(body.results[number])
        if body.results[number] == body.args[number]:
            return None if begin is None else np.array(begin)
        if begin is None or step is None or body.args[number] not in step.operands:
            return None
        others = [v for v in step.operands if v != body.args[number]]
        by = integer_of(self.index.producers, others[0]) if len(others) == 1 else None
        sign = _sign(step)
        if by is None or not sign or (sign < 0 and step.operands[1] == body.args[number]):
            return None
        return begin + sign * by * np.arange(self.trips)


def _sign(op: Op) -> int:
    """1 for a sum, -1 for a difference, 0 for anything else."""
    about = op.kind.about
    is_sum = about.reducer == "add" and about.is_elementwise
    return 1 if is_sum else -1 if about.is_difference else 0
