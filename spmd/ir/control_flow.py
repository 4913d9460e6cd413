"""How values flow through a program: loop carries, trip counts, producers, users and manual atoms.

`Index` has these as tables of one program, each computed when it is first read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmd.ir.description import CONSTANT, CONVERT, FROM_MANUAL, SUBTRACT
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.types import numpy_dtype

UNKNOWN_TRIPS = 16  # assumed trip count of a loop whose condition doesn't tell it


class Tie(NamedTuple):
    """A `result` of an op with regions and values sharded like it; loops alone have a `source`."""

    source: Value | None  # the initial value of a loop's carry; None for other ops
    inside: tuple[Value, ...]  # of a loop: arguments of condition and body, next value
    result: Value  # of the op


def ties(op: Op) -> tuple[Tie, ...]:
    """Returns a `Tie` for each result of an op with regions (a loop, branch or manual region)."""
    # %2 = while %0 { cond(%3): ...; body(%4): ... return %5 } ties %0, %3, %4, %5 and %2: they are
    # one buffer in memory, and a sharding that changed on the way round would cost each iteration.
    # A branch has no arguments: it reads what is around it, where nothing has to be shared.
    if op.is_loop:
        cond, body = op.regions
        inside = zip(cond.args, body.args, body.results, strict=True)
        return tuple(map(Tie, op.operands, inside, op.results))
    return tuple(
        Tie(None, tuple(branch.results[i] for branch in op.regions), result)
        for i, result in enumerate(op.results)
    )


def integer_of(producers: Mapping[Value, Op], value: Value) -> int | None:
    """Returns the integer of an integer scalar constant, also of a converted one; else None."""
    op = producers.get(value)
    if op is None:
        return None
    if op.name == CONVERT:
        return integer_of(producers, op.operands[0])
    if op.name != CONSTANT or op.kind.results[0].rank:
        return None
    element = op.kind.attrs["value"].array()
    return int(element) if np.issubdtype(element.dtype, np.integer) else None


def sign_of(op: Op) -> int:
    """Returns 1 for an op that adds two operands, -1 for one that subtracts, 0 for any other."""
    about = op.kind.about
    is_sum = about.reducer == "add" and about.is_elementwise
    return 1 if is_sum else -1 if op.name == SUBTRACT else 0


@dataclass(frozen=True, eq=False)
class Index:
    """Tables of one program's values, each made when first read: `index.producers[value]`."""

    program: Program

    @cached_property
    def producers(self) -> dict[Value, Op]:
        """Maps each value to the op whose result it is; arguments have no entry."""
        return {result: op for op in self.program.walk() for result in op.results}

    @cached_property
    def users(self) -> dict[Value, list[tuple[Op | None, int]]]:
        """Maps each read value to its uses: (op, operand index), (None, i) as region's result i."""
        users: dict[Value, list[tuple[Op | None, int]]] = {}

        def visit(region: Region) -> None:
            for op in region.ops:
                for i, value in enumerate(op.operands):
                    users.setdefault(value, []).append((op, i))
                for inner in op.regions:
                    visit(inner)
            for i, value in enumerate(region.results):
                users.setdefault(value, []).append((None, i))

        visit(self.program.body)
        return users

    @cached_property
    def held(self) -> dict[Value, tuple[int, ...]]:
        """Maps each value inside manual regions (`shard_map`) to the atoms that are manual there.

        Other values have no entry. Devices may hold different values along such atoms, unseen by
        the compiler: only ops that the user wrote may split or reduce the value over them.
        """
        found: dict[Value, tuple[int, ...]] = {}

        def visit(region: Region, held: tuple[int, ...], outer: tuple[int, ...]) -> None:
            found.update((v, held) for v in region.args if held)
            for op in region.ops:
                if not held and not op.regions:
                    continue
                is_manual = op.kind.about.region == "manual"
                around = (held + op.kind.attrs["axes"], held) if is_manual else (held, outer)
                for inner in op.regions:
                    visit(inner, *around)
                own = outer if op.name == FROM_MANUAL else held
                found.update((v, own) for v in op.results if own)

        visit(self.program.body, (), ())
        return found

    @cached_property
    def trips(self) -> Mapping[Value, int | None]:
        """Maps the first result of each loop to its trip count, None if that is not known."""
        loops = (op for op in self.program.walk() if op.is_loop)
        return {op.results[0]: self._trip_count(op) for op in loops if op.results}

    def runs(self, op: Op) -> int:
        """Returns a loop's trip count, `UNKNOWN_TRIPS` if that is not known; 1 for any other op."""
        if not op.is_loop:
            return 1
        trips = self.trips.get(op.results[0])
        return UNKNOWN_TRIPS if trips is None else trips

    def step(self, loop: Op, number: int) -> int | None:
        """Returns by how much a loop's carry grows in each trip; None if not by a constant."""
        body = loop.regions[1]
        carry, after = body.args[number], body.results[number]
        op = self.producers.get(after)
        if op is None or not (sign := sign_of(op)) or carry not in op.operands:
            return 0 if after == carry else None
        others = [v for v in op.operands if v != carry]
        by = integer_of(self.producers, others[0]) if len(others) == 1 else None
        return None if by is None or (sign < 0 and op.operands[1] == carry) else sign * by

    def _trip_count(self, op: Op) -> int | None:
        """Returns how often `while i < n` with constant start, step and `n` runs; else None."""
        cond = op.regions[0]
        if len(cond.results) != 1:
            return None
        test = self.producers.get(cond.results[0])
        direction = "" if test is None else str(test.kind.attrs.get("comparison_direction", ""))
        if test is None or "LT" not in direction or test.operands[0] not in cond.args:
            return None
        index = cond.args.index(test.operands[0])
        start = integer_of(self.producers, op.operands[index])
        end = integer_of(self.producers, test.operands[1])
        step = self.step(op, index)
        if start is None or end is None or step is None or step <= 0:
            return None
        trips = max(0, -((start - end) // step))  # rounded up: 0, 3, 6 for i < 7
        # What would count past the largest integer goes on from the smallest one.
        largest = np.iinfo(numpy_dtype(test.kind.operands[0].dtype)).max
        return trips if start + trips * step <= largest else None
