"""Attention and its gradient in plain JAX: kernels have to compute the same.

Shapes are in the names, as in `spmd.ops.attention`; Q is a block of queries. Long sequences are
computed one block of queries after another, so that not all scores are in memory at once; the
gradient computes a block's scores again from the logsumexp that the forward pass kept (Dao et al.
2022, without the blocks of keys).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from spmd.ops import attention_order as order

MOST_SCORES = 1 << 20  # scores of one head and sequence that may be there at once
SMALLEST_BLOCK = 128  # queries of a block, at least


class Mask(NamedTuple):
    """Which keys each query sees: by positions, segments, both, or neither (then all keys)."""

    positions_S: Any = None  # where each query is in its sequence, if it sees no key behind it
    # queries_BS, keys_BT: segments, if a query sees just the keys of its own
    queries_BS: Any = None
    keys_BT: Any = None
    positions_T: Any = None  # where each key is, if they are not in their order

    def visible(self, keys: int, window: int | None = None) -> Any:
        """Returns (B or 1, S, T): whether each query sees each of `keys` keys; None if all do."""
        parts = []
        if self.positions_S is not None:
            positions_T = jnp.arange(keys) if self.positions_T is None else self.positions_T
            queries_1S1, keys_11T = self.positions_S[None, :, None], positions_T[None, None, :]
            parts.append(queries_1S1 >= keys_11T)
            if window is not None:
                parts.append(queries_1S1 - window < keys_11T)
        if self.queries_BS is not None:
            parts.append(self.queries_BS[:, :, None] == self.keys_BT[:, None, :])
        return functools.reduce(jnp.logical_and, parts) if parts else None


class Spec(NamedTuple):
    """The static parameters of an attention, which are the attributes of its composites."""

    causal: bool  # whether there are positions (S,)
    segments: bool  # whether there are segments (B, S) and (B, T)
    scale: float
    length: int  # queries of the whole sequence, of which a part may be here; 0 for any part
    logits_dtype: str
    window: int | None = None  # of the keys that a causal query sees, how many at most
    zigzag: int = 1  # the number of parts of a sequence in zigzag order; 1 for the usual one

    def mask(self, operands: Sequence[Any], keys: int) -> Mask:
        """Returns the mask over `keys` keys; `operands` are positions if causal, then segments."""
        positions, *segments = operands if self.causal else (None, *operands)
        queries_BS, keys_BT = segments or (None, None)
        positions_T = None if self.zigzag == 1 else order.positions(keys, self.zigzag)
        return Mask(positions, queries_BS, keys_BT, positions_T)


def forward(
    q_BSND: Any, k_BTKD: Any, v_BTKD: Any, *masks: Any, **attributes: Any
) -> tuple[Any, Any]:
    """Returns the output (B, S, N, D) and the logsumexp of the scores (B, N, S).

    `masks` are positions (S,) if causal, then segments (B, S) and (B, T) if there are any;
    `attributes` are the fields of `Spec`. The output of a query that sees no key is zero.
    """
    spec, keys = Spec(**attributes), k_BTKD.shape[1]

    def block(tensors: Sequence[Any], mask: Mask) -> tuple[Sequence[Any], Sequence[Any]]:
        (q_BQND,) = tensors
        scores_BKGQT, visible = _scores(q_BQND, k_BTKD, mask, spec)
        most = jnp.max(scores_BKGQT, -1, keepdims=True)
        weights_BKGQT = jnp.exp(scores_BKGQT - most)
        if visible is not None:
            weights_BKGQT = jnp.where(visible, weights_BKGQT, 0)
        total = jnp.sum(weights_BKGQT, -1, keepdims=True)
        total = jnp.where(total == 0, 1, total)
        weights_BKGQT = (weights_BKGQT / total).astype(v_BTKD.dtype)
        out = jnp.einsum(
            "bkgqt,btkd->bqkgd", weights_BKGQT, v_BTKD, preferred_element_type=spec.logits_dtype
        )
        lse_BQKG = jnp.moveaxis((most + jnp.log(total))[..., 0], 3, 1)
        lse_BQN = lse_BQKG.reshape(q_BQND.shape[:3]).astype(jnp.float32)
        return (out.reshape(q_BQND.shape).astype(q_BQND.dtype), lse_BQN), ()

    (out_BSND, lse_BSN), _ = _by_blocks(block, [q_BSND], spec.mask(masks, keys), keys, tuple)
    return out_BSND, jnp.swapaxes(lse_BSN, 1, 2)


def gradient(*operands: Any, **attributes: Any) -> tuple[Any, Any, Any]:
    """Returns gradients of q, k and v; operands are q, k, v, `forward`'s results, dout, masks."""
    q_BSND, k_BTKD, v_BTKD, out_BSND, lse_BNS, dout_BSND, *masks = operands
    spec, keys = Spec(**attributes), k_BTKD.shape[1]
    mask = spec.mask(masks, keys)

    def block(tensors: Sequence[Any], mask: Mask) -> tuple[Sequence[Any], Sequence[Any]]:
        # With weights P = softmax(S), out = P v and dP = dout v:
        #   dS = P * (dP - rowsum(P * dP)),   and   rowsum(P * dP) = dout . (P v) = dout . out
        # so `own` needs no sum over keys. P is exp(S - lse), by the forward pass's logsumexp.
        q_BQND, out_BQND, lse_BQN, dout_BQND = tensors
        logits_dtype = spec.logits_dtype
        dot = functools.partial(jnp.einsum, preferred_element_type=logits_dtype)
        heads = k_BTKD.shape[2]
        scores_BKGQT, visible = _scores(q_BQND, k_BTKD, mask, spec)
        lse_BKGQ = jnp.moveaxis(_grouped(lse_BQN, heads), 1, 3).astype(logits_dtype)
        weights_BKGQT = jnp.exp(scores_BKGQT - lse_BKGQ[..., None])
        if visible is not None:
            weights_BKGQT = jnp.where(visible, weights_BKGQT, 0)
        q, dout = _grouped(q_BQND, heads), _grouped(dout_BQND, heads)
        dv = dot("bkgqt,bqkgd->btkd", weights_BKGQT.astype(dout.dtype), dout)
        dweights_BKGQT = dot("bqkgd,btkd->bkgqt", dout, v_BTKD)
        own_BQN = jnp.sum(out_BQND.astype(logits_dtype) * dout_BQND.astype(logits_dtype), -1)
        own_BKGQ = jnp.moveaxis(_grouped(own_BQN, heads), 1, 3)
        dscores_BKGQT = weights_BKGQT * (dweights_BKGQT - own_BKGQ[..., None]) * spec.scale
        dscores_BKGQT = dscores_BKGQT.astype(q.dtype)
        dq = dot("bkgqt,btkd->bqkgd", dscores_BKGQT, k_BTKD)
        dk = dot("bkgqt,bqkgd->btkd", dscores_BKGQT, q)
        return [dq.reshape(q_BQND.shape)], [dk, dv]

    tensors = (q_BSND, out_BSND, jnp.swapaxes(lse_BNS, 1, 2), dout_BSND)
    (dq,), (dk, dv) = _by_blocks(
        block, tensors, mask, keys, lambda: [jnp.zeros(k_BTKD.shape, spec.logits_dtype)] * 2
    )
    return dq.astype(q_BSND.dtype), dk.astype(k_BTKD.dtype), dv.astype(v_BTKD.dtype)


def _scores(q_BQND: Any, k_BTKD: Any, mask: Mask, spec: Spec) -> tuple[Any, Any]:
    """Returns (scores (B, K, G, Q, T), lowest where not seen; which keys are seen, None if all)."""
    q_BQKGD = _grouped(q_BQND, k_BTKD.shape[2])
    dtype = spec.logits_dtype
    scores = jnp.einsum("bqkgd,btkd->bkgqt", q_BQKGD, k_BTKD, preferred_element_type=dtype)
    scores *= spec.scale
    visible_BQT = mask.visible(k_BTKD.shape[1], spec.window)
    if visible_BQT is None:
        return scores, None
    visible = visible_BQT[:, None, None]
    return jnp.where(visible, scores, jnp.finfo(dtype).min), visible


def _grouped(x_BQN: Any, heads: int) -> Any:
    """Reshapes (B, Q, N, ...) to (B, Q, K, G, ...), where K is `heads`."""
    batch, length, count, *rest = x_BQN.shape
    return x_BQN.reshape(batch, length, heads, count // heads, *rest)


def _by_blocks(
    block: Callable[[Sequence[Any], Mask], tuple[Sequence[Any], Sequence[Any]]],
    tensors: Sequence[Any],
    mask: Mask,
    keys: int,
    zeros: Callable[[], Sequence[Any]],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Calls `block` for blocks of queries, smaller the more `keys` there are, and of their mask.

    `block` takes tensors (B, Q, ...) and returns (values for its queries, terms). The result is
    (values for all queries, sums of the terms, which begin as `zeros()`).
    """
    batch, length = tensors[0].shape[:2]
    count = 1  # also where sizes are symbolic: it is traced again when they have values
    if not is_symbolic_dim(length * keys) and length * keys > MOST_SCORES:
        count = -(-length // max(SMALLEST_BLOCK, MOST_SCORES // keys))
    if count == 1:
        return block(tensors, mask)
    size = -(-length // count)

    def cut(x_BS: Any) -> Any:
        """Cuts (B, S, ...) into (blocks, B, Q, ...), padded with zeros."""
        widths = [(0, 0), (0, size * count - length), *((0, 0) for _ in x_BS.shape[2:])]
        padded = jnp.pad(x_BS, widths).reshape(x_BS.shape[0], count, size, *x_BS.shape[2:])
        return jnp.moveaxis(padded, 1, 0)

    def joined(x: Any) -> Any:
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :length]

    def step(sums: list[Any], blocks: Any) -> tuple[list[Any], Sequence[Any]]:
        found, terms = block(*blocks)
        return [x + y for x, y in zip(sums, terms, strict=True)], found

    pieces = [cut(x) for x in tensors]
    positions, queries, *whole = mask
    masks = Mask(
        None if positions is None else cut(positions[None])[:, 0],
        None if queries is None else cut(queries),
        *(x if x is None else jnp.broadcast_to(x, (count, *x.shape)) for x in whole),
    )
    sums, found = jax.lax.scan(step, list(zeros()), (pieces, masks))
    return [joined(x) for x in found], sums
