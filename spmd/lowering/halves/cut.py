"""What becomes of an op when a dim of one of its values is cut into halves, by its sharding rule.

dot_general x, w, x cut along its rows       the op twice; its result is in halves
dot_general x, y, both cut along what is     the op twice; its results are terms of a sum
contracted
sort x along the dim that is cut             neither: the halves are joined for it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from spmd.errors import SpmdError
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.dialect.collectives import RESIZED
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import PASS, REDUCE, REPLICATE, DimFactors, Pair, Rule, RuleBuilder, sides
from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType
from spmd.lowering.local.table import LocalOp, lower_op
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.plan import Choice

HALF = "spmd.half"
"""Attribute of a collective: of which half it is. One for both would let each half wait."""

_HALF: Axes = (0,)
_HALVES = Mesh(None, (2,), ("half",))
"""Two devices that stand for the halves: on one of them an op is what it is on a half."""


class Cut(NamedTuple):
    """How a value is cut into halves.

    Attributes:
      dim: the dim.
      blocks: the dim is so many blocks one behind the other, and a half has a half of each. What
        two devices gather of their first halves are halves of two blocks.
    """

    dim: int
    blocks: int = 1

    def fits(self, type_: TensorType) -> bool:
        """Whether the dim's blocks have halves."""
        return self.dim < type_.rank and type_.shape[self.dim] % (2 * self.blocks) == 0

    def take(self, b: Builder, x: Value) -> tuple[Value, Value]:
        """Both halves of a whole value."""
        shape, d = b.types[x].shape, self.dim
        size = shape[d] // self.blocks
        if self.blocks > 1:
            x = b.reshape(x, (*shape[:d], self.blocks, size, *shape[d + 1 :]))
        parts = [
            b.slice_dim(x, d + (self.blocks > 1), start, start + size // 2)
            for start in (0, size // 2)
        ]
        first, second = (b.reshape(x, (*shape[:d], shape[d] // 2, *shape[d + 1 :])) for x in parts)
        return first, second

    def join(self, b: Builder, halves: Sequence[Value]) -> Value:
        """The whole value of both halves."""
        shape, d = b.types[halves[0]].shape, self.dim
        if self.blocks == 1:
            return b.concatenate(halves, d)
        inner = (*shape[:d], self.blocks, shape[d] // self.blocks, *shape[d + 1 :])
        joined = b.concatenate([b.reshape(half, inner) for half in halves], d + 1)
        return b.reshape(joined, (*shape[:d], 2 * shape[d], *shape[d + 1 :]))


class Halving(NamedTuple):
    """How an op is computed in halves.

    Attributes:
      kind: the op on one half.
      operands: how each operand is cut; None for one that both halves read whole.
      results: how each result is cut; None for one that is the reduction of both halves' results.
      reduction: how those combine.
      is_plain: whether it is this one op over its operands; else `lowered` makes it.
      continues: whether the second half adds to what the first one has made, as scatters do.
    """

    kind: OpKind
    operands: tuple[Cut | None, ...]
    results: tuple[Cut | None, ...]
    reduction: str
    is_plain: bool
    continues: bool


def halving(kind: OpKind, position: int, cut: Cut) -> Halving | None:
    """How an op is computed where one of its operands is in halves.

    Args:
      kind: a local op that is no control flow.
      position: of the value that is cut, among operands and then results.
      cut: how.

    Returns:
      None if it must have the operand whole.
    """
    key = f"halves.{position}.{cut.dim}.{cut.blocks}"
    if key not in kind._cache:
        kind._cache[key] = _halving(kind, position, cut)
    found: Halving | None = kind._cache[key]
    return found


def _halving(kind: OpKind, position: int, cut: Cut) -> Halving | None:
    rule = rule_in_blocks(kind)
    place = _factor_at(rule, rule.values[position][cut.dim], cut.blocks) if rule else None
    if rule is None or place is None or rule.factors[place[0]].kind not in (PASS, REDUCE):
        return None
    cuts = [_cut_of(rule, dims, *place) for dims in rule.values]
    operands, results = tuple(cuts[: len(kind.operands)]), tuple(cuts[len(kind.operands) :])
    sums = rule.factors[place[0]].kind == REDUCE
    if not sums and None in results:
        return None
    continues = sums and kind.about.is_scatter and not any(results)
    if continues or _is_exchange(kind):
        types = [_halved(t, c) for t, c in zip((*kind.operands, *kind.results), cuts, strict=True)]
        count = len(operands)
        half = OpKind(kind.name, tuple(types[:count]), tuple(types[count:]), kind.attrs)
        return Halving(half, operands, results, rule.reduction, True, continues)
    made = _lowered_alone(kind, operands, results)
    if made is None:
        return None
    half, is_plain = made
    return Halving(half, operands, results, rule.reduction, is_plain, False)


def lowered(
    b: Builder, op: Op, how: Halving, operands: Sequence[Value], half: int = 0
) -> tuple[Value, ...]:
    """Appends an op on one half of its operands."""
    if op.collective:
        return b.op(op.name, operands, how.kind.results, {**how.kind.attrs, HALF: half})
    if how.is_plain:
        return b.repeat(how.kind, tuple(operands))
    return _lower(b, op, how.operands, how.results, operands)


def _lowered_alone(
    kind: OpKind, operands: Sequence[Cut | None], results: Sequence[Cut | None]
) -> tuple[OpKind, bool] | None:
    """What an op is on a half, and whether it is that over its operands as they are.

    None if it is more than itself, constants aside: then one half differs from the other.
    """
    scratch = Builder()
    values = [scratch.value(_halved(*each)) for each in zip(kind.operands, operands, strict=True)]
    try:
        made = _lower(scratch, Op(kind, (), ()), operands, results, values)
    except SpmdError:  # a kernel that cannot compute a half
        return None
    *before, last = scratch.end((), ()).ops
    wanted = tuple(_halved(*each) for each in zip(kind.results, results, strict=True))
    same = last.name == kind.name and last.results == made and last.kind.results == wanted
    if not same or not all(op.kind.about.is_constant for op in before):
        return None
    return last.kind, not before and last.operands == tuple(values)


def _lower(
    b: Builder,
    op: Op,
    operands: Sequence[Cut | None],
    results: Sequence[Cut | None],
    values: Sequence[Value],
) -> tuple[Value, ...]:
    """The local form of an op on one of two devices that have a half each."""

    def split(types: Sequence[TensorType], cuts: Sequence[Cut | None]) -> tuple[Sharding, ...]:
        pairs = zip(types, cuts, strict=True)
        return tuple(
            Sharding(tuple(_HALF if c and c.dim == d else () for d in range(t.rank)))
            for t, c in pairs
        )

    rule = rule_of(op.kind)
    position = next(i for i, cut in enumerate((*operands, *results)) if cut)
    cut = (*operands, *results)[position]
    assert cut is not None
    place = _factor_at(rule, rule.values[position][cut.dim], cut.blocks)
    assignment = tuple(
        _HALF if place and number == place[0] else factor.axes
        for number, factor in enumerate(rule.factors)
    )
    choice = Choice(assignment, split(op.kind.operands, operands), split(op.kind.results, results))
    return tuple(lower_op(LocalOp(b, _HALVES, op, choice, values)))


def _halved(type_: TensorType, cut: Cut | None) -> TensorType:
    return type_.scaled(cut.dim, 1, 2) if cut else type_


# ---------------------------------------------------------------------------------------------
# Rules, with the blocks of which exchanges make dims.


def rule_in_blocks(kind: OpKind) -> Rule | None:
    """The rule of a local op, by which exchanges join and cut blocks; None if it has none."""
    if kind.about.has_effect or kind.about.is_barrier:
        return None
    if _is_exchange(kind):
        return _exchange_rule(kind)
    return rule_of(kind) if kind.about.rule else None


def _is_exchange(kind: OpKind) -> bool:
    return bool(kind.about.collective) or kind.name == LOCAL_SLICE


def _exchange_rule(kind: OpKind) -> Rule:
    """A gather along a dim is `j -> (n j)`, a scatter or slice `(n j) -> j`; other dims pass."""
    about, build = kind.about, RuleBuilder()
    names = RESIZED[about.collective] if about.collective else (about.along,)
    changed = [kind.attrs[name] for name in names if name]
    pairs: list[Pair] = []
    for d, (before, after) in enumerate(
        zip(kind.operands[0].shape, kind.results[0].shape, strict=True)
    ):
        less, more = sorted((before, after))
        if d not in changed:
            pairs.append(build.passes(before))
        elif less == more or not less or more % less:
            pairs.append(build.apart(before, after))
        else:
            inner = build.factor(less)
            blocks = build.factor(more // less, REPLICATE) + inner
            pairs.append((inner, blocks) if after == more else (blocks, inner))
    operand, result = sides(pairs)
    return build.build([operand], [result])


def _factor_at(rule: Rule, dim: DimFactors, blocks: int) -> tuple[int, int] | None:
    """The factor that is cut where a dim of so many blocks is, and into how many blocks it goes."""
    # Of (i=2 j=8) four blocks of 4 are two blocks of each j: it is cut at j, in two blocks.
    for factor in dim:
        size = rule.factors[factor].size
        if blocks < size:
            return (factor, blocks) if size % (2 * blocks) == 0 else None
        if size == 0 or blocks % size:
            return None
        blocks //= size
    return None


def _cut_of(rule: Rule, dims: Sequence[DimFactors], factor: int, blocks: int) -> Cut | None:
    """How a value with such dims is cut where a factor is; None if it lacks the factor."""
    for d, dim in enumerate(dims):
        if factor in dim:
            outer = dim[: dim.index(factor)]
            return Cut(d, math.prod(rule.factors[f].size for f in outer) * blocks)
    return None
