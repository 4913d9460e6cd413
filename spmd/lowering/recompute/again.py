"""Ops that are done again: what they read, where they stand, what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spmd.ir.program import Loc, Op, Region, Value, reads

AGAIN = "again, rather than held"
"""Note of ops that are done again."""


def again(loc: Loc) -> Loc:
    """The source line of an op, with the note that it is computed a second time there."""
    return loc._replace(note=f"{loc.note} ({AGAIN})" if loc.note else AGAIN)


def reads_inside(op: Op) -> Iterable[Value]:
    """All that an op and the ops inside it read, or hand on."""
    yield from op.operands
    for region in op.regions:
        yield from region.results
        for inner in region.ops:
            yield from reads_inside(inner)


def late(made: Sequence[Op], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Ops in their order, each of some others in front of the first op that reads it."""
    first: dict[Value, int] = {}
    for i, op in reversed(list(enumerate(ops))):
        first.update(dict.fromkeys(reads(op), i))
    places: list[int] = []
    for op in reversed(made):
        place = min((first.get(v, len(ops)) for v in op.results), default=0)
        places.append(place)
        for value in reads(op):
            first[value] = min(first.get(value, place), place)
    waiting = list(zip(reversed(places), made, strict=True))
    waiting.sort(key=lambda item: item[0])
    found: list[Op] = []
    for i, op in enumerate(ops):
        while waiting and waiting[0][0] <= i:
            found.append(waiting.pop(0)[1])
        found.append(op)
    return *found, *(op for _, op in waiting)


def with_operands(op: Op, instead: Mapping[Value, Value]) -> Op:
    """An op that reads other values in the place of some, inside its regions as well."""
    operands = tuple(instead.get(v, v) for v in op.operands)
    regions = tuple(
        Region(
            region.args,
            tuple(with_operands(inner, instead) for inner in region.ops),
            tuple(instead.get(v, v) for v in region.results),
        )
        for region in op.regions
    )
    return op._replace(operands=operands, regions=regions)
