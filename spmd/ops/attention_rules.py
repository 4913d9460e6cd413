"""How attention may be split: the rules and costs of its composites.

Batches, heads and queries go to different devices; every device has all of each head's width, and
all keys of its heads, or a part of them like that of the queries, which then goes round. A device
with a part of the queries knows from their positions where it is. With more devices than key heads,
several have the same key head for different query heads.

What is done with one piece of the keys is a composite of its own, in one device's program alone.
"""

from __future__ import annotations

from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.rule import PASS, REDUCE, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind

FORWARD = "spmd.attention"
GRADIENT = "spmd.attention_grad"
PIECE = "spmd.attention_piece"
PIECE_GRADIENT = "spmd.attention_piece_grad"
ARITHMETIC = "attention"  # what their arithmetic is called in `Chip.efficiency`

Dims = list[DimFactors]


def forward_rule(kind: OpKind) -> Rule:
    """`b s (k g) d, b t k d, b t k d, .. -> b s (k g) d, b (k g) s {t: ring along s}`."""
    build = RuleBuilder()
    queries, keys, lse, masks = _terms(kind, build, PASS)
    return build.build([queries, keys, keys, *masks], [queries, lse])


def gradient_rule(kind: OpKind) -> Rule:
    """As forward; gradients of keys are sums over the queries and the query heads that read them.

    `b s (k g) d, b t k d, b t k d, b s (k g) d, b (k g) s, b s (k g) d, ..
    -> b s (k g) d, b t k d, b t k d {s: reduce add, g: reduce add, t: ring along s}`
    """
    build = RuleBuilder()
    queries, keys, lse, masks = _terms(kind, build, REDUCE)
    operands = [queries, keys, keys, queries, lse, queries, *masks]
    return build.build(operands, [queries, keys, keys], reduction="add")


def piece_rule(kind: OpKind) -> Rule:
    """As forward, with whether a piece is before, and what pieces gave; queries stay whole."""
    build = RuleBuilder()
    queries, keys, lse, masks = _terms(kind, build, REPLICATE)
    return build.build([queries, keys, keys, [], queries, lse, *masks], [queries, lse])


def piece_gradient_rule(kind: OpKind) -> Rule:
    """As gradient, with whether a piece is before, and the queries' gradient so far."""
    build = RuleBuilder()
    queries, keys, lse, masks = _terms(kind, build, REPLICATE)
    operands = [queries, keys, keys, queries, lse, queries, [], queries, *masks]
    return build.build(operands, [queries, keys, keys])


def _terms(kind: OpKind, build: RuleBuilder, summed: str) -> tuple[Dims, Dims, Dims, list[Dims]]:
    """The dims of queries and outputs, of keys and values, of the logsumexp, and of each mask.

    Queries, and the query heads of a key head, are factors of the kind `summed`.
    """
    (batch, queries, heads, width), (_, _, key_heads, _) = (t.shape for t in kind.operands[:2])
    # 8 query heads of 2 key heads are (k=2, g=4), major to minor as they lie: over 4 devices k is
    # split first, then g, and two devices share a key head.
    b, s = build.factor(batch), build.factor(queries, summed)
    said = arguments_of(kind)
    t, d = _keys(kind, build, s), build.factor(width, REPLICATE)
    if heads == key_heads:
        n = k = build.factor(heads)
    elif key_heads == 1:  # a dim of one factor need not divide
        n, k = build.factor(heads, summed), build.factor(1, REPLICATE)
    else:
        k = build.factor(key_heads)
        n = k + build.factor(heads // key_heads, summed)
    masks: list[Dims] = [[s]] if said["causal"] and not _is_piece(kind) else []
    if said["segments"]:
        masks += [[b, s], [b, t]]
    return [b, s, n, d], [b, t, k, d], [b, n, s], masks


def _keys(kind: OpKind, build: RuleBuilder, s: DimFactors) -> DimFactors:
    """The factor of the keys: they may go round where a device knows what it sees of a piece."""
    queries, keys = (t.shape[1] for t in kind.operands[:2])
    said = arguments_of(kind)
    is_own = said["length"] == queries == keys
    if _is_piece(kind) or "window" in said or (said["causal"] and not is_own):
        return build.factor(keys, REPLICATE)
    order = said.get("zigzag", 1)
    return build.ring(keys, s, order if order > 1 else 0)


def _is_piece(kind: OpKind) -> bool:
    return kind.attrs["name"] in (PIECE, PIECE_GRADIENT)


def forward_flops(kind: OpKind) -> float:
    """Two products, of which a causal mask leaves what its queries see."""
    return 4.0 * _points(kind)


def gradient_flops(kind: OpKind) -> float:
    """Five products: the scores again, and two for each of the two products."""
    return 10.0 * _points(kind)


def _points(kind: OpKind) -> float:
    """Points of one product's iteration space, without those that a causal mask or a window hides.

    For a part of the queries those of the last part count, which sees most: all wait for it.
    """
    (batch, queries, heads, width), (_, keys, _, _) = (t.shape for t in kind.operands[:2])
    said, seen = arguments_of(kind), 1.0
    if said["causal"] and said.get("zigzag", 1) > 1:
        seen = 0.5
    elif said["causal"] and not _is_piece(kind) and keys:
        seen = 1 - min(queries, keys) / (2 * keys)
    if keys:
        seen = min(seen, said.get("window", keys) / keys)
    return batch * heads * queries * keys * width * seen
