"""Chooses how donated arguments, and the results that reuse their buffers, lie in memory.

GPU collectives join and cut pieces along the outermost dim in memory, and XLA transposes what they
read and write where that is another dim. A weight of shape (out, in) that is split along `in` would
be transposed before its all-gather, its gradient before the reduce-scatter, and the result of that
once more for the optimizer. So these arguments and results get the order that collectives need:

    %0: tensor<4096x2048xf32> "w"                  // in memory: 1, 0
    %8 = convert %0; %9 = all_gather %8 dim=1      // 2048 columns stay one piece

Ops that keep the elements of a dim in order (elementwise ops, slices, reshapes, loops) get the same
order on both sides: AdamW's moments have the order of their weight, since its update reads both.

XLA chooses the layout of all other values. It does not see that the result of a scatter or a
concatenate, which could be written in any order, ends up in a donated buffer further down. Large
results of that kind are pinned to the order of the donated argument by a custom call:

    %8 = scatter %zeros, %rows; %9 = custom_call %8 {call_target_name = "LayoutConstraint"}

What leaves for the host's memory does so as 0, 1, 2, ..., and XLA would let the host transpose it
there. So its dims are put in that order before it leaves, and named again where it has arrived:

    %8 = transpose %7; %9 = to host %8; %10 = transpose %9              // in memory: 1, 0
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from spmd.ir.control_flow import Index, ties
from spmd.ir.description import BROADCAST, CONSTANT, CUSTOM_CALL, SCATTER
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.host import HOST, moves_to
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import Opaque, Order
from spmd.lowering.partition import Partitioned
from spmd.predict.backends import backend_of

_JOINED = ("all_gather", "reduce_scatter")

_PINNED_BYTES = 1 << 20
"""The least bytes of a result that is pinned; a smaller one is transposed as fast as it is read."""


def lay_out(
    local: Partitioned,
    links: Sequence[tuple[int, int]],
    given: Sequence[Order | None],
    platform: str,
    wanted: bool | None = None,
) -> Partitioned:
    """Returns `local` with orders in memory for donated arguments and the results in their buffers.

    `links` are pairs of positions: a result, and the donated argument whose buffer it reuses. All
    other arguments keep their order in `given` (dims, outermost first; None: 0, 1, 2, ...). Large
    concatenates and scatters tied to donated arguments are pinned to their orders. The collectives
    in the program decide, so none may be added later. `wanted` is whether to choose orders at all;
    None: if the platform's collectives need the outermost dim (GPUs).
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
        program = _upright(program, dict(zip(body.results, results, strict=True)))
    return local._replace(
        program=program, argument_orders=tuple(arguments), result_orders=tuple(results)
    )


def _pinned(program: Program, wishes: "_Wishes", links: Sequence[Value]) -> Program:
    """Pins memory orders of large concatenates and scatters tied to donated arguments, `links`."""
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
        text = Opaque(f"[dense<{[*reversed(order)]}> : tensor<{type_.rank}xindex>]")
        target = {"call_target_name": "LayoutConstraint", "api_version": Opaque("1 : i32")}
        layouts = {"operand_layouts": text, "result_layouts": text}
        return b.op(CUSTOM_CALL, (result,), (type_,), {**target, **layouts})

    return edit_ops(program, edit)


def _upright(program: Program, orders: Mapping[Value, Order | None]) -> Program:
    """Transposes on the devices what leaves for the host's memory in another order."""

    def edit(b: Builder, op: Op, now: Now) -> tuple[Value, ...] | None:
        if moves_to(op) != HOST or not (order := orders.get(op.results[0])):
            return None
        leaves = b.transpose(op.operands[0], order)
        (there,) = b.op(op.name, (leaves,), (b.types[leaves],), op.kind.attrs)
        return (b.transpose(there, sorted(range(len(order)), key=order.__getitem__)),)

    return edit_ops(program, edit, orders.keys())


_Dim = tuple[Value, int]  # a value and the number of one of its dims


class _Wishes:
    """Orders of dims in memory that suit collectives; dims to be ordered alike form a class."""

    def __init__(self, program: Program) -> None:
        self.types, self.index = program.types, Index(program)
        self.same: dict[_Dim, _Dim] = {}  # dim -> another of its class (all but one)
        self.blank: set[Value] = set()  # values that are equal everywhere: any order fits
        # (dim, other dim) -> bytes of the collectives that need the one in front of the other
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
        while (above := self.same.get(dim, dim)) != dim:  # the next time the way is half as long
            self.same[dim] = dim = self.same.get(above, above)
        return dim

    def wish(self, region: Region, runs: int) -> None:
        """Adds a region's gathered or scattered bytes times `runs` to `first[their dim, other]`."""
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
        """Puts an operand's dim and a result's in one class if an op keeps the elements' order."""
        for op in region.ops:
            for inner in op.regions:
                self.tie(inner)
            if op.regions:  # the values that are one in control flow, as a carry and its result
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
    """Returns (operand, dim, result, dim) numbers where an op keeps a dim's order of elements."""
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
