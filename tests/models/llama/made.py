"""A DeepSeek, fresh parameters and the forward pass compiled once for all tests; trees compared."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import spmd
from spmd.models.llama import fresh, model, sharding
from spmd.models.llama.config import LlamaConfig, RopeScaling
from spmd.models.llama.named import CONFIGS

LATENT = dataclasses.replace(
    CONFIGS["tiny"], model_type="deepseek_v3", num_hidden_layers=4, num_key_value_heads=None,
    kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=1,
    first_k_dense_replace=2, scoring_func="sigmoid", n_group=4, topk_group=2,
    routed_scaling_factor=2.5, initializer_range=0.2, router_aux_loss_coef=0.1,
    rope_scaling=RopeScaling(
        rope_type="yarn", factor=8.0, beta_slow=1.0, beta_fast=4.0, mscale=2.0,
        mscale_all_dim=1.0, original_max_position_embeddings=16,
    ),
)  # fmt: skip
"""All of DeepSeek-V3."""


@functools.cache
def fresh_params(config: LlamaConfig, seed: int = 0) -> Any:
    return jax.jit(functools.partial(fresh.init, config=config))(jax.random.key(seed))


def structs(config: LlamaConfig) -> Any:
    return jax.eval_shape(functools.partial(fresh.init, config=config), jax.random.key(0))


def shardings_of(config: LlamaConfig, mesh: spmd.Mesh) -> Any:
    return jax.tree.map(lambda s: s.sharding, sharding.mark_params(structs(config), mesh, config))


def flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


@functools.cache
def forward(config: LlamaConfig) -> Any:
    return jax.jit(functools.partial(model.forward, config=config))


def assert_close(found: Any, wanted: Any, rtol: float, atol: float = 0.0) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, wanted)
