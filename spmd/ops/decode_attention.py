"""`decode_attention`: one query for every slot of a KV cache, read where it lies.

Shapes are in the names:

    B slots    K key heads    G query heads of one key head    T positions    D head

The composite `spmd.decode_attention` stays whole in the compiler, and in exported programs. On
NVIDIA GPUs it is a kernel that reads each position once, and none behind a slot's own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import arguments_of
from spmd.ir.dialect.rule import REPLICATE, Rule, parse_rule
from spmd.ir.program import OpKind
from spmd.lowering.register import register_composite
from spmd.ops import decode_attention_triton

NAME = "spmd.decode_attention"

KEYS, VALUES = 0, 1


def decode_attention(
    q_BKGD: Any, cache: Any, positions_B: Any, *, length: int, scales: Any = None
) -> jax.Array:
    """`softmax(q k / sqrt(D)) v` over positions 0 to `positions_B[b]` of slot b.

    Args:
      q_BKGD: queries.
      cache: keys and values, (B, 2, K, Tmax, D).
      positions_B: the last position that each slot sees.
      length: T: every one of `positions_B` is below it.
      scales: of quantized keys and values, (B, 2, K, Tmax).

    Returns:
      (B, K, G, D) in the dtype of `q_BKGD`; scores and softmax are in float32.

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> heads_BKGD = decode_attention(q_BKGD, cache, lengths_B, length=1024)
    """
    b, k, _, d = q_BKGD.shape if q_BKGD.ndim == 4 else (0, 0, 0, 0)
    fits = cache.ndim == 5 and (cache.shape[:3], cache.shape[4]) == ((b, 2, k), d)
    fits = fits and positions_B.shape == (b,) and 0 < length <= cache.shape[3]
    if not fits or (scales is not None and scales.shape != cache.shape[:4]):
        raise ArgumentError(
            "decode_attention cannot be computed",
            actual=f"q {q_BKGD.shape}, cache {cache.shape}, positions {positions_B.shape}, "
            f"length {length}, scales {None if scales is None else scales.shape}",
            required="q (B, K, G, D), cache (B, 2, K, Tmax, D), positions (B,), length <= Tmax, "
            "scales (B, 2, K, Tmax)",
            fix="correct the shapes",
        )
    operands = (q_BKGD, cache, positions_B, *(() if scales is None else (scales,)))
    heads: jax.Array = jax.lax.composite(_decomposition, NAME)(*operands, length=length)
    return heads


def _decomposition(q_BKGD: Any, cache: Any, positions_B: Any, *scales: Any, length: int) -> Any:
    dtype = q_BKGD.dtype
    stored = cache[:, :, :, :length].astype(dtype)
    scores_BKGT = jnp.einsum(
        "bkgd,bktd->bkgt", q_BKGD, stored[:, KEYS], preferred_element_type=jnp.float32
    )
    if scales:
        scores_BKGT *= scales[0][:, KEYS, :, None, :length]
    visible_BT = jnp.arange(length)[None] <= positions_B[:, None]
    scores_BKGT = jnp.where(
        visible_BT[:, None, None], scores_BKGT * q_BKGD.shape[-1] ** -0.5, np.finfo(np.float32).min
    )
    weights_BKGT = jax.nn.softmax(scores_BKGT, axis=-1)
    if scales:
        weights_BKGT *= jnp.where(
            visible_BT[:, None, None], scales[0][:, VALUES, :, None, :length], 0
        )
    # What lies behind a slot's position has no weight, but NaN is NaN without any.
    values_BKTD = jnp.where(visible_BT[:, None, :, None], stored[:, VALUES], 0)
    return jnp.einsum("bkgt,bktd->bkgd", weights_BKGT.astype(dtype), values_BKTD)


def _rule(kind: OpKind) -> Rule:
    terms = ("b k g d", "b p k t d", "b", "b p k t")[: len(kind.operands)]
    whole = dict.fromkeys(("p", "t", "d"), REPLICATE)
    return parse_rule(f"{', '.join(terms)} -> b k g d", kind.operands, kind.results, kinds=whole)


def _flops(kind: OpKind) -> float:
    b, k, g, d = kind.operands[0].shape
    return 4.0 * b * k * g * d * float(arguments_of(kind)["length"])


register_composite(
    NAME,
    _rule,
    decomposition=_decomposition,
    kernels={"cuda": decode_attention_triton.decode},
    flops=_flops,
)
