"""`Rule`: an op's map from the dims of its operands and results to factors, as data.

An op's *factors* are the indices of its iteration space. `b i k, b j k -> b i j` says of a matrix
product that `i` runs over a dim of the first operand and of the result, and so on. To split an op
is to split some of its factors; the rule then says what every operand and result looks like.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spmd.ir.dialect.halo import Halo, Merge, Window
from spmd.ir.types import TensorType

PASS, REDUCE, REPLICATE, WINDOW = "pass", "reduce", "replicate", "window"
FIXED, MERGE, RING = "fixed", "merge", "ring"

UNCLAIMED = (REPLICATE, FIXED, RING)
"""Kinds of factors that a dim's atoms never split; the op itself says what may split them."""

DimFactors = tuple[int, ...]  # factors of one dim, major to minor
Pair = tuple[DimFactors, DimFactors]  # factors of an operand's dim and of the result's
Sides = tuple[list[DimFactors], list[DimFactors]]  # all dims of an operand and of the result


class Ring(NamedTuple):
    """Atoms of factor `along` may split a `ring` factor, too, into `wanted` pieces (0: any)."""

    along: int
    wanted: int = 0

    def allows(self, pieces: int, *sizes: int) -> bool:
        """Whether a ring may have `pieces`: as `wanted`, at most 64, dividing each of `sizes`."""
        is_even = all(size % pieces == 0 for size in sizes)
        return is_even and pieces <= MOST_PIECES and self.wanted in (0, pieces)


class Exchange(NamedTuple):
    """Lets atoms of factors `along` split another factor, too; devices then send `bytes` in all."""

    along: tuple[int, ...]
    bytes: float  # that all devices together put in then, if no other factors are split


MOST_PIECES = 64  # as the steps of a ring are written out, one for each piece


class Factor(NamedTuple):
    """One index of an op's iteration space, and what splitting it means.

    `pass`: each piece is computed by itself. `reduce`: the results are partial. `window`: devices
    exchange halos; dims that share the factor may differ in size, and the factor has the result's.
    `merge`: devices exchange what each finds in its piece (`Merge`); nothing is left partial.
    `replicate`: it must not be split. `fixed`: it is split over just its own `axes`; the dim's
    other factor, behind it, may then be split unevenly. `ring`: it stays whole, or the very atoms
    that split another factor split it evenly, too; its pieces then pass from device to device, and
    each meets all of them.
    """

    size: int
    kind: str = PASS
    axes: tuple[int, ...] = ()  # the atoms of a fixed factor
    ring: Ring | None = None  # of a ring factor, how it may be split
    # of a factor that atoms of other factors may split evenly, too; a result that these atoms
    # split is not partial over them
    exchange: Exchange | None = None


class Rule(NamedTuple):
    """The sharding rule of an op at given types: the factors of operands' and results' dims."""

    # operands, results: for each of them, for each dim, its factors, major to minor
    operands: tuple[tuple[DimFactors, ...], ...]
    results: tuple[tuple[DimFactors, ...], ...]
    factors: tuple[Factor, ...]
    reduction: str = ""  # how terms combine when a `reduce` factor is split
    # `linear`: groups of operands. If exactly one whole group is partial (in the way of `terms`,
    # over the same axes) and every other operand is full, the results are partial over these axes.
    # With x = x1 + x2 on two devices:
    #   add ((0, 1),)          (x1 + y1) + (x2 + y2) is x + y: both have to be partial, for a whole
    #                          y would be added twice
    #   multiply ((0,), (1,))  x1 * y + x2 * y is x * y: one is partial, and the other is whole
    linear: tuple[tuple[int, ...], ...] = ()
    moves: bool = False  # it only moves elements: a partial of any kind may flow through `linear`
    # dims of operands of which a device reads other elements than those of its own tile
    reads: tuple[Halo, ...] = ()
    held: tuple[int, ...] = ()  # atoms that split fixed factors only; no value is partial over them
    merges: tuple[Merge, ...] = ()  # what devices exchange where a `merge` factor is split
    terms: str = "add"  # how the terms combine that may flow through `linear`

    def lets_through(self, kind: str) -> bool:
        """Whether operands partial by `kind` (`add`, `max`, ...) may make the results partial."""
        return self.moves or kind == self.terms

    @property
    def values(self) -> tuple[tuple[DimFactors, ...], ...]:
        """For each operand, then for each result: the factors of each dim."""
        return self.operands + self.results

    @property
    def rings(self) -> tuple[tuple[int, Ring], ...]:
        """For each ring factor its number, and its `Ring`: how it may be split."""
        return tuple((i, f.ring) for i, f in enumerate(self.factors) if f.ring is not None)

    @property
    def exchanges(self) -> tuple[tuple[int, Exchange], ...]:
        """For each factor that has an `Exchange` its number, and that exchange."""
        return tuple((i, f.exchange) for i, f in enumerate(self.factors) if f.exchange is not None)

    def is_exchanged(self, factor: int, assignment: Sequence[Sequence[int]]) -> bool:
        """Whether an assignment splits a factor by atoms that split its `Exchange.along`, too."""
        exchange = self.factors[factor].exchange
        others = exchange.along if exchange else ()
        return any(not set(assignment[factor]).isdisjoint(assignment[f]) for f in others)

    @property
    def halos(self) -> tuple[Halo, ...]:
        """The `reads` of dims that have just the factor of the tiles, so that devices exchange."""
        return tuple(h for h in self.reads if self.operands[h.operand][h.dim] == (h.factor,))

    def __str__(self) -> str:
        """Returns the rule as text: `b i k, b k j -> b i j {k: reduce add}`."""
        letters = "ijklmnopqrstuvwxyzabcdefgh"
        names = [*letters, *(f"z{i}" for i in range(len(letters), len(self.factors)))]

        def term(value: tuple[DimFactors, ...]) -> str:
            dims = (" ".join([names[f] for f in dim]) for dim in value)
            return " ".join([text if len(text.split()) == 1 else f"({text})" for text in dims])

        kinds = [
            f"{name}: {f.kind}"
            + (f" {self.reduction}" if f.kind == REDUCE else "")
            + (f" along {names[f.ring.along]}" if f.ring else "")
            for name, f in zip(names, self.factors, strict=False)
            if f.kind != PASS
        ]
        text = " -> ".join(", ".join(map(term, side)) for side in (self.operands, self.results))
        return text + (f" {{{', '.join(kinds)}}}" if kinds else "")


_DIM = re.compile(r"\(([^()]*)\)|([^\s()]+|\S)")


def parse_rule(
    text: str,
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    *,
    kinds: Mapping[str, str] | None = None,
    reduction: str = "",
    linear: Iterable[Sequence[int]] = (),
) -> Rule:
    """Returns the rule that a text says; ValueError if it does not fit the types.

    A text as `"b i k, b j k -> b i j"` has a term for each operand and result, one factor a dim, or
    `(i j)` for a dim made of several, major first. `kinds` maps factors that do not `pass` to their
    kind: `{"k": "reduce"}`. `reduction` and `linear` are as in `Rule`.
    """
    left, arrow, right = text.partition("->")
    # The factors of each dim: `(i j) k` is `[["i", "j"], ["k"]]`.
    terms, outs = (
        [
            [(group or name).split() for group, name in re.findall(_DIM, term)]
            for term in (side.split(",") if side.strip() or len(types) == 1 else ())
        ]
        for side, types in ((left, operands), (right, results))
    )
    if not arrow or len(terms) != len(operands) or len(outs) != len(results):
        raise ValueError(f"rule {text!r} needs {len(operands)} operands, {len(results)} results")
    dims: list[tuple[list[str], int]] = []
    for term, type_ in zip(terms + outs, (*operands, *results), strict=True):
        if len(term) != type_.rank:
            raise ValueError(f"rule {text!r}: a term with {len(term)} dims for {type_}")
        dims += zip(term, type_.shape, strict=True)
    # A dim of one factor tells its size, and a dim with one unknown factor what is left for that
    # one; of several unknown ones all have size 1.
    sizes: dict[str, int] = {}
    for dim, size in sorted(dims, key=lambda each: len(each[0]) != 1):
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            raise ValueError(f"rule {text!r}: factor {dim[0]} is {sizes[dim[0]]} and {size}")
        known = math.prod(sizes[name] for name in dim if name in sizes)
        unknown = [name for name in dim if name not in sizes]
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
        product = math.prod(sizes.setdefault(name, 1) for name in dim)
        if product != size:
            raise ValueError(f"rule {text!r}: ({' '.join(dim)}) has size {product}, not {size}")
    order = {name: i for i, name in enumerate(sizes)}
    before, after = (
        tuple(tuple(tuple(order[name] for name in dim) for dim in term) for term in side)
        for side in (terms, outs)
    )
    factors = tuple(Factor(size, (kinds or {}).get(name, PASS)) for name, size in sizes.items())
    return Rule(before, after, factors, reduction, tuple(map(tuple, linear)))


class RuleBuilder:
    """Makes a `Rule`: methods add factors and return dims that have them; `build` returns it."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self.reads: list[Halo] = []

    def factor(self, size: int, kind: str = PASS, **more: Any) -> DimFactors:
        """Adds a factor (`more`: other fields of `Factor`); returns a dim of just this factor."""
        self.factors.append(Factor(size, kind, **more))
        return (len(self.factors) - 1,)

    def ring(self, size: int, along: DimFactors, wanted: int = 0) -> DimFactors:
        """Adds a ring factor that may be split as `Ring(along[0], wanted)`; returns a dim of it."""
        return self.factor(size, RING, ring=Ring(along[0], wanted))

    def dims(self, shape: Sequence[int], kind: str = PASS) -> list[DimFactors]:
        """Adds a factor for each dim of a shape; returns the dims."""
        return [self.factor(size, kind) for size in shape]

    def passes(self, size: int) -> Pair:
        """Adds one factor; returns an operand's dim and a result's dim that both have it."""
        return (self.factor(size),) * 2

    def apart(self, size: int, result: int, kind: str = REPLICATE) -> Pair:
        """Adds a `kind` factor of `size`, a `replicate` one of `result`; returns a dim of each."""
        return self.factor(size, kind), self.factor(result, REPLICATE)

    def window(self, dim: int, size: int, window: Window) -> Pair:
        """Adds a window factor and `Halo` of operand 0's dim `dim`; returns that and the result's.

        `size` is that of the operand's dim, which stays whole if it has size 1. If it has size 0,
        or the result's has 0 or 1, both stay whole, without a `Halo`.
        """
        if size == 0 or window.tiled < 2:
            return self.apart(size, window.tiled)
        result = self.factor(window.tiled, WINDOW)
        self.read(0, dim, result, window)
        return (self.factor(size, REPLICATE) if size == 1 else result), result

    def pairs(
        self, one: TensorType, other: TensorType, pair: Callable[[int, int, int], Pair]
    ) -> Sides:
        """Returns dims of `one` and of `other`: `pair(d, size, other_size)` makes dim d of both."""
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        made = [pair(d, size, out) for d, (size, out) in sizes]
        return [dims[0] for dims in made], [dims[1] for dims in made]

    def cut(self, one: TensorType, part: TensorType, kind: str = PASS) -> Sides:
        """Returns dims of `one`, `part`: equal ones pass, else `kind` in `one`, whole in `part`."""
        return self.pairs(
            one, part, lambda _, n, m: self.passes(n) if n == m else self.apart(n, m, kind)
        )

    def read(self, operand: int, dim: int, factor: DimFactors, window: Window | None) -> None:
        """Adds a `Halo`: for its tile of `factor` a device reads `dim` of `operand` by `window`."""
        self.reads.append(Halo(operand, dim, factor[0], window))

    def build(
        self,
        operands: Iterable[Sequence[DimFactors]],
        results: Iterable[Sequence[DimFactors]],
        **more: Any,
    ) -> Rule:
        """Returns the rule over the factors made so far; `more` are other fields of `Rule`."""
        before, after = (tuple(map(tuple, side)) for side in (operands, results))
        return Rule(before, after, tuple(self.factors), reads=tuple(self.reads), **more)


def whole(kind: Any, batch: int = 0) -> Rule:
    """Returns the rule: only the first `batch` dims may be split, if all but scalars share them."""
    build, types = RuleBuilder(), (*kind.operands, *kind.results)
    sizes = kind.operands[0].shape[:batch] if batch else ()
    if any(t.shape[:batch] != sizes for t in types if t.rank):
        sizes = ()
    shared = build.dims(sizes)
    dims = [shared + build.dims(t.shape[len(sizes) :], REPLICATE) if t.rank else [] for t in types]
    return build.build(dims[: len(kind.operands)], dims[len(kind.operands) :])
