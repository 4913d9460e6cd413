"""Tiny checkpoints that transformers itself writes, and what transformers computes with them."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

LONG = 48
"""Tokens of a sequence: three times what the scaled variants were "pretrained" with."""

TOKENS_BS = np.random.default_rng(0).integers(3, 128, (4, LONG)).astype(np.int32)

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

_LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "heads": {"num_key_value_heads": 4},
    "grouped": {},
    "llama3": {
        "rope_parameters": _LLAMA3, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "bos_token_id": 126, "eos_token_id": [126, 127],
    },
    "linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        "num_key_value_heads": 4,
    },
    "head_dim": {"head_dim": 16, "rms_norm_eps": 1e-5},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 1, "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "biased": {
        "model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True,
    },
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "router_aux_loss_coef": 0.1,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "deepseek_v2": {**_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {
        **_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 24, "n_group": 4, "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 2.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7,
        "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5,
        "initializer_range": 0.2, "router_aux_loss_coef": 0.1,
        "rope_parameters": {**_YARN, "truncate": False},
    },
}  # fmt: skip
"""Name -> what differs from a small Llama 2."""

FAMILIES = tuple(name for name, given in VARIANTS.items() if "model_type" in given)
"""The variants that are Llama with a difference."""

SHARDED = "grouped"
"""The variant that is written in several files."""


def write(variant: str, folder: Path, **changes: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    given = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
        **{"model_type": "llama", **VARIANTS[variant]}, **changes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(**given)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size="20KB" if variant == SHARDED else "5GB")


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def with_random_biases(params: Any) -> Any:
    """Parameters whose biases, fresh ones being 0, are random."""
    rng = np.random.default_rng(3)

    def drawn(path: Any, leaf: Any) -> Any:
        if "bias" not in jax.tree_util.keystr(path):
            return leaf
        return leaf + rng.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, params)


@functools.cache
def theirs(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_logits(folder: Path) -> np.ndarray:
    """transformers' logits (B, S, V) of `TOKENS_BS`."""
    import torch

    with torch.no_grad():
        return theirs(folder)(torch.tensor(TOKENS_BS, dtype=torch.long)).logits.numpy()


def their_continuation(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """transformers' greedy continuation, whatever ends a text."""
    import torch
    import transformers

    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    with torch.no_grad():
        ids = theirs(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=settings,
        )
    return ids[0, len(prompt) :].tolist()
