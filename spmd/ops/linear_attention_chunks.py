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
the last line alone is a scan. Where a document starts, what lies before it has no weight.
"""

from __future__ import annotations

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
    states, last_BNDP = chunks.states(state_BNDP)
    u = chunks.written(states)
    q = _cut(q_BSKD, chunks.size).astype(u.dtype)
    scores = jnp.einsum("bzikd,bzjkd->bzkij", q, chunks.k)[:, :, :, None] * chunks.pairs
    out = jnp.einsum("bzkgij,bzjkgp->bzikgp", scores, u)
    out += jnp.einsum("bzikd,bzikg,bzkgdp->bzikgp", q, chunks.before, states)
    out_BSNP = jax.lax.collapse(scale * out, 1, 3)[:, : v_BSNP.shape[1]].reshape(v_BSNP.shape)
    return out_BSNP.astype(v_BSNP.dtype), last_BNDP.astype(state_BNDP.dtype)


def gradient(*operands: Any, **said: Any) -> tuple[Any, ...]:
    """Returns gradients of q, k, v, decay, beta if `delta`, and of the state before the sequence.

    Operands are those of `forward`, then the gradients of its results. Nothing else is kept of the
    forward pass: it is run again, and holds a state for each chunk.
    """
    *given, dout_BSNP, dlast_BNDP = operands
    floats = [i for i, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(*chosen: Any) -> Any:
        return forward(*_with(given, floats, chosen), **said)

    pull = jax.vjp(run, *(given[i] for i in floats))[1]
    return tuple(pull((dout_BSNP, dlast_BNDP)))


def _with(given: Any, places: Any, chosen: Any) -> list[Any]:
    new = dict(zip(places, chosen, strict=True))
    return [new.get(i, x) for i, x in enumerate(given)]


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
        decay_BKG = jnp.prod(chunks.whole, axis=1)
        return decay_BKG.reshape(batch, heads, 1, 1), chunks.states(zeros)[1]
    # M is what the part makes of the identity where nothing is added: D more columns of the state.
    one = jnp.broadcast_to(jnp.eye(depth, dtype=zeros.dtype), (*zeros.shape[:3], depth))
    wide = chunks._replace(u=jnp.pad(chunks.u, [(0, 0)] * 5 + [(0, depth)]))
    last = wide.states(jnp.concatenate([zeros, one], axis=-1))[1]
    return last[..., width:], last[..., :width]


def owed(*operands: Any, **said: Any) -> Any:
    """Returns (B, N, D, P): the gradient of the state before a part, by the part's outputs alone.

    Operands are those of `forward` without v, with the outputs' gradient in the place of the state.
    """
    *given, dout_BSNP = operands
    q_BSKD, (*_, heads, width) = given[0], dout_BSNP.shape
    zeros = jnp.zeros((len(q_BSKD), heads, q_BSKD.shape[-1], width), _wide(q_BSKD))

    def run(state_BNDP: Any) -> Any:
        nothing = jnp.zeros_like(dout_BSNP)
        return forward(*given[:2], nothing, *given[2:], state_BNDP, **said)[0]

    return jax.vjp(run, zeros)[1](dout_BSNP)[0]


def step(m: Any, h: Any, state_BNDP: Any, *, back: bool = False) -> Any:
    """Returns `M S + H`, or `M^T S + H` for gradients, which go back; M is as from `part`."""
    if m.shape[2:] == (1, 1):
        return m * state_BNDP + h
    return jnp.einsum("bned,bnep->bndp" if back else "bnde,bnep->bndp", m, state_BNDP) + h


class _Chunks(NamedTuple):
    """What chunks make of keys and decays before any state is known."""

    size: int  # C
    k: Any  # (B, Z, C, K, D)
    u: Any  # (B, Z, C, K, G, P): what is written if the state before the chunk is zero
    w: Any  # (B, Z, C, K, G, D): less so many times the state; None without beta
    pairs: Any  # (B, Z, K, G, C, C): the decay from position j to i, 0 where j is not seen
    # before, after (B, Z, C, K, G): decays from before the chunk to a position, and to its end
    before: Any
    after: Any
    whole: Any  # (B, Z, K, G): that of the chunk

    @staticmethod
    def of(*operands: Any, delta: bool, segments: bool, chunk: int) -> _Chunks:
        """Operands are k, v, decay, then beta if `delta` and starts if `segments`."""
        k_BSKD, v_BSNP, decay_BSN, *rest = operands
        dtype, size = _wide(k_BSKD), max(1, min(chunk, k_BSKD.shape[1]))

        def heads(x_BSN: Any) -> Any:
            x = _cut(x_BSN, size).astype(dtype)
            groups = x.shape[3] // k_BSKD.shape[2]
            return x.reshape(*x.shape[:3], k_BSKD.shape[2], groups, *x_BSN.shape[3:])

        k, v = _cut(k_BSKD, size).astype(dtype), heads(v_BSNP)
        sums = jnp.cumsum(heads(decay_BSN), axis=2)
        sums_j = jnp.moveaxis(sums, 2, -1)
        number = jnp.cumsum(_cut(rest[-1], size), axis=2) if segments else jnp.zeros(k.shape[:3])
        seen = (number[..., :, None] == number[..., None, :]) & jnp.tri(size, dtype=bool)
        seen = seen[:, :, None, None]
        # Decays that are not seen are growth, without bound: so `where` twice, for the gradient.
        pairs = jnp.where(seen, sums_j[..., :, None] - sums_j[..., None, :], 0)
        pairs = jnp.where(seen, jnp.exp(pairs), 0)
        is_first, is_last = (
            (number == x)[..., None, None] for x in (jnp.zeros_like(number), number[:, :, -1:])
        )
        before = jnp.where(is_first, jnp.exp(sums), 0)
        after = jnp.where(is_last, jnp.moveaxis(pairs[..., -1, :], -1, 2), 0)
        made = _Chunks(size, k, v, None, pairs, before, after, before[:, :, -1])
        if not delta:
            return made
        beta = heads(rest[0])
        products = jnp.einsum("bzikd,bzjkd->bzkij", k, k)[:, :, :, None] * pairs
        lower = jnp.tril(products * jnp.moveaxis(beta, 2, -1)[..., None], -1)
        inverse = _inverse(lower)
        u = jnp.einsum("bzkgij,bzjkg,bzjkgp->bzikgp", inverse, beta, v)
        w = jnp.einsum("bzkgij,bzjkg,bzjkd->bzikgd", inverse, beta * before, k)
        return made._replace(u=u, w=w)

    def states(self, state_BNDP: Any) -> tuple[Any, Any]:
        """Returns the state before each chunk (B, Z, K, G, D, P), and the last (B, N, D, P)."""
        first = state_BNDP.reshape(len(self.k), *self.whole.shape[2:], *state_BNDP.shape[2:])

        def next_state(state: Any, chunk: Any) -> tuple[Any, Any]:
            k, u, w, after, whole = chunk
            if w is not None:
                u = u - jnp.einsum("bikgd,bkgdp->bikgp", w, state)
            added = jnp.einsum("bikd,bikg,bikgp->bkgdp", k, after, u)
            return whole[..., None, None] * state + added, state

        xs = (self.k, self.u, self.w, self.after, self.whole)
        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
        last, states = jax.lax.scan(next_state, first.astype(self.k.dtype), xs)
        return jnp.moveaxis(states, 0, 1), last.reshape(state_BNDP.shape)

    def written(self, states: Any) -> Any:
        """Returns what is written at each position (B, Z, C, K, G, P), from `states`."""
        if self.w is None:
            return self.u
        return self.u - jnp.einsum("bzikgd,bzkgdp->bzikgp", self.w, states)


def _wide(x: Any) -> Any:
    """The dtype of states and of all arithmetic: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _cut(x_BS: Any, size: int) -> Any:
    """(B, S, ...) -> (B, Z, C, ...), padded by zeros, which write nothing and decay nothing."""
    padding = [(0, 0), (0, -x_BS.shape[1] % size), *((0, 0) for _ in x_BS.shape[2:])]
    x_BS = jnp.pad(x_BS, padding)
    return x_BS.reshape(len(x_BS), x_BS.shape[1] // size, size, *x_BS.shape[2:])


@jax.custom_vjp
def _inverse(lower: Any) -> Any:
    """Returns `(1 + lower)^-1` of strictly lower triangular matrices (..., C, C)."""
    # Inverses of the blocks on the diagonal, of sizes 1, 2, 4, ..., by matrix products alone:
    #   1 + lower = [A 0]    its inverse = [ A^-1             0  ]
    #               [L B]                  [-B^-1 L A^-1    B^-1]
    # A series of powers of `lower` would need fewer, but equal keys make its terms 1e17.
    count = lower.shape[-1]
    at = jnp.arange(count)
    inverse = jnp.broadcast_to(jnp.eye(count, dtype=lower.dtype), lower.shape)
    size = 1
    while size < count:
        block = at // size
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
