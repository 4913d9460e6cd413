"""Layouts: in which order the dims of a step's state lie in memory.

GPU collectives join and cut pieces along the outermost dim. A weight of (out, in) that is split
along `in` would be transposed in front of its gather, its gradient transposed in front of the sum,
and the sum once more for the optimizer. So what one run hands on to the next (donated arguments,
and the results that take their place) lies in the order that the collectives want:

    %0: tensor<4096x2048xf32> "w"                  // in memory: 1, 0
    %8 = convert %0; %9 = all_gather %8 dim=1      // 2048 columns stay one piece

Dims are followed through all that leaves their elements in order: elementwise ops, slices,
reshapes, loops. AdamW's moments lie like their weight, since its update reads both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from spmd.ir.control_flow import ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.index import Index
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.types import Order
from spmd.lowering.partition import Partitioned
from spmd.predict.backends import backend_of

_Dim = tuple[Value, int]
_JOINED = ("all_gather", "reduce_scatter")


def lay_out(
    local: Partitioned,
    links: Sequence[tuple[int, int]],
    given: Sequence[Order | None],
    platform: str,
    wanted: bool | None = None,
) -> Partitioned:
    """Chooses the order in memory of arguments and results.

    Args:
      local: the local program, with all its collectives.
      links: (result, argument) of donated arguments and their updates: what can be chosen.
      given: the order of each other argument, None for major to minor.
      platform: what it is compiled for.
      wanted: whether to choose; None: where the backend would transpose otherwise.
    """
    body, types = local.program.body, local.program.types
    arguments = [*given] or [None] * len(body.args)
    results: list[Order | None] = [None] * len(body.results)
    chooses = backend_of(platform).joins_outermost if wanted is None else wanted
    if chooses and any(types[body.args[argument]].rank > 1 for _, argument in links):
        wishes = _Wishes(local.program)
        for result, argument in links:
            value = body.args[argument]
            if types[value].shape == types[body.results[result]].shape:
                arguments[argument] = results[result] = wishes.order(value)
    return local._replace(argument_orders=tuple(arguments), result_orders=tuple(results))


class _Wishes:
    """What the collectives of a program wish of the order of dims.

    Attributes:
      first: (dim, other dim) -> bytes of the collectives that want the one in front of the other.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._same: dict[_Dim, _Dim] = {}
        self._blank: set[Value] = set()  # the same everywhere: they have no order
        self._tie(program.body)
        self.first: dict[tuple[_Dim, _Dim], int] = defaultdict(int)
        index = Index(program)
        for op, runs in _with_runs(program.body, index, 1):
            if op.collective in _JOINED:
                dim = op.kind.attrs[op.kind.about.along]
                for value in op.operands:
                    self._wish(value, dim, runs)

    def order(self, value: Value) -> Order | None:
        """The order for a value; None if it is major to minor."""
        order: list[int] = []
        for dim in range(self.program.types[value].rank):
            before = (i for i, other in enumerate(order) if self._prefers(value, dim, other))
            order.insert(next(before, len(order)), dim)
        return None if order == sorted(order) else tuple(order)

    def _prefers(self, value: Value, dim: int, other: int) -> bool:
        one, two = self._class((value, dim)), self._class((value, other))
        return self.first.get((one, two), 0) > self.first.get((two, one), 0)

    def _wish(self, value: Value, dim: int, runs: int) -> None:
        type_ = self.program.types[value]
        for other, size in enumerate(type_.shape):
            if other != dim and size > 1:
                pair = self._class((value, dim)), self._class((value, other))
                self.first[pair] += type_.bytes * runs

    # Dims that go together: a forest, each class with one dim that stands for it.

    def _class(self, dim: _Dim) -> _Dim:
        root = dim
        while (above := self._same.get(root, root)) != root:
            root = above
        while dim != root:
            self._same[dim], dim = root, self._same[dim]
        return root

    def _join(self, a: _Dim, b: _Dim) -> None:
        self._same[self._class(b)] = self._class(a)

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
            for (i, dim), (j, to) in _kept(op.kind):
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
            for dim in range(self.program.types[tie.result].rank):
                for value in (*tie.inside, *source):
                    self._join((value, dim), (tie.result, dim))


def _with_runs(region: Region, index: Index, runs: int) -> Iterator[tuple[Op, int]]:
    """Every op, and how often it runs."""
    for op in region.ops:
        yield op, runs
        for inner in op.regions:
            yield from _with_runs(inner, index, runs * index.runs(op))


def _kept(kind: OpKind) -> Sequence[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (operand, dim) and (result, dim) of which the op keeps the elements in order."""
    cache: dict[str, object] = kind._cache
    found = cache.get("kept")
    if found is None:
        found = cache["kept"] = tuple(_find_kept(kind))
    assert isinstance(found, tuple)
    return found


def _find_kept(kind: OpKind) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    about = kind.about
    # A product makes other elements; backends choose how it reads its operands and writes.
    if about.rule is None or about.collective or about.flops is not None or about.is_scatter:
        return
    rule = rule_of(kind)
    made: Mapping[int, list[tuple[int, int]]] = defaultdict(list)
    for j, dims in enumerate(rule.results):
        for to, factors in enumerate(dims):
            if factors:
                made[factors[0]].append((j, to))
    for i, dims in enumerate(rule.operands):
        for dim, factors in enumerate(dims):
            for place in made.get(factors[0], ()) if factors else ():
                yield (i, dim), place
