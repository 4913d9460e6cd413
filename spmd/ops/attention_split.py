"""How attention is split over devices, and what a device with a part of the queries computes.

Batches, heads and queries are split over devices, the width of a head is not. A device has all keys
of its heads, or the part of them that belongs to its queries; such parts are then passed round a
ring of devices. The positions of its queries are an operand. With more devices than key heads,
several devices have the same key head for different query heads.

A device with a part of the queries computes one piece of the keys after another. Each piece but the
first is a composite of its own, in one device's program alone. The pieces are slices of all keys,
if those were gathered; or they go round the ring, and a device sends its piece to the next device
while it computes with it (Liu, Zaharia, Abbeel 2023, *Ring Attention with Blockwise Transformers
for Near-Infinite Context*). The program of the third of four devices:

    gathered                                      round
    out, lse = attention q, keys[2]               out, lse = attention q, own keys
                                                  %1 = collective_permute own keys
    out, lse = attention_piece .., keys[1]        out, lse = attention_piece .., %1
                                                  %2 = collective_permute %1
    out, lse = attention_piece .., keys[0]        out, lse = attention_piece .., %2
    ...                                           ...

The gradients of a piece's keys and values are summed while they go round with the piece, and end at
its device. They go the other way round, so that no piece of the forward pass is held.
"""

from collections.abc import Iterator, Sequence

from spmd.ir.dialect.composites import PREFIX, arguments_of
from spmd.ir.dialect.rule import MOST_PIECES, PASS, REDUCE, REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind, Value
from spmd.ir.types import TensorType
from spmd.lowering.local.composite import append_composite, lower_composite
from spmd.lowering.local.dims import dynamic_take_dim, to_next
from spmd.lowering.local.table import LocalOp

FORWARD = "spmd.attention"
GRADIENT = "spmd.attention_grad"
PIECE = "spmd.attention_piece"
PIECE_GRADIENT = "spmd.attention_piece_grad"
ARITHMETIC = "attention"  # what their arithmetic is called in `Chip.efficiency`

_TERMS = {
    FORWARD: ("queries keys keys", "queries lse", PASS),
    GRADIENT: ("queries keys keys queries lse queries", "queries keys keys", REDUCE),
    PIECE: ("queries keys keys is_before queries lse", "queries lse", REPLICATE),
    PIECE_GRADIENT: (
        "queries keys keys queries lse queries is_before queries",
        "queries keys keys",
        REPLICATE,
    ),
}
"""Composite -> (names of its operands but masks, and of its results, in `attention_rule`'s terms;
kind of the factors of queries and of query heads of a key head: keys' gradients sum over these)."""

LEAST_PIECE = 512
"""The least size of a piece of gathered keys: a kernel for fewer takes longer than it saves. Pieces
that go round a ring may be smaller: the planner compares the time that they take."""

SEQUENCE = 1  # the dim of queries, keys and values that has their positions

Types = Sequence[TensorType]


def attention_rule(kind: OpKind) -> Rule:
    """Returns the rule of an attention composite, in which keys may go round a ring of devices.

    `b s (k g) d, b t k d, b t k d, .. -> b s (k g) d, b (k g) s {t: ring along s}`
    """
    operands, results, summed = _TERMS[kind.attrs["name"]]
    build, said, is_piece = RuleBuilder(), arguments_of(kind), _is_piece(kind)
    (batch, queries, heads, width), (_, keys, key_heads, _) = (t.shape for t in kind.operands[:2])
    b, s = build.factor(batch), build.factor(queries, summed)
    # Keys may go round where a device knows what it sees of a piece.
    is_own = said["length"] == queries == keys
    if is_piece or "window" in said or (said["causal"] and not is_own):
        t = build.factor(keys, REPLICATE)
    else:
        order = said.get("zigzag", 1)
        t = build.ring(keys, s, order if order > 1 else 0)
    d = build.factor(width, REPLICATE)
    # 8 query heads of 2 key heads are (k=2, g=4), major to minor as they lie: over 4 devices k is
    # split first, then g, and two devices share a key head.
    if heads == key_heads:
        n = k = build.factor(heads)
    elif key_heads == 1:  # a dim of one factor need not divide
        n, k = build.factor(heads, summed), build.factor(1, REPLICATE)
    else:
        k = build.factor(key_heads)
        n = k + build.factor(heads // key_heads, summed)
    terms = {"queries": [b, s, n, d], "keys": [b, t, k, d], "lse": [b, n, s], "is_before": []}
    masks = [[s]] if said["causal"] and not is_piece else []
    if said["segments"]:
        masks += [[b, s], [b, t]]
    return build.build(
        [*(terms[name] for name in operands.split()), *masks],
        [terms[name] for name in results.split()],
        reduction="add" if summed == REDUCE else "",
    )


def _is_piece(kind: OpKind) -> bool:
    return kind.attrs["name"] in (PIECE, PIECE_GRADIENT)


def attention_flops(kind: OpKind, products: int) -> float:
    """Returns the FLOPs of `products` matrix products over the keys that queries see.

    A part of the queries counts as the last part, which sees most keys and takes the longest.
    """
    (batch, queries, heads, width), (_, keys, _, _) = (t.shape for t in kind.operands[:2])
    said, seen = arguments_of(kind), 1.0
    if said["causal"] and said.get("zigzag", 1) > 1:
        seen = 0.5
    elif said["causal"] and not _is_piece(kind) and keys:
        seen = 1 - min(queries, keys) / (2 * keys)
    if keys:
        seen = min(seen, said.get("window", keys) / keys)
    return 2.0 * products * (batch * heads * queries * keys * width * seen)


def lower_forward(op: LocalOp) -> Sequence[Value]:
    """Appends attention to one device's program; returns output and logsumexp of its queries."""
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
    """Appends attention's gradient to one device's program; returns those of its q, k and v.

    Those of k and v are over all keys, if these were gathered, else of the device's own piece.
    """
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
        dq, *terms = here.piece(PIECE_GRADIENT, operands, keys, (b.types[dq], *here.key_types))
        sums = here.added(terms, sums) if here.goes_round else here.put(sums, place, terms)
    sums = here.added(own, sums) if here.goes_round else sums
    return b.convert(dq, type_.dtype), *sums


def _is_by_pieces(op: LocalOp) -> bool:
    """Whether an op is computed one piece of the keys after another, not over all keys at once."""
    (_, queries, _, _), (_, keys, _, _) = (t.shape for t in op.op.kind.operands[:2])
    split, said = op.dim(0, SEQUENCE), arguments_of(op.op.kind)
    pieces = op.mesh.extent(split.axes)
    if op.dim(1, SEQUENCE).axes:  # they go round
        return True
    is_own = said["causal"] and "window" not in said and said["length"] == queries == keys
    fits = 1 < pieces <= MOST_PIECES and said.get("zigzag", 1) in (1, pieces)
    return bool(is_own and fits and split.is_even and keys >= LEAST_PIECE * pieces)


class _Here:
    """Appends an attention op's parts to one device's program; masks follow `tensors` operands."""

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
    def key_types(self) -> tuple[TensorType, ...]:
        """The types of one piece of the keys, and of one of the values."""
        parts = 1 if self.goes_round else self.count
        return tuple(self.b.types[x].scaled(SEQUENCE, 1, parts) for x in self.keys[:2])

    def own(self, types: Types) -> tuple[Value, ...]:
        """Appends the op over this device's own piece of the keys; returns results of these types.

        If the op is causal, the mask within the piece is causal, too.
        """
        b, (q, _, _, *kept) = self.b, self.tensors
        k, v, *segments = self.keys if self.goes_round else self._slices(0)
        length = b.types[q].shape[SEQUENCE]
        positions = [b.iota(TensorType((length,), "i32"), 0)] if self.causal else []
        operands = q, k, v, *kept, *positions, *self.queries, *segments
        attrs = {**self.op.attrs, f"{PREFIX}length": length, f"{PREFIX}zigzag": 1}
        results = append_composite(b, operands, types, attrs)
        self._steps.append(results[0])
        return results

    def piece(
        self, name: str, operands: Sequence[Value], keys: Sequence[Value], types: Types
    ) -> tuple[Value, ...]:
        operands, attrs = (*operands, *self.queries, *keys[2:]), {**self.op.attrs, "name": name}
        results = append_composite(self.b, operands, types, attrs)
        self._steps.append(results[0])
        return results

    def is_before(self, place: int) -> Value:
        return self.b.compare("GE", self.number, self.b.constant(place, "i32"))

    def others(self, way: int) -> Iterator[tuple[int, Sequence[Value]]]:
        """Yields for each other device (steps back from this one to it in the ring, its keys).

        Its keys are its piece of keys, values and segments: if they are split, sent round the ring,
        in the direction `way` (1: to the next device, -1: to the previous); else a slice of all.
        """
        keys: Sequence[Value] = self.keys
        for i in range(1, self.count):
            place = i if way > 0 else self.count - i
            # No piece sets out before there is room: one is computed with while the next one comes.
            if self.goes_round and len(self._steps) > 1:
                keys = self.b.barrier((*keys, self._steps[-2]))[:-1]
            keys = [self._sent(x, way) for x in keys] if self.goes_round else self._slices(place)
            yield place, keys

    def _sent(self, x: Value, way: int) -> Value:
        b, pairs = self.b, to_next(self.axes, self.op.mesh, way)
        with b.noted(f"keys and values of {self.op.op.label} go round"):
            return b.collective("collective_permute", x, b.types[x], self.axes, pairs=pairs)

    def _slices(self, place: int) -> Sequence[Value]:
        start, length = self._start(place), self.key_types[0].shape[SEQUENCE]
        return [dynamic_take_dim(self.b, x, SEQUENCE, start, length) for x in self.keys]

    def _start(self, place: int) -> Value:
        b, length = self.b, self.key_types[0].shape[SEQUENCE]
        number = b.binary("add", self.number, b.constant(self.count - place, "i32"))
        number = b.binary("remainder", number, b.constant(self.count, "i32"))
        return b.binary("multiply", number, b.constant(length, "i32"))

    # Sums of what pieces owe to keys and values.

    def added(self, terms: Sequence[Value], sums: Sequence[Value]) -> Sequence[Value]:
        """Sends `sums` to the previous device; returns those from the next one plus `terms`."""
        if not sums:
            return terms
        arrived = [self._sent(x, -1) for x in sums]
        return [self.b.binary("add", x, y) for x, y in zip(arrived, terms, strict=True)]

    def put(self, sums: Sequence[Value], place: int, terms: Sequence[Value]) -> Sequence[Value]:
        """Returns `sums`, of all keys, with `terms` at the piece that is `place` steps back."""
        b, start, zero = self.b, self._start(place), self.b.constant(0, "i32")
        pairs = zip(sums, terms, strict=True)
        return [b.dynamic_update_slice(x, term, (zero, start, zero, zero)) for x, term in pairs]
