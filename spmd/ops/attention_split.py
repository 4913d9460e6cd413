"""Attention on one device that has a part of the queries: piece by piece of the keys.

The pieces are slices of all keys, where those were gathered; or they go round, and each device
hands the one that it has on while it computes with it (Liu, Zaharia, Abbeel 2023, *Ring Attention
with Blockwise Transformers for Near-Infinite Context*). Four devices, the third one:

    gathered                                      round
    out, lse = attention q, keys[2]               out, lse = attention q, own keys
                                                  %1 = collective_permute own keys
    out, lse = attention_piece .., keys[1]        out, lse = attention_piece .., %1
                                                  %2 = collective_permute %1
    out, lse = attention_piece .., keys[0]        out, lse = attention_piece .., %2
    ...                                           ...

In the gradient what pieces owe to their keys and values goes round with them, and home at the end.
It goes the other way round, so that no piece of the forward pass is held for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.rule import MOST_PIECES
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.lowering.local.composite import append_composite, lower_composite, with_own
from spmd.lowering.local.dims import dynamic_take_dim, to_next
from spmd.lowering.local.table import LocalOp
from spmd.ops.attention_rules import PIECE, PIECE_GRADIENT

LEAST_PIECE = 512
"""Keys of a piece, at least: to start more kernels than one takes longer than what they leave out.

Pieces that go round may be shorter: the planner weighed that."""

SEQUENCE = 1  # the dim of queries, keys and values that has their positions


def lower_forward(op: LocalOp) -> Sequence[Value]:
    """Outputs and logsumexp of this device's queries."""
    if not _is_by_pieces(op):
        return lower_composite(op)
    b, here, types = op.b, _Here(op, 3), op.result_types()
    out, lse = here.own(types)
    out = b.convert(out, "f32")
    for place, keys in here.others(1):
        operands = op.operands[0], *keys[:2], here.is_before(place), out, lse
        out, lse = here.piece(PIECE, operands, keys, (b.types[out], types[1]))
    return b.convert(out, types[0].dtype), lse


def lower_gradient(op: LocalOp) -> Sequence[Value]:
    """Gradients of this device's queries, and of all keys and values or of its own."""
    if not _is_by_pieces(op):
        return lower_composite(op)
    b, here, (type_, *_) = op.b, _Here(op, 6), op.result_types()
    q, _, _, *kept = op.operands[:6]
    dq, *own = here.own((type_, *here.key_types))
    dq = b.convert(dq, "f32")
    sums: Sequence[Value] = []
    if not here.goes_round:
        sums = here.put([b.splat(0, b.types[x]) for x in here.keys[:2]], 0, own)
    for place, keys in here.others(-1):
        operands = q, *keys[:2], *kept, here.is_before(place), dq
        types = b.types[dq], *here.key_types
        dq, *terms = here.piece(PIECE_GRADIENT, operands, keys, types)
        sums = here.added(terms, sums) if here.goes_round else here.put(sums, place, terms)
    sums = here.added(own, sums) if here.goes_round else sums
    return b.convert(dq, type_.dtype), *sums


def ring_reason(label: str) -> str:
    """Why a piece is sent, of an op with this label: what the report finds it by."""
    return f"keys and values of {label} go round"


def _is_by_pieces(op: LocalOp) -> bool:
    """Whether it is known at compile time what a device sees of which piece."""
    (_, queries, _, _), (_, keys, _, _) = (t.shape for t in op.op.kind.operands[:2])
    split, said = op.dim(0, SEQUENCE), arguments_of(op.op.kind)
    pieces = op.mesh.extent(split.axes)
    if op.dim(1, SEQUENCE).axes:  # they go round
        return True
    is_own = said["causal"] and "window" not in said and said["length"] == queries == keys
    fits = 1 < pieces <= MOST_PIECES and said.get("zigzag", 1) in (1, pieces)
    return bool(is_own and fits and split.is_even and keys >= LEAST_PIECE * pieces)


class _Here:
    """One attention on one device: whose pieces of keys go round, or are slices of all.

    The first `tensors` operands are no masks; `number` is this device's among those that split
    queries.
    """

    def __init__(self, op: LocalOp, tensors: int) -> None:
        self.op, self.b, self.causal = op, op.b, arguments_of(op.op.kind)["causal"]
        self.axes = op.dim(0, SEQUENCE).axes
        self.count = op.mesh.extent(self.axes)
        self.goes_round = bool(op.dim(1, SEQUENCE).axes)
        self.number = op.b.axis_index(self.axes)
        self.tensors, masks = op.operands[:tensors], op.operands[tensors:]
        segments = masks[1:] if self.causal else masks
        self.queries, self.keys = segments[:1], (*op.operands[1:3], *segments[1:])
        self._steps: list[Value] = []

    @property
    def key_types(self) -> tuple[TensorType, TensorType]:
        """Of a piece of the keys and of the values."""
        parts = 1 if self.goes_round else self.count
        k, v = (self.b.types[x].scaled(SEQUENCE, 1, parts) for x in self.keys[:2])
        return k, v

    def own(self, types: Sequence[TensorType]) -> tuple[Value, ...]:
        """The op over this device's own piece of the keys; queries and keys ascend alike."""
        b, (q, _, _, *kept) = self.b, self.tensors
        k, v, *segments = self.keys if self.goes_round else self._slices(0)
        length = b.types[q].shape[SEQUENCE]
        positions = [b.iota(TensorType((length,), "i32"), 0)] if self.causal else []
        operands = q, k, v, *kept, *positions, *self.queries, *segments
        attrs = with_own(self.op.attrs, length=length, zigzag=1)
        results = append_composite(b, operands, types, attrs)
        self._steps.append(results[0])
        return results

    def piece(
        self,
        name: str,
        operands: Sequence[Value],
        keys: Sequence[Value],
        types: Sequence[TensorType],
    ) -> tuple[Value, ...]:
        """One more piece of the keys; the composite is the same for all of them."""
        attrs = {**self.op.attrs, "name": name}
        operands = *operands, *self.queries, *keys[2:]
        results = append_composite(self.b, operands, types, attrs)
        self._steps.append(results[0])
        return results

    def is_before(self, place: int) -> Value:
        """Whether the device so many places behind this one comes before it in the sequence."""
        return self.b.compare("GE", self.number, self.b.constant(place, "i32"))

    def others(self, way: int) -> Iterator[tuple[int, Sequence[Value]]]:
        """The pieces of the other devices, and how many devices each is behind this one."""
        keys: Sequence[Value] = self.keys
        for i in range(1, self.count):
            place = i if way > 0 else self.count - i
            keys = self._next(keys, way) if self.goes_round else self._slices(place)
            yield place, keys

    def _next(self, values: Sequence[Value], way: int) -> Sequence[Value]:
        """What the device before this one has, or the one behind it."""
        # No piece sets out before there is room: while one is computed with, the next one comes.
        if len(self._steps) > 1:
            values = self.b.barrier((*values, self._steps[-2]))[:-1]
        return [self._sent(x, way) for x in values]

    def _sent(self, x: Value, way: int) -> Value:
        pairs = to_next(self.axes, self.op.mesh, way)
        with self.b.noted(ring_reason(self.op.op.label)):
            return self.b.collective(
                "collective_permute", x, self.b.types[x], self.axes, pairs=pairs
            )

    def _slices(self, place: int) -> Sequence[Value]:
        """The piece so many devices behind this one."""
        start = self._start(place)
        length = self.key_types[0].shape[SEQUENCE]
        return [dynamic_take_dim(self.b, x, SEQUENCE, start, length) for x in self.keys]

    def _start(self, place: int) -> Value:
        """Where the piece so many devices behind this one begins."""
        b, length = self.b, self.key_types[0].shape[SEQUENCE]
        number = b.binary("add", self.number, b.constant(self.count - place, "i32"))
        number = b.binary("remainder", number, b.constant(self.count, "i32"))
        return b.binary("multiply", number, b.constant(length, "i32"))

    # Sums of what pieces owe to keys and values.

    def added(self, terms: Sequence[Value], sums: Sequence[Value]) -> Sequence[Value]:
        """This device's terms of a piece, and what the devices that it has been on found."""
        if not sums:
            return terms
        arrived = [self._sent(x, -1) for x in sums]
        return [self.b.binary("add", x, y) for x, y in zip(arrived, terms, strict=True)]

    def put(self, sums: Sequence[Value], place: int, terms: Sequence[Value]) -> Sequence[Value]:
        """The sums of all pieces with those of one in its place."""
        b, start, zero = self.b, self._start(place), self.b.constant(0, "i32")
        starts = zero, start, zero, zero
        pairs = zip(sums, terms, strict=True)
        return [b.dynamic_update_slice(whole, term, starts) for whole, term in pairs]
