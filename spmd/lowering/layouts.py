"""Layouts in memory of a step's state: donated arguments, and the results in their place.

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

import functools
from collections import defaultdict
from collections.abc import Sequence

from spmd.ir.control_flow import Index, ties
from spmd.ir.description import BROADCAST, CONSTANT, CUSTOM_CALL, SCATTER
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import Opaque, Order
from spmd.lowering.partition import Partitioned
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
    """Chooses the layouts of donated arguments, and of the results that reuse their buffers.

    `links` are the (result, argument) pairs of donation. Other arguments keep the order that
    `given` has (None: major to minor). All collectives must be in the program, as they decide.
    `wanted` is whether to choose at all; None chooses where the backend would have to transpose for
    collectives along another dim than the outermost one.
    """
    program, body, types = local.program, local.program.body, local.program.types
    arguments = [*given, *[None] * (len(body.args) - len(given))]
    results: list[Order | None] = [None] * len(body.results)
    chooses = backend_of(platform).joins_outermost if wanted is None else wanted
    if chooses and any(types[body.args[argument]].rank > 1 for _, argument in links):
        wishes = _Wishes(program)
        for result, argument in links:
            value = body.args[argument]
            if types[value].shape == types[body.results[result]].shape:
                arguments[argument] = results[result] = wishes.order(value)
        program = _pinned(program, wishes, [body.args[argument] for _, argument in links])
    return local._replace(
        program=program, argument_orders=tuple(arguments), result_orders=tuple(results)
    )


def _pinned(program: Program, wishes: _Wishes, links: Sequence[Value]) -> Program:
    """Constrains large joins and scatters that end up in donated buffers to the layout of these."""
    ranks = [(value, program.types[value].rank) for value in links]
    classes = {wishes.of((value, dim)) for value, rank in ranks for dim in range(rank)}

    def edit(b: Builder, op: Op, now: Now) -> tuple[Value, ...] | None:
        about, count = op.kind.about, len(op.operands)
        if op.name != SCATTER:  # does it lay several operands side by side?
            if count < 2 or about.rule is None or about.collective or about.is_elementwise:
                return None
            rule = rule_of(op.kind)
            if not rule.moves or rule.linear != (tuple(range(count)),):
                return None
        (result,), (type_,) = op.results, op.kind.results
        dims = [wishes.of((result, dim)) for dim in range(type_.rank)]
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


_Dim = tuple[Value, int]  # a value and the number of one of its dims


class _Wishes:
    """The orders of dims that suit the collectives; dims that have to lie alike are one class."""

    def __init__(self, program: Program) -> None:
        self.types, self.index = program.types, Index(program)
        self.same: dict[_Dim, _Dim] = {}  # to another of its class; not of one that stands for it
        self.blank: set[Value] = set()  # the same everywhere: they have no order
        # (dim, other dim) -> bytes of the collectives that want the one in front of the other
        self.first: dict[tuple[_Dim, _Dim], int] = defaultdict(int)
        self.tie(program.body)
        self.wish(program.body, 1)

    def order(self, value: Value) -> Order | None:
        dims = [self.of((value, dim)) for dim in range(self.types[value].rank)]

        def prefers(dim: int, other: int) -> bool:
            one, two = dims[dim], dims[other]
            return self.first.get((one, two), 0) > self.first.get((two, one), 0)

        order: list[int] = []
        for dim in range(len(dims)):
            before = (i for i, other in enumerate(order) if prefers(dim, other))
            order.insert(next(before, len(order)), dim)
        return None if order == sorted(order) else tuple(order)

    def of(self, dim: _Dim) -> _Dim:
        root = dim
        while (above := self.same.get(root, root)) != root:
            root = above
        while dim != root:
            self.same[dim], dim = root, self.same[dim]
        return root

    def wish(self, region: Region, runs: int) -> None:
        """Adds the bytes of a region's collectives, times `runs`, to the dims they want first."""
        for op in region.ops:
            for inner in op.regions:
                self.wish(inner, runs * self.index.runs(op))
            if op.collective in _JOINED:
                dim = op.kind.attrs[op.kind.about.along]
                for value, type_ in zip(op.operands, op.kind.operands, strict=True):
                    for other, size in enumerate(type_.shape):
                        if other != dim and size > 1:
                            pair = self.of((value, dim)), self.of((value, other))
                            self.first[pair] += type_.bytes * runs

    def tie(self, region: Region) -> None:
        """Puts dims in one class if an op of the region keeps their elements in order."""
        for op in region.ops:
            for inner in op.regions:
                self.tie(inner)
            if op.regions:  # the values that control flow makes one
                for flow in ties(op):
                    outside = [v for v in (flow.source,) if v is not None and v not in self.blank]
                    for dim in range(self.types[flow.result].rank):
                        for value in (*flow.inside, *outside):
                            self.join((value, dim), (flow.result, dim))
                continue
            # What fills its result with a scalar, or computes with what was filled so, is blank:
            # else weights of one shape would go together by the zeros that both are added to.
            if op.name == BROADCAST:
                is_blank = not op.kind.operands[0].rank or op.operands[0] in self.blank
            elif op.name == CONSTANT:
                is_blank = bool(op.kind.attrs["value"].splat)
            else:
                is_elementwise = op.kind.about.is_elementwise
                is_blank = is_elementwise and all(v in self.blank for v in op.operands)
            if is_blank:
                self.blank.update(op.results)
            else:
                for i, dim, j, to in _kept(op.kind):
                    if op.operands[i] not in self.blank:
                        self.join((op.operands[i], dim), (op.results[j], to))

    def join(self, a: _Dim, b: _Dim) -> None:
        self.same[self.of(b)] = self.of(a)


@functools.cache
def _kept(kind: OpKind) -> tuple[tuple[int, int, int, int], ...]:
    """Returns (operand, dim, result, dim) where the op keeps the elements of a dim in order."""
    about = kind.about
    # A product makes other elements; backends choose how it reads its operands and writes.
    if about.rule is None or about.collective or about.flops is not None or kind.name == SCATTER:
        return ()
    rule = rule_of(kind)
    return tuple(
        (i, dim, j, to)
        for i, dims in enumerate(rule.operands)
        for dim, factors in enumerate(dims)
        for j, outs in enumerate(rule.results)
        for to, made in enumerate(outs)
        if factors and made and factors[0] == made[0]
    )
