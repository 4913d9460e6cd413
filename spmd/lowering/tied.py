"""Dims that go together: followed through all ops that keep their elements in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spmd.ir.control_flow import ties
from spmd.ir.index import Index
from spmd.ir.program import Op, OpKind, Program, Region, Value

Dim = tuple[Value, int]
"""A value and the number of one of its dims."""

Kept = tuple[tuple[int, int], tuple[int, int]]
"""(operand, dim) and (result, dim) of an op: the operand's dim becomes the result's."""


class TiedDims:
    """Classes of dims, each with one dim that stands for it.

    Args:
      program: a local program.
      kept: which dims an op of a kind ties.
    """

    def __init__(self, program: Program, kept: Callable[[OpKind], Iterable[Kept]]) -> None:
        self._program, self._kept = program, kept
        self._same: dict[Dim, Dim] = {}
        self._blank: set[Value] = set()  # the same everywhere: they have no order
        self._tie(program.body)

    def of(self, dim: Dim) -> Dim:
        """The dim that stands for the class of a dim."""
        root = dim
        while (above := self._same.get(root, root)) != root:
            root = above
        while dim != root:
            self._same[dim], dim = root, self._same[dim]
        return root

    def _join(self, a: Dim, b: Dim) -> None:
        self._same[self.of(b)] = self.of(a)

    def _tie(self, region: Region) -> None:
        for op in region.ops:
            for inner in op.regions:
                self._tie(inner)
            if op.regions:
                self._tie_flow(op)
                continue
            if self._is_blank(op):
                self._blank.update(op.results)
                continue
            for (i, dim), (j, to) in self._kept(op.kind):
                if op.operands[i] not in self._blank:
                    self._join((op.operands[i], dim), (op.results[j], to))

    def _is_blank(self, op: Op) -> bool:
        """Whether an op fills its result with a scalar, or computes with what was filled so."""
        # Without this, weights of one shape would go together by the zeros that both are added to.
        about = op.kind.about
        if about.is_broadcast:
            return not op.kind.operands[0].rank or op.operands[0] in self._blank
        if about.is_constant:
            return bool(op.kind.attrs["value"].splat)
        return about.is_elementwise and all(v in self._blank for v in op.operands)

    def _tie_flow(self, op: Op) -> None:
        """The values that control flow makes one."""
        for tie in ties(op):
            source = () if tie.source is None or tie.source in self._blank else (tie.source,)
            for dim in range(self._program.types[tie.result].rank):
                for value in (*tie.inside, *source):
                    self._join((value, dim), (tie.result, dim))


def with_runs(region: Region, index: Index, runs: int = 1) -> Iterator[tuple[Op, int]]:
    """Every op of a region and of those inside it, and how often it runs."""
    for op in region.ops:
        yield op, runs
        for inner in op.regions:
            yield from with_runs(inner, index, runs * index.runs(op))
