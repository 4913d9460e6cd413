"""Layouts: in which order the dims of a step's state lie in memory.

GPU collectives join and cut pieces along the outermost dim. A weight of (out, in) that is split
along `in` would be transposed in front of its gather, its gradient transposed in front of the sum,
and the sum once more for the optimizer. So what one run hands on to the next (donated arguments,
and the results that take their place) lies in the order that the collectives want:

    %0: tensor<4096x2048xf32> "w"                  // in memory: 1, 0
    %8 = convert %0; %9 = all_gather %8 dim=1      // 2048 columns stay one piece

Dims are followed through all that leaves their elements in order: elementwise ops, slices,
reshapes, loops. AdamW's moments lie like their weight, since its update reads both.

XLA chooses the order of what is in between. Where an op could write in any order, it does not see
that a donated argument waits for the result further down: rows that are added to a table of zeros
would lie as suits another table of zeros. Such results are pinned, in the order of the argument:

    %8 = scatter %zeros, %rows; %9 = custom_call %8 {call_target_name = "LayoutConstraint"}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from spmd.ir.control_flow import ties
from spmd.ir.description import CUSTOM_CALL
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.registry import rule_of
from spmd.ir.index import Index
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import Opaque, Order
from spmd.lowering.partition import Partitioned
from spmd.lowering.rewrites.moves import joins
from spmd.predict.backends import backend_of

_JOINED = ("all_gather", "reduce_scatter")

_PINNED_BYTES = 1 << 20
"""Results of at least so many bytes are pinned: others are transposed as fast as they are read."""


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
    arguments = [*given, *[None] * (len(body.args) - len(given))]
    results: list[Order | None] = [None] * len(body.results)
    program = local.program
    chooses = backend_of(platform).joins_outermost if wanted is None else wanted
    if chooses and any(types[body.args[argument]].rank > 1 for _, argument in links):
        wishes = _Wishes(program)
        for result, argument in links:
            value = body.args[argument]
            if types[value].shape == types[body.results[result]].shape:
                arguments[argument] = results[result] = wishes.order(value)
        program = _pinned(program, wishes, [body.args[argument] for _, argument in links])
    orders = tuple(arguments), tuple(results)
    return local._replace(program=program, argument_orders=orders[0], result_orders=orders[1])


def _pinned(program: Program, wishes: _Wishes, links: Sequence[Value]) -> Program:
    """A program whose joins and scatters that go into links lie in memory as these do."""
    ranks = [(value, program.types[value].rank) for value in links]
    classes = {wishes.tied.of((value, dim)) for value, rank in ranks for dim in range(rank)}

    def edit(b: Builder, op: Op, now: Now) -> tuple[Value, ...] | None:
        if not (op.kind.about.is_scatter or joins(op)):
            return None
        (result,), (type_,) = op.results, op.kind.results
        dims = [wishes.tied.of((result, dim)) for dim in range(type_.rank)]
        if type_.bytes < _PINNED_BYTES or not classes.issuperset(dims):
            return None
        b.append(op)
        order = wishes.order(result) or range(type_.rank)
        minor_to_major = [*reversed(order)]
        text = Opaque(f"[dense<{minor_to_major}> : tensor<{type_.rank}xindex>]")
        target = {"call_target_name": "LayoutConstraint", "api_version": Opaque("1 : i32")}
        layouts = {"operand_layouts": text, "result_layouts": text}
        return b.op(CUSTOM_CALL, (result,), (type_,), {**target, **layouts})

    return edit_ops(program, edit)


class _Wishes:
    """What the collectives of a program wish of the order of dims.

    Attributes:
      first: (dim, other dim) -> bytes of the collectives that want the one in front of the other.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tied = TiedDims(program, _kept)
        self.first: dict[tuple[Dim, Dim], int] = defaultdict(int)
        for op, runs in with_runs(program.body, Index(program)):
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
        one, two = self.tied.of((value, dim)), self.tied.of((value, other))
        return self.first.get((one, two), 0) > self.first.get((two, one), 0)

    def _wish(self, value: Value, dim: int, runs: int) -> None:
        type_ = self.program.types[value]
        for other, size in enumerate(type_.shape):
            if other != dim and size > 1:
                pair = self.tied.of((value, dim)), self.tied.of((value, other))
                self.first[pair] += type_.bytes * runs


def _kept(kind: OpKind) -> Sequence[Kept]:
    """Pairs of (operand, dim) and (result, dim) of which the op keeps the elements in order."""
    cache: dict[str, object] = kind._cache
    found = cache.get("kept")
    if found is None:
        found = cache["kept"] = tuple(_find_kept(kind))
    assert isinstance(found, tuple)
    return found


def _find_kept(kind: OpKind) -> Iterator[Kept]:
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
