"""What a loop collects, one piece in each trip, and a later loop reads again piece by piece.

    %5 = while(%i = 0, %a = zeros) { %p = tanh ...; return %i + 1, dynamic_update_slice %a, %p, %i }
    %9 = while(%j = 3, %c = %5) { %q = dynamic_slice %c, %j; ...; return %j - 1, %c }

So the gradient of a scan keeps what its forward loop made: %q in one loop is %p in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import Index, integer_of
from spmd.ir.description import CONVERT, DYNAMIC_SLICE, SCATTER, SUBTRACT, Role
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.types import numpy_dtype
from spmd.predict.fusion import is_untouched


class Residual(NamedTuple):
    """Pieces of one value, in carries of the forward and the backward loop by number.

    `piece` is what the forward loop writes in each trip, `slices` are the ops that read one.
    """

    written: int
    read: int
    piece: Value
    slices: tuple[Op, ...]


class Pair(NamedTuple):
    """Two loops with stacks between them."""

    forward: Op
    backward: Op
    trips: int  # how often the forward loop runs: the length of every stack
    # place, read_at: where the forward loop's body writes, and the backward one's reads
    place: Value
    read_at: Value
    stacks: tuple[Residual, ...]


def has_pairs(program: Program) -> bool:
    """Whether any loop of a program collects what a later one reads."""
    index = Index(program)
    regions = (region for op in program.walk() for region in op.regions)
    return any(pairs_of(region, index) for region in (program.body, *regions))


def pairs_of(region: Region, index: Index) -> list[Pair]:
    """The pairs of loops of a region; no loop is in two of them."""
    loops = {op.results[0]: op for op in region.ops if op.is_loop and op.results}
    found: list[Pair] = []
    taken: set[Value] = set()
    for forward in loops.values():
        pairs = [] if forward.results[0] in taken else _between(forward, loops, index)
        pair = next((pair for pair in pairs if pair.backward.results[0] not in taken), None)
        if pair is not None:
            found.append(pair)
            taken.update((forward.results[0], pair.backward.results[0]))
    return found


def _between(forward: Op, loops: Mapping[Value, Op], index: Index) -> list[Pair]:
    """The pairs of a loop and one that reads its stacks, those with the most stacks first."""
    types = index.program.types
    found: dict[tuple[Value, Value, Value], list[Residual]] = {}
    for number in range(len(forward.results)):
        written = _written(forward, number, index)
        reader = _reader(forward.results[number], loops, index)
        if written is None or reader is None:
            continue
        (update, place), (backward, read) = written, reader
        slices = _slices(backward, read, index)
        places = {op.operands[1] for op in slices}
        if len(places) == 1:
            at = places.pop()
            ends = _ends(backward, at, index)
            last = update.kind.results[0].shape[0] - 1
            # The one place stands for the other where what is read is made again.
            if ends and min(ends) >= 0 and max(ends) <= last and types[place] == types[at]:
                stack = Residual(number, read, update.operands[1], slices)
                found.setdefault((backward.results[0], place, at), []).append(stack)
    trips = index.trips[forward.results[0]] or 0
    pairs = [
        Pair(forward, loops[backward], trips, place, at, tuple(stacks))
        for (backward, place, at), stacks in found.items()
    ]
    return sorted(pairs, key=lambda pair: -len(pair.stacks))


def _written(loop: Op, number: int, index: Index) -> tuple[Op, Value] | None:
    """The update that fills a carry, one place after the other, and the value that says where."""
    body = loop.regions[1]
    carry = body.args[number]
    update = index.producers.get(body.results[number])
    if update is None or update.name == SCATTER or update.kind.about.role != Role.UPDATE:
        return None
    if update.operands[0] != carry or index.users.get(loop.regions[0].args[number]):
        return None
    # Nobody may look at the stack while it is filled.
    if any(len(index.users[value]) != 1 for value in (carry, update.results[0])):
        return None
    shape, piece = (t.shape for t in update.kind.operands[:2])
    place = update.operands[2]
    if piece != (1, *shape[1:]):
        return None
    ends = _ends(loop, place, index)
    fills = ends and sorted(ends) == [0, shape[0] - 1] and index.trips[loop.results[0]] == shape[0]
    return (update, place) if fills else None


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
        op for op, place in uses if op is not None and op.name == DYNAMIC_SLICE and place == 0
    )
    for op in ops:
        shape = op.kind.operands[0].shape
        if op.kind.results[0].shape != (1, *shape[1:]):
            return ()
    own = {op.results[0] for op in body.ops if op.results}
    inside = all(op.results[0] in own for op in ops)
    # The carry is handed on by the body's return as well.
    return ops if inside and len(uses) == len(ops) + 1 else ()


def _ends(loop: Op, value: Value, index: Index) -> tuple[int, int] | None:
    """An integer of a loop's body in the first trip and in the last; trips change it evenly."""
    trips = index.trips.get(loop.results[0])
    if not trips:
        return None
    first, last = (_in_trip(trip, loop, value, index) for trip in (0, trips - 1))
    return None if first is None or last is None else (first, last)


def _in_trip(trip: int, loop: Op, value: Value, index: Index) -> int | None:
    """An integer of a loop's body, made of constants and the count of trips; None if unknown."""
    dtype = numpy_dtype(index.program.types[value].dtype)
    if not np.issubdtype(dtype, np.integer):
        return None
    if value in loop.regions[1].args:
        found = _counter(trip, loop, loop.regions[1].args.index(value), index)
    else:
        found, op = integer_of(index.producers, value), index.producers.get(value)
        if found is None and op is not None and (op.name == CONVERT or _sign(op)):
            match [_in_trip(trip, loop, v, index) for v in op.operands]:
                case [int(a)]:
                    found = a
                case [int(a), int(b)]:
                    found = a + _sign(op) * b
    limits = np.iinfo(dtype)
    return found if found is not None and limits.min <= found <= limits.max else None


def _counter(trip: int, loop: Op, number: int, index: Index) -> int | None:
    """A carry that begins at a constant and grows by a constant."""
    body = loop.regions[1]
    begin = integer_of(index.producers, loop.operands[number])
    if begin is None or is_untouched(loop, number):
        return begin
    step, carry = index.producers.get(body.results[number]), body.args[number]
    if step is None or not _sign(step) or carry not in step.operands:
        return None
    others = [v for v in step.operands if v != carry]
    by = integer_of(index.producers, others[0]) if len(others) == 1 else None
    if by is None or (_sign(step) < 0 and step.operands[1] == carry):
        return None
    return begin + _sign(step) * by * trip


def _sign(op: Op) -> int:
    """1 for a sum, -1 for a difference, 0 for anything else."""
    about = op.kind.about
    is_sum = about.reducer == "add" and about.is_elementwise
    return 1 if is_sum else -1 if op.name == SUBTRACT else 0
