"""A mixture of experts in the place of a layer's MLP: which a token takes, and what they add.

Shapes are in the names, as in `model.py`, and

    E experts    C choices of a token

The router is Mixtral's (Jiang et al. 2024): a softmax over all experts in float32, of which each
token takes the largest. No expert has a capacity, and no token is dropped: see `spmd.ops.experts`.
"""

from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.models.llama.config import LlamaConfig

Loads = jax.Array
"""(2, E) of some tokens: how often each expert was taken and its probability, in the mean."""


def mixture(weights: Any, x_BSH: jax.Array, config: LlamaConfig) -> tuple[jax.Array, Loads]:
    """The sum of each token's experts, weighted by the router.

    Args:
        weights: `gate` and `experts` of a layer's `mlp`.
        x_BSH: the layer's normalized input.
    """
    gates_BSC, chosen_BSC, loads = route(weights["gate"]["weight"], x_BSH, config)
    names = ("gate_proj", "up_proj", "down_proj")
    given = (weights["experts"][name]["weight"].astype(x_BSH.dtype) for name in names)
    return spmd.ops.experts(x_BSH, gates_BSC, chosen_BSC, *given), loads


def route(
    weight_EH: jax.Array, x_BSH: jax.Array, config: LlamaConfig
) -> tuple[jax.Array, jax.Array, Loads]:
    """(weights of each token's experts (B, S, C) in float32, the experts (B, S, C), the loads)."""
    x32_BSH, weight32_EH = x_BSH.astype(jnp.float32), weight_EH.astype(jnp.float32)
    shares_BSE = jax.nn.softmax(jnp.einsum("bsh,eh->bse", x32_BSH, weight32_EH), axis=-1)
    gates_BSC, chosen_BSC = jax.lax.top_k(shares_BSE, config.num_experts_per_tok)
    if config.norm_topk_prob:
        gates_BSC /= jnp.sum(gates_BSC, axis=-1, keepdims=True)
    is_chosen_BSCE = chosen_BSC[..., None] == jnp.arange(config.num_experts)
    taken_E = jnp.mean(jnp.sum(is_chosen_BSCE, axis=2, dtype=jnp.float32), axis=(0, 1))
    return gates_BSC, chosen_BSC, jnp.stack([taken_E, jnp.mean(shares_BSE, axis=(0, 1))])


def balance(loads: Loads) -> jax.Array:
    """The load-balancing loss, from the mean of all layers' loads; the number of choices at best.

    It is that of transformers: `E * sum(taken * probability)` (Fedus et al. 2022, equation 4), of
    means over all tokens of all layers.
    """
    return loads.shape[1] * jnp.sum(loads[0] * loads[1])
