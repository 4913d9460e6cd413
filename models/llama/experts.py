"""A mixture of experts in the place of a layer's MLP: which a token takes, and what they add.

Shapes are in the names, as in `model.py`, and

    E experts    C choices of a token

The router is Mixtral's (Jiang et al. 2024), a softmax over all experts in float32, of which each
token takes the largest; or DeepSeek-V3's (DeepSeek-AI 2024, equations 12 to 16), of sigmoids, where
a bias for each expert counts in the choice, and experts of some groups alone are chosen among. No
expert has a capacity, and no token is dropped: see `spmd.ops.experts`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.models.llama.config import LlamaConfig

Loads = jax.Array
"""(2, E) of some tokens: how often each expert was taken and its probability, in the mean."""


def mixture(
    weights: Any, x_BSH: jax.Array, config: LlamaConfig, hot: int = 0
) -> tuple[jax.Array, Loads]:
    """The sum of each token's experts, weighted by the router.

    Args:
        weights: `gate` and `experts` of a layer's `mlp`.
        x_BSH: the layer's normalized input.
        hot: so many experts, those that most tokens of the batch take, are computed apart: each
            device gets them, for its own tokens. The others wait less for the devices they are on.
    """
    gates_BSC, chosen_BSC, loads = route(weights["gate"], x_BSH, config)
    of = [weights["experts"][name] for name in ("gate_proj", "up_proj", "down_proj")]
    more: dict[str, Any] = {}
    if "values" in of[0]:  # see `quantize.py`
        given = [each["values"] for each in of]
        more["scales"] = tuple(each["scales"] for each in of)
    else:
        given = [each["weight"].astype(x_BSH.dtype) for each in of]
    if config.swiglu_limit:
        more["biases"] = tuple(each["bias"].astype(x_BSH.dtype) for each in of)
    run = functools.partial(spmd.ops.experts, x_BSH, gates_BSC, limit=config.swiglu_limit or None)
    if not hot:
        return run(chosen_BSC, *given, **more), loads
    hottest_D = jax.lax.top_k(loads[0], hot)[1]
    is_hot_BSCD = chosen_BSC[..., None] == hottest_D
    near_BSC = jnp.where(jnp.any(is_hot_BSCD, -1), jnp.argmax(is_hot_BSCD, -1), -1)
    taken, more_taken = jax.tree.map(lambda w: jnp.take(w, hottest_D, axis=0), (given, more))
    out_BSH = run(near_BSC, *taken, **more_taken)
    return out_BSH + run(jnp.where(near_BSC < 0, chosen_BSC, -1), *given, **more), loads


def route(gate: Any, x_BSH: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array, Loads]:
    """(weights of each token's experts (B, S, C) in float32, the experts (B, S, C), the loads)."""
    x32_BSH, weight32_EH = x_BSH.astype(jnp.float32), gate["weight"].astype(jnp.float32)
    logits_BSE = jnp.einsum("bsh,eh->bse", x32_BSH, weight32_EH)
    if "bias" in gate:
        logits_BSE += gate["bias"].astype(jnp.float32)
    if config.scoring_func == "softmax":
        shares_BSE = jax.nn.softmax(logits_BSE, axis=-1)
        favored_BSE = in_groups(shares_BSE, config)
        gates_BSC, chosen_BSC = jax.lax.top_k(favored_BSE, config.num_experts_per_tok)
    else:
        scores_BSE = jax.nn.sigmoid(logits_BSE)
        shares_BSE = scores_BSE / jnp.sum(scores_BSE, axis=-1, keepdims=True)
        bias_E = gate["e_score_correction_bias"].astype(jnp.float32)
        favored_BSE = in_groups(jax.lax.stop_gradient(scores_BSE + bias_E), config)
        _, chosen_BSC = jax.lax.top_k(favored_BSE, config.num_experts_per_tok)
        gates_BSC = jnp.take_along_axis(scores_BSE, chosen_BSC, axis=-1)
    if config.norm_topk_prob:
        gates_BSC /= jnp.sum(gates_BSC, axis=-1, keepdims=True)
    if config.routed_scaling_factor != 1:
        gates_BSC *= config.routed_scaling_factor
    is_chosen_BSCE = chosen_BSC[..., None] == jnp.arange(config.num_experts)
    if config.router_bias_rate:
        counts_E = jnp.sum(is_chosen_BSCE, axis=(0, 1, 2), dtype=jnp.int32).astype(jnp.float32)
        bias_E = gate["e_score_correction_bias"]
        gates_BSC = counted(gates_BSC, bias_E, counts_E, config.stages > 1)
    taken_E = jnp.mean(jnp.sum(is_chosen_BSCE, axis=2, dtype=jnp.float32), axis=(0, 1))
    return gates_BSC, chosen_BSC, jnp.stack([taken_E, jnp.mean(shares_BSE, axis=(0, 1))])


def counted(
    gates_BSC: jax.Array, bias_E: jax.Array, counts_E: jax.Array, in_pipeline: bool
) -> jax.Array:
    """The gates; whatever the loss, the gradient of the bias is `counts_E`.

    So counts reach the step as gradients do: from scans, recomputed layers and stages. A stage of
    a pipeline that is idle gets gradients of 0, and counts nothing.
    """

    def backward(counts_E: jax.Array, grad_BSC: jax.Array) -> Any:
        loads_E = jnp.where(jnp.any(grad_BSC != 0), counts_E, 0) if in_pipeline else counts_E
        return grad_BSC, loads_E, jnp.zeros_like(counts_E)

    same = jax.custom_vjp(lambda gates_BSC, *_: gates_BSC)
    same.defvjp(lambda *given: (given[0], given[2]), backward)
    found: jax.Array = same(gates_BSC, bias_E, counts_E)
    return found


def in_groups(favored_BSE: jax.Array, config: LlamaConfig) -> jax.Array:
    """What speaks for each expert; nothing for those outside of a token's `topk_group` groups."""
    if config.n_group == 1:
        return favored_BSE
    grouped = favored_BSE.reshape(*favored_BSE.shape[:-1], config.n_group, -1)
    best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, chosen = jax.lax.top_k(best, config.topk_group)
    is_chosen = jnp.any(chosen[..., None] == jnp.arange(config.n_group), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(favored_BSE.shape)


def balance(loads: Loads) -> jax.Array:
    """The load-balancing loss, from the mean of all layers' loads; the number of choices at best.

    It is that of transformers: `E * sum(taken * probability)` (Fedus et al. 2022, equation 4), of
    means over all tokens of all layers.
    """
    return loads.shape[1] * jnp.sum(loads[0] * loads[1])
