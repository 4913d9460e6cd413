"""Attention by two einsums, with all attention weights in memory: open to marks.

Shapes are in the names, as in `model.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from models.llama.marks import Mark


def einsum_attention(
    q_BSND: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    mark: Mark,
    segment_ids_BS: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal attention by two einsums. The weights between them are in memory and can be marked."""
    groups = q_BSND.shape[2] // k_BTKD.shape[2]
    k_BTND, v_BTND = repeat_heads(k_BTKD, groups), repeat_heads(v_BTKD, groups)
    weights_BNST = attention_weights(q_BSND, k_BTND, segment_ids_BS, window)
    weights_BNST = mark("attention_weights", weights_BNST)
    return jnp.einsum("bnst,btnd->bsnd", weights_BNST, v_BTND)


def attention_weights(
    q_BSND: jax.Array,
    k_BTND: jax.Array,
    segment_ids_BS: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal `softmax(q k / sqrt(D))`, computed in float32.

    Returns:
        Weights (B, N, S, T) in the dtype of `q`. With segments, a token sees only its own segment;
        with a window, itself and the tokens just before it, so many in all.
    """
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", q_BSND, k_BTND, preferred_element_type=jnp.float32)
    scores_BNST *= q_BSND.shape[-1] ** -0.5
    queries_S1, keys_1T = jnp.arange(q_BSND.shape[1])[:, None], jnp.arange(k_BTND.shape[1])[None, :]
    visible_ST = queries_S1 >= keys_1T
    if window is not None:
        visible_ST &= queries_S1 - window < keys_1T
    scores_BNST = jnp.where(visible_ST, scores_BNST, np.finfo(np.float32).min)
    if segment_ids_BS is not None:
        same_BST = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
        scores_BNST = jnp.where(same_BST[:, None], scores_BNST, np.finfo(np.float32).min)
    return jax.nn.softmax(scores_BNST, axis=-1).astype(q_BSND.dtype)


def repeat_heads(x_BTKD: jax.Array, groups: int) -> jax.Array:
    """Repeats each key head `groups` times in a row, once for each query head: (B, T, K * G, D).

    The copies are small next to the weights (B, N, S, T), and the dim of all heads can be split
    over more devices than there are key heads.
    """
    if groups == 1:
        return x_BTKD
    batch, length, heads, width = x_BTKD.shape
    x_BTKGD = jnp.broadcast_to(x_BTKD[:, :, :, None, :], (batch, length, heads, groups, width))
    return x_BTKGD.reshape(batch, length, heads * groups, width)
