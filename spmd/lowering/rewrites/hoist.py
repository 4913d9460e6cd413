"""Rewrite: what a loop exchanges in each iteration, though it never changes, is exchanged once.

before: `while(%0) { body(%1): ...; %2 = all_gather %1; ...; return %1 }`
after:  `%3 = all_gather %0; while(%0, %3) { body(%1, %2): ...; return %1, %2 }`

The loop hands the operand on as it is, perhaps converted, transposed or reshaped on the way to the
exchange. Its result becomes one more carry, which takes memory as long as the loop runs: where
the device has not got that much left, the exchange stays. (Which carries are split is the plan's
choice, with prices for memory; this finds what is exchanged inside whatever it chose.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from spmd.ir.carries import Carry, recarried
from spmd.ir.dialect.builder import Builder
from spmd.ir.index import Index
from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.lowering.rewrites.clock import Room
from spmd.lowering.rewrites.moves import is_move
from spmd.predict.fusion import is_untouched


def hoist(program: Program, room: Room) -> Program:
    """Moves collectives of loop-invariant operands in front of their loop.

    Args:
      program: a local program.
      room: the memory of one device.
    """
    if not any(op.is_loop for op in program.walk()):
        return program
    run = _Hoist(program, room)
    body = run.region(program.body)
    return program._replace(types=tuple(run.b.types), body=body)


class _Hoist:
    def __init__(self, program: Program, room: Room) -> None:
        self.program, self.room = program, room
        self.trips = Index(program).trips
        self.taken = 0
        self.b = Builder(program.types)

    @cached_property
    def left(self) -> int:
        """Bytes that the program left free before anything was hoisted."""
        return self.room.left(self.program)

    def region(self, old: Region) -> Region:
        """A block with the invariant exchanges of its loops in front of them, inner loops first."""
        self.b.begin(isolated=True)
        for op in old.ops:
            if op.regions:
                op = op._replace(regions=tuple(map(self.region, op.regions)))
            if op.is_loop and self.trips[op.results[0]] not in (0, 1):
                op = self.relieved(op)
            self.b.append(op)
        return self.b.end(old.args, old.results)

    def relieved(self, loop: Op) -> Op:
        """The loop without its invariant exchanges, which go in front of it."""
        # `outside` says what an invariant value of the body is in front of the loop, `moves` which
        # ops make an invariant value without an exchange. While (%0) with body(%1):
        #
        #   %2 = convert %1        moves {%2}: it is copied in front only if an exchange needs it
        #   %3 = all_gather %2     in front: %8 = convert %0; %9 = all_gather %8
        #                          outside {%1: %0, %3: %9}, hoisted {%3: %9}
        #   %4 = transpose %3      moves {%4}: an exchange of %4 could follow it out
        body = loop.regions[1]
        outside = {
            argument: loop.operands[i]
            for i, argument in enumerate(body.args)
            if is_untouched(loop, i)
        }
        moves: dict[Value, Op] = {}
        hoisted: dict[Value, Value] = {}
        for op in body.ops:
            if len(op.operands) != 1 or len(op.results) != 1:
                continue
            (operand,), (result,) = op.operands, op.results
            if operand not in outside and operand not in moves:
                continue
            if is_move(op.kind):
                moves[result] = op
            elif op.collective and self.fits(op):
                outside[result] = hoisted[result] = self.outside(op, outside, moves)
        return self.carrying(loop, hoisted) if hoisted else loop

    def fits(self, op: Op) -> bool:
        """Whether there is memory left for a result as long as the loop runs."""
        size = op.kind.results[0].bytes
        if self.taken + size > self.left:
            return False
        self.taken += size
        return True

    def outside(self, op: Op, known: dict[Value, Value], moves: dict[Value, Op]) -> Value:
        """Repeats an op of the body in front of the loop, after the moves that feed it."""
        (operand,) = op.operands
        source = known.get(operand)
        if source is None:
            source = self.outside(moves[operand], known, moves)
        note = f"{op.loc.note} (once, not in each iteration)" if op.collective else ""
        self.b.loc = op.loc._replace(note=note.strip())
        (result,) = self.b.repeat(op.kind, (source,))
        return result

    def carrying(self, loop: Op, hoisted: dict[Value, Value]) -> Op:
        """The loop with one more carry for each hoisted exchange, in place of its result."""
        body = loop.regions[1]
        ops = tuple(op for op in body.ops if hoisted.keys().isdisjoint(op.results))
        read = _read(ops, body.results)
        more = []
        for inner, outer in hoisted.items():
            if inner in read:
                seen, result = (self.b.value(self.b.types[outer]) for _ in range(2))
                more.append(Carry(outer, seen, inner, inner, result))
        loop = loop._replace(regions=(loop.regions[0], body._replace(ops=ops)))
        return recarried(loop, self.b.types, more=more)


def _read(ops: Sequence[Op], results: Sequence[Value]) -> set[Value]:
    """The values that some ops and `results` read; ops whose results nobody reads don't count."""
    read = set(results)
    for op in reversed(ops):
        if op.regions or not read.isdisjoint(op.results) or op.kind.about.has_effect:
            read.update(op.operands, *(free_values(region) for region in op.regions))
    return read
