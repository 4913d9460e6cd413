"""Linear attention on one device: matrix products inside chunks of a sequence, a scan over chunks.

Shapes are in the names, as in `spmd.ops.linear_attention`, and

    Z chunks    C positions of a chunk (i of the one that reads, j of the one that is read)
    G heads of one key head (N = K * G)

With `a_i` the product of the decays of a chunk's positions up to i, and `S` the state before the
chunk, what its positions write solves a triangular system (Yang, Kautz, Hatamizadeh 2025, *Gated
Delta Networks*; Yang et al. 2024, *Parallelizing Linear Transformers with the Delta Rule*):

    u_i = beta_i (v_i - a_i k_i S - sum over j < i of a_i / a_j (k_i . k_j) u_j)
    out_i = a_i q_i S + sum over j <= i of a_i / a_j (q_i . k_j) u_j
    S' = a_C S + sum over j of a_C / a_j k_j u_j

Without `beta`, `u` is `v`: the dual form of Mamba-2 (Dao, Gu 2024). All is affine in `S`, so that
only the last line, as `S' = a_C S + H - M S`, is a scan. What lies before a document has no weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def forward(
    *operands: Any, delta: bool, segments: bool, scale: float, chunk: int, length: int = 0
) -> tuple[Any, Any]:
    """Returns (B, S, N, P) in the dtype of v, and the state (B, N, D, P) behind the sequence.

    Operands are q, k, v, decay, then beta if `delta`, starts (B, S) if `segments`, and the state
    before the sequence. `length` is that of the whole sequence, of which a part may be here.
    """
    q_BSKD, _, v_BSNP, *_, state_BNDP = operands
    chunks = _Chunks.of(*operands[1:-1], delta=delta, segments=segments, chunk=chunk)
    last_BNDP, states = chunks.states(state_BNDP)
    q = jnp.moveaxis(_cut(q_BSKD, chunks.size), 2, 3).astype(chunks.k.dtype)
    scores = (q @ jnp.swapaxes(chunks.k, -1, -2))[:, :, :, None] * chunks.pairs
    reads = q[:, :, :, None] * chunks.before[..., None]
    if delta:  # what is written less because of the state is read of it right away
        reads -= scores @ chunks.w
    out = scale * (scores @ chunks.u + reads @ states)
    out_BSNP = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(len(v_BSNP), -1, *v_BSNP.shape[2:])
    return out_BSNP[:, : v_BSNP.shape[1]].astype(v_BSNP.dtype), last_BNDP.astype(state_BNDP.dtype)


def gradient(*operands: Any, **said: Any) -> tuple[Any, ...]:
    """Returns gradients of q, k, v, decay, beta if `delta`, and of the state before the sequence.

    Operands are those of `forward`, then the gradients of its results. Nothing else is kept of the
    forward pass: it is run again, and holds a state for each chunk.
    """
    *given, dout_BSNP, dlast_BNDP = operands
    found = jax.vjp(partial(forward, **said), *given)[1]((dout_BSNP, dlast_BNDP))
    return tuple(x for x in found if x.dtype != jax.dtypes.float0)  # that of starts


# What a part of a sequence does to any state before it, and to any gradient of the state behind it.


def part(*operands: Any, delta: bool, segments: bool, chunk: int) -> tuple[Any, Any]:
    """Returns (M, H): a part of a sequence makes the state M S + H of a state S before it.

    H is (B, N, D, P), M (B, N, D, D) if `delta`, else (B, N, 1, 1). Operands are those of `forward`
    without q and the state.
    """
    chunks = _Chunks.of(*operands, delta=delta, segments=segments, chunk=chunk)
    (batch, _, _, depth), (*_, heads, width) = operands[0].shape, operands[1].shape
    zeros = jnp.zeros((batch, heads, depth, width), chunks.k.dtype)
    if not delta:
        return jnp.prod(chunks.whole, 0).reshape(batch, heads, 1, 1), chunks.states(zeros)[0]
    # M is what the part makes of the identity where nothing is added: D more columns of the state.
    one = jnp.broadcast_to(jnp.eye(depth, dtype=zeros.dtype), (*zeros.shape[:3], depth))
    wide = chunks._replace(u=jnp.pad(chunks.u, [(0, 0)] * 5 + [(0, depth)]))
    last = wide.states(jnp.concatenate([zeros, one], axis=-1))[0]
    return last[..., width:], last[..., :width]


def owed(*operands: Any, **said: Any) -> Any:
    """Returns (B, N, D, P): the gradient of the state before a part, by the part's outputs alone.

    Operands are those of `forward` without v, with the outputs' gradient in the place of the state.
    """
    (q_BSKD, *given, dout_BSNP), (*_, heads, width) = operands, operands[-1].shape
    zeros = jnp.zeros((len(q_BSKD), heads, q_BSKD.shape[-1], width), _wide(q_BSKD))
    given[1:1] = [jnp.zeros_like(dout_BSNP)]
    return gradient(q_BSKD, *given, zeros, dout_BSNP, zeros, **said)[-1]


def step(m: Any, h: Any, state_BNDP: Any, *, back: bool = False) -> Any:
    """Returns `M S + H`, or `M^T S + H` for gradients, which go back; M is as from `part`."""
    if m.shape[2:] == (1, 1):
        return m * state_BNDP + h
    return jnp.einsum("bned,bnep->bndp" if back else "bnde,bnep->bndp", m, state_BNDP) + h


class _Chunks(NamedTuple):
    """What chunks make of keys and decays before any state is known."""

    size: int  # C
    k: Any  # (Z, B, K, C, D)
    u: Any  # (Z, B, K, G, C, P): what is written if the state before the chunk is zero
    w: Any  # (Z, B, K, G, C, D): less so many times the state; None without beta
    pairs: Any  # (Z, B, K, G, C, C): the decay from position j to i, 0 where j is not seen
    before: Any  # (Z, B, K, G, C): the decay from before the chunk to a position
    after: Any  # (Z, B, K, G, C): that from a position to the chunk's end
    whole: Any  # (Z, B, K, G): that of the chunk

    @staticmethod
    def of(*operands: Any, delta: bool, segments: bool, chunk: int) -> _Chunks:
        """Operands are k, v, decay, then beta if `delta` and starts if `segments`."""
        k_BSKD, v_BSNP, decay_BSN, *rest = operands
        dtype, size = _wide(k_BSKD), max(1, min(chunk, k_BSKD.shape[1]))

        def heads(x_BSN: Any) -> Any:
            keys, of_one = k_BSKD.shape[2], v_BSNP.shape[2] // k_BSKD.shape[2]
            x = _cut(x_BSN, size).astype(dtype)
            return jnp.moveaxis(x.reshape(*x.shape[:3], keys, of_one, *x.shape[4:]), 2, 4)

        k, v = jnp.moveaxis(_cut(k_BSKD, size), 2, 3).astype(dtype), heads(v_BSNP)
        sums = jnp.cumsum(heads(decay_BSN), axis=-1)
        number = _cut(rest[-1], size).cumsum(2)[:, :, None, None] if segments else jnp.zeros(size)
        seen = (number[..., :, None] == number[..., None, :]) & jnp.tri(size, dtype=bool)
        # Decays that are not seen are growth, without bound: so `where` twice, for the gradient.
        pairs = jnp.where(seen, sums[..., :, None] - sums[..., None, :], 0)
        pairs = jnp.where(seen, jnp.exp(pairs), 0)
        before = jnp.where(number == 0, jnp.exp(sums), 0)
        after = jnp.where(number == number[..., -1:], pairs[..., -1, :], 0)
        made = _Chunks(size, k, v, None, pairs, before, after, before[..., -1])
        if not delta:
            return made
        beta = heads(rest[0])[..., None]
        products = (k @ jnp.swapaxes(k, -1, -2))[:, :, :, None] * pairs
        inverse = _inverse(jnp.tril(beta * products, -1))
        w = inverse @ (beta * before[..., None] * k[:, :, :, None])
        return made._replace(u=inverse @ (beta * v), w=w)

    def states(self, state_BNDP: Any) -> tuple[Any, Any]:
        """Returns the last state (B, N, D, P), and that before each chunk (Z, B, K, G, D, P)."""
        first = state_BNDP.astype(self.k.dtype)
        first = first.reshape(*self.whole.shape[1:], *first.shape[2:])
        kept = jnp.swapaxes(self.k[:, :, :, None] * self.after[..., None], -1, -2)
        if len(self.whole) == 1:  # as when decoding: a D x D matrix would be more than all else
            u = self.u if self.w is None else self.u - self.w @ first
            last, states = self.whole[0, ..., None, None] * first + (kept @ u)[0], first[None]
        else:
            less = None if self.w is None else kept @ self.w
            last, states = _walk(kept @ self.u, less, self.whole, first, False)
        return last.reshape(state_BNDP.shape), states


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _walk(more: Any, less: Any, whole: Any, first: Any, back: bool) -> tuple[Any, Any]:
    """Returns the last S of `S' = whole S + more - less S`, and all before; gradients go `back`."""

    def step(state: Any, chunk: Any) -> tuple[Any, Any]:
        more, less, whole = chunk
        if less is not None:
            more -= (jnp.swapaxes(less, -1, -2) if back else less) @ state
        return whole[..., None, None] * state + more, state

    # A turn's kernels are short, and several turns share those that cut operands and collect S.
    return jax.lax.scan(step, first, (more, less, whole), reverse=back, unroll=4)


def _walk_forward(more: Any, less: Any, whole: Any, first: Any, back: bool) -> tuple[Any, Any]:
    found = _walk(more, less, whole, first, back)
    return found, (less, whole, found[1])


def _walk_backward(back: bool, kept: Any, given: Any) -> tuple[Any, ...]:
    less, whole, states = kept
    dfirst, owed = _walk(given[1], less, whole, given[0], not back)
    one, other = (states, owed) if back else (owed, states)
    dless = None if less is None else -(one @ jnp.swapaxes(other, -1, -2))
    return owed, dless, jnp.sum(owed * states, axis=(-2, -1)), dfirst


_walk.defvjp(_walk_forward, _walk_backward)


def _wide(x: Any) -> Any:
    """The dtype of states and of all arithmetic: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _cut(x_BS: Any, size: int) -> Any:
    """(B, S, ...) -> (Z, B, C, ...), padded by zeros, which write nothing and decay nothing."""
    x = jnp.pad(x_BS, [(0, 0), (0, -x_BS.shape[1] % size), *[(0, 0)] * (x_BS.ndim - 2)])
    return jnp.swapaxes(x.reshape(len(x), x.shape[1] // size, size, *x.shape[2:]), 0, 1)


@jax.custom_vjp
def _inverse(lower: Any) -> Any:
    """Returns `(1 + lower)^-1` of strictly lower triangular matrices (..., C, C)."""
    # Inverses of the blocks on the diagonal, of sizes 1, 2, 4, ..., by matrix products alone:
    #   1 + lower = [A 0]    its inverse = [ A^-1             0  ]
    #               [L B]                  [-B^-1 L A^-1    B^-1]
    # A series of powers of `lower` would need fewer, but equal keys make its terms 1e17.
    count = lower.shape[-1]
    if count > 16 and count % 2 == 0:  # what is left of small blocks is not computed
        half = count // 2
        a, b = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
        return jnp.block([[a, jnp.zeros_like(a)], [-(b @ lower[..., half:, :half] @ a), b]])
    inverse, size = jnp.broadcast_to(jnp.eye(count, dtype=lower.dtype), lower.shape), 1
    while size < count:
        block = jnp.arange(count) // size
        is_left = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        inverse -= inverse @ jnp.where(is_left, lower, 0) @ inverse
        size *= 2
    return inverse


def _inverse_forward(lower: Any) -> tuple[Any, Any]:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Any, given: Any) -> tuple[Any]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-(turned @ given @ turned),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
