"""Rewrite: a program in halves, so that exchanges of one half run beside products of the other.

before: `%2 = dot %0, %1; %3 = all_reduce %2; %5 = dot %3, %4; return %5`      (rows of %0 are cut)
after:  `%6 = slice %0 [0:4]; %7 = slice %0 [4:8]; %8 = dot %6, %1; %9 = dot %7, %1`
        `%10 = all_reduce %8; %11 = all_reduce %9; %12 = dot %10, %4; %13 = dot %11, %4`
        `return concatenate %12, %13`

The exchange of %8 runs while %9 is computed, and that of %9 while %12 is. What reduces along the
dim that is cut makes two terms, which are added at once; what cannot be computed in halves gets its
operands joined. Prior art: Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via
Generic Tensor Slicing and Overlapping".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.ir.dead import remove_dead
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import REDUCER_OPS
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.lowering.halves.cut import Cut, Halving, halving, lowered
from spmd.lowering.halves.find import InHalves, find


def in_halves(
    program: Program, arguments: Mapping[Value, Cut]
) -> tuple[Program, Mapping[Value, int]]:
    """Writes a local program in halves, op by op in turn (`interleave` orders them).

    Args:
      program: a local program.
      arguments: those of its arguments that are cut, with dims that have halves.

    Returns:
      The program; and of each value that is made for one half, which one it is, 0 or 1.
    """
    writer = _Writer(program, find(program, arguments))
    return remove_dead(writer.run()), writer.half_of


class _Writer:
    """Writes the program anew.

    Attributes:
      whole: old values -> the new ones, whole.
      halves: old values -> the new ones, in halves.
      makers: old values -> the ops that make them.
      half_of: new values of one half -> which one it is.
    """

    def __init__(self, program: Program, found: InHalves) -> None:
        self.program, self.found = program, found
        self.b = Builder()
        self.whole: dict[Value, Value] = {}
        self.halves: dict[Value, tuple[Value, Value]] = {}
        self.makers: dict[Value, Op] = {}
        self.half_of: dict[Value, int] = {}

    def run(self) -> Program:
        """The whole program in halves."""
        old, b = self.program, self.b
        args = [self.bound(value) for value in old.body.args]
        b.begin(isolated=True)
        for value in old.body.args:
            if value in self.found.cuts:
                self.halves[value] = self.found.cuts[value].take(b, self.whole[value])
        self.ops(old.body)
        body = b.end(args, [self.get(value) for value in old.body.results])
        return old._replace(body=body, types=tuple(b.types))

    # Values.

    def bound(self, value: Value) -> Value:
        """A new value for an argument that is whole."""
        self.whole[value] = self.b.value(self.program.types[value])
        return self.whole[value]

    def get(self, value: Value) -> Value:
        """A value, whole."""
        found = self.whole.get(value)
        if found is not None:
            return found
        join = self.found.cuts[value].join
        return self.b.once(("joined", value), lambda: join(self.b, self.halves[value]))

    def both(self, value: Value, cut: Cut | None) -> tuple[Value, Value]:
        """The halves of a value; twice the same where both are the whole."""
        if cut is None:
            return self.get(value), self.get(value)
        if self.found.cuts.get(value) == cut:
            return self.halves[value]
        one, two = self.b.once(("halves", value, cut), lambda: self.taken(value, cut))
        return one, two

    def taken(self, value: Value, cut: Cut) -> tuple[Value, ...]:
        """The halves of a value that is whole, or cut otherwise."""
        maker = self.makers.get(value)
        if maker is not None:  # both halves of a mask that is the same everywhere are one value
            how = halving(maker.kind, len(maker.operands), cut)
            if how is not None and not any(how.operands):
                operands = [self.get(v) for v in maker.operands]
                (half,) = lowered(self.b, maker, how, operands)
                return half, half
        return cut.take(self.b, self.get(value))

    # Ops.

    def ops(self, region: Region) -> None:
        for op in region.ops:
            self.b.loc = op.loc
            how = self.found.ops.get(op.results[0]) if op.results else None
            if op.is_loop:
                self.loop(op)
            elif op.regions:
                self.branches(op)
            elif how is not None:
                self.twice(op, how)
            elif op.kind.about.is_barrier:
                self.barrier(op)
            else:
                self.keep(op, self.b.repeat(op.kind, tuple(map(self.get, op.operands))))

    def keep(self, op: Op, results: Sequence[Value]) -> None:
        self.whole.update(zip(op.results, results, strict=True))
        if len(op.results) == 1:
            self.makers[op.results[0]] = op

    def twice(self, op: Op, how: Halving) -> None:
        """An op for each half, and the reduction of what it reduces along the dim."""
        pairs = [self.both(*each) for each in zip(op.operands, how.operands, strict=True)]
        first = lowered(self.b, op, how, [pair[0] for pair in pairs])
        rest = [pair[1] for pair in pairs]
        if how.continues:
            rest[: len(first)] = first
        second = lowered(self.b, op, how, rest, 1)
        self.half_of.update(dict.fromkeys(first, 0) | dict.fromkeys(second, 1))
        for value, cut, one, two in zip(op.results, how.results, first, second, strict=True):
            if cut is not None:
                self.halves[value] = one, two
            elif how.continues:
                self.whole[value] = two
            else:
                name = REDUCER_OPS[how.reduction]
                (self.whole[value],) = self.b.op(name, (one, two), (self.b.types[one],))

    def barrier(self, op: Op) -> None:
        """One for each half, so that neither waits for the other; what is whole joins the first."""
        pairs = [self.both(v, self.found.cuts.get(v)) for v in op.operands]
        firsts = self.b.barrier([pair[0] for pair in pairs])
        parts = [two for one, two in pairs if one != two]
        seconds = iter(self.b.barrier(parts) if parts else ())
        for value, (one, two), first in zip(op.results, pairs, firsts, strict=True):
            if one == two:
                self.whole[value] = first
            else:
                self.halves[value] = first, next(seconds)

    def loop(self, op: Op) -> None:
        """Each carry in halves becomes two."""
        cuts = [self.found.cuts.get(value) for value in op.results]

        def flat(values: Sequence[Value]) -> tuple[Value, ...]:
            found: list[Value] = []
            for value, cut in zip(values, cuts, strict=True):
                found += self.both(value, cut) if cut else (self.get(value),)
            return tuple(found)

        operands = flat(op.operands)
        types = tuple(self.b.types[v] for v in operands)
        regions = []
        for is_body, old in enumerate(op.regions):
            args = tuple(self.b.value(t) for t in types)
            self.deal(old.args, cuts, args)
            self.b.begin(isolated=True)
            self.ops(old)
            results = flat(old.results) if is_body else tuple(map(self.get, old.results))
            regions.append(self.b.end(args, results))
        self.b.loc = op.loc
        kind = OpKind(op.name, types, types, op.kind.attrs)
        self.deal(op.results, cuts, self.b.repeat(kind, operands, tuple(regions)))

    def deal(
        self, values: Sequence[Value], cuts: Sequence[Cut | None], made: Sequence[Value]
    ) -> None:
        """Notes what a loop's carries have become: one value each, or two halves where it is cut.

        Args:
          values: the carries of the old loop.
          cuts: for each, how it is cut; None for what stays whole.
          made: the new values, in order.
        """
        each = iter(made)
        for value, cut in zip(values, cuts, strict=True):
            if cut is None:
                self.whole[value] = next(each)
            else:
                self.halves[value] = next(each), next(each)

    def branches(self, op: Op) -> None:
        """Branches read what is around them, and give whole values."""
        operands = tuple(map(self.get, op.operands))
        regions = []
        for old in op.regions:
            self.b.begin()
            self.ops(old)
            regions.append(self.b.end((), tuple(map(self.get, old.results))))
        self.b.loc = op.loc
        self.keep(op, self.b.repeat(op.kind, operands, tuple(regions)))
