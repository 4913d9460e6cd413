"""Which values and ops of a local program are in halves, once some of its arguments are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spmd.ir.program import Op, Program, Region, Value
from spmd.lowering.halves.cut import Cut, Halving, halving


class InHalves(NamedTuple):
    """What is in halves.

    Attributes:
      cuts: values -> how they are cut; all others are whole.
      ops: an op's first result -> how it is computed in halves; all others are computed once.
    """

    cuts: dict[Value, Cut]
    ops: dict[Value, Halving]


def find(program: Program, arguments: Mapping[Value, Cut]) -> InHalves:
    """Follows what is cut forward through a program.

    Args:
      program: a local program.
      arguments: those of its arguments that are cut.
    """
    run = _Finder(dict(arguments))
    run.region(program.body)
    return InHalves(run.cuts, run.ops)


class _Finder:
    def __init__(self, cuts: dict[Value, Cut]) -> None:
        self.cuts = cuts
        self.ops: dict[Value, Halving] = {}

    def set(self, value: Value, cut: Cut | None) -> None:
        if cut is None:
            self.cuts.pop(value, None)
        else:
            self.cuts[value] = cut

    def region(self, region: Region) -> None:
        for op in region.ops:
            if op.is_loop:
                self.loop(op)
            elif op.regions:
                for inner in op.regions:
                    self.region(inner)
            else:
                self.op(op)

    def op(self, op: Op) -> None:
        # A loop's body is looked at several times: what was found before is dropped.
        for value in op.results:
            self.cuts.pop(value, None)
            self.ops.pop(value, None)
        if op.kind.about.is_barrier:
            for value, result in zip(op.operands, op.results, strict=True):
                self.set(result, self.cuts.get(value))
            return
        if not op.results:
            return
        for i, value in enumerate(op.operands):
            cut = self.cuts.get(value)
            how = halving(op.kind, i, cut) if cut else None
            if how is not None:
                self.ops[op.results[0]] = how
                for result, cut in zip(op.results, how.results, strict=True):
                    self.set(result, cut)
                return

    def loop(self, op: Op) -> None:
        """A carry is in halves if all that becomes it is, or can be: what enters can be cut."""
        # Each carry goes from whole to halves, if it enters or comes back so, and from there to
        # whole for good, if it does not come back as it entered. So this ends.
        condition, body = op.regions
        carried = [self.cuts.get(value) for value in op.operands]
        for_good: set[int] = set()
        while True:
            for i, cut in enumerate(carried):
                self.set(condition.args[i], cut)
                self.set(body.args[i], cut)
            self.region(condition)
            self.region(body)
            changed = False
            for i, value in enumerate(body.results):
                back = self.cuts.get(value)
                if back == carried[i] or i in for_good:
                    continue
                changed = True
                if carried[i] is not None:
                    for_good.add(i)
                    back = None
                carried[i] = back
            if not changed:
                break
        for value, cut in zip(op.results, carried, strict=True):
            self.set(value, cut)
