"""The models that have a name: published ones, Llama and its relatives, and small ones to try."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from spmd.models.llama.config import ConfigError, LlamaConfig

Fields = Mapping[str, Any]


def _sized(fields: Fields, hidden: int, inner: int, layers: int, heads: int) -> Fields:
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    return {**fields, **sizes, "num_hidden_layers": layers, "num_attention_heads": heads}


# Llama

_LLAMA2_7B: Fields = {
    **_sized({}, 4096, 11_008, 32, 32),
    "vocab_size": 32_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_8B: Fields = {
    **_sized({}, 4096, 14_336, 32, 32),
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}


def _long(fields: Fields, factor: float) -> Fields:
    """A Llama 3 of 8192 tokens -> one of 131072."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**fields, "rope_scaling": scaling, "max_position_embeddings": 131_072}


def _small(hidden: int, layers: int, heads: int, width: int) -> Fields:
    """A Llama 3.2: tied embeddings, and a smaller model's sizes."""
    fields = _sized(_LLAMA3_8B, hidden, 8192, layers, heads)
    return _long({**fields, "head_dim": width, "tie_word_embeddings": True}, factor=32.0)


_LLAMA3_70B = _sized(_LLAMA3_8B, 8192, 28_672, 80, 64)

# Its relatives

_MISTRAL_7B: Fields = {
    **_sized({}, 4096, 14_336, 32, 32),
    "model_type": "mistral",
    "vocab_size": 32_000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _qwen25(
    hidden: int, inner: int, layers: int, heads: int, keys: int, vocab: int, **more: Any
) -> Fields:
    """A Qwen 2.5: biases on queries, keys and values."""
    return {
        **_sized({}, hidden, inner, layers, heads),
        "model_type": "qwen2",
        "attention_bias": "qkv",
        "vocab_size": vocab,
        "num_key_value_heads": keys,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "bos_token_id": 151_643,
        "eos_token_id": 151_643,
        **more,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Fields:
    """A Qwen 3: norms of queries and keys, heads of 128."""
    return {
        **_sized({}, hidden, inner, layers, heads),
        "model_type": "qwen3",
        "qk_norm": True,
        "head_dim": 128,
        "vocab_size": 151_936,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    }


_EIGHT_EXPERTS: Fields = {
    "model_type": "mixtral",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}
_MIXTRAL_8X7B: Fields = {
    **_MISTRAL_7B,
    **_EIGHT_EXPERTS,
    "rope_theta": 1e6,
}
_QWEN3_30B: Fields = {
    **_qwen3(2048, 6144, 48, 32),
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "router_aux_loss_coef": 0.001,
}


def _gemma3(hidden: int, inner: int, layers: int) -> Fields:
    """A small Gemma 3, of text alone."""
    return {
        **_sized({}, hidden, inner, layers, 4),
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262_144,
        "qk_norm": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_offset": 1.0,
        "post_norms": True,
        "scale_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }


def _yarn(scale: float) -> Fields:
    numbers = {"beta_slow": 1.0, "beta_fast": 32.0, "mscale": scale, "mscale_all_dim": scale}
    length = {"original_max_position_embeddings": 4096}
    return {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, **numbers, **length}}


_DEEPSEEK_V2_LITE: Fields = {
    **_sized(_yarn(0.707), 2048, 10_944, 27, 16),
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "bos_token_id": 100_000,
    "eos_token_id": 100_001,
}
_DEEPSEEK_V3: Fields = {
    **_sized({**_DEEPSEEK_V2_LITE, **_yarn(1.0)}, 7168, 18_432, 61, 128),
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "q_lora_rank": 1536,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GPT_OSS_120B: Fields = {
    **_sized({}, 2880, 2880, 36, 64),
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": "qkvo",
    "attention_sinks": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.9,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_slow": 1.0, "beta_fast": 32.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131_072,
    "bos_token_id": 199_998,
    "eos_token_id": 200_002,
}  # fmt: skip

_SMALL = {"tie_word_embeddings": True}
_SHORT = {**_SMALL, "max_position_embeddings": 32_768}

PUBLISHED: Mapping[str, Fields] = MappingProxyType(
    {
        "llama2-7b": _LLAMA2_7B,
        "llama2-13b": _sized(_LLAMA2_7B, 5120, 13_824, 40, 40),
        "llama2-70b": {**_sized(_LLAMA2_7B, 8192, 28_672, 80, 64), "num_key_value_heads": 8},
        "llama3-8b": _LLAMA3_8B,
        "llama3-70b": _LLAMA3_70B,
        "llama3.1-8b": _long(_LLAMA3_8B, factor=8.0),
        "llama3.1-70b": _long(_LLAMA3_70B, factor=8.0),
        "llama3.1-405b": _long(_sized(_LLAMA3_70B, 16_384, 53_248, 126, 128), factor=8.0),
        "llama3.2-1b": _small(2048, 16, heads=32, width=64),
        "llama3.2-3b": _small(3072, 28, heads=24, width=128),
        "llama3.3-70b": _long(_LLAMA3_70B, factor=8.0),
        "mistral-7b": {**_MISTRAL_7B, "sliding_window": 4096},
        "mistral-7b-v0.3": {**_MISTRAL_7B, "vocab_size": 32_768, "rope_theta": 1e6},
        "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, 151_936, **_SHORT),
        "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, 151_936, **_SMALL),
        "qwen2.5-3b": _qwen25(2048, 11_008, 36, 16, 2, 151_936, **_SHORT),
        "qwen2.5-7b": _qwen25(3584, 18_944, 28, 28, 4, 152_064),
        "qwen2.5-14b": _qwen25(5120, 13_824, 48, 40, 8, 152_064, rms_norm_eps=1e-5),
        "qwen2.5-32b": _qwen25(5120, 27_648, 64, 40, 8, 152_064, rms_norm_eps=1e-5),
        "qwen2.5-72b": _qwen25(8192, 29_568, 80, 64, 8, 152_064, rms_norm_eps=1e-5),
        "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
        "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
        "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
        "qwen3-14b": _qwen3(5120, 17_408, 40, 40),
        "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
        "mixtral-8x7b": _MIXTRAL_8X7B,
        "mixtral-8x22b": {
            **_sized(_MIXTRAL_8X7B, 6144, 16_384, 56, 48),
            "max_position_embeddings": 65_536,
            "router_aux_loss_coef": 0.001,
        },
        "gemma3-270m": _gemma3(640, 2048, 18),
        "gemma3-1b": _gemma3(1152, 6912, 26),
        "qwen3-30b-a3b": _QWEN3_30B,
        "qwen3-235b-a22b": {
            **_sized(_QWEN3_30B, 4096, 12_288, 94, 64),
            "moe_intermediate_size": 1536,
        },
        "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
        "deepseek-v3": _DEEPSEEK_V3,
        "gpt-oss-20b": {**_GPT_OSS_120B, "num_hidden_layers": 24, "num_experts": 32},
        "gpt-oss-120b": _GPT_OSS_120B,
    }
)
"""Name -> what such a model is, as first published; `mistral-7b` is 0.1."""

# All of them

_BYTES: Fields = {"vocab_size": 256}

CONFIGS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        name: LlamaConfig(**fields)
        for name, fields in {
            "tiny": {**_sized(_BYTES, 32, 64, 2, 4), "num_key_value_heads": 2},
            "quickstart": {**_sized(_BYTES, 128, 512, 4, 4), "initializer_range": 0.08},
            "quickstart-experts": {
                **_sized(_BYTES, 128, 256, 4, 4),
                **_EIGHT_EXPERTS,
                "initializer_range": 0.08,
            },
            **PUBLISHED,
        }.items()
    }
)
"""The named configurations: three small ones, and those that were published."""


def named_config(name: str) -> LlamaConfig:
    """The configuration called `name`.

    Raises:
        ConfigError: there is none of that name; lists those there are.
    """
    if name not in CONFIGS:
        raise ConfigError(f"no model is called {name!r}; there are {', '.join(CONFIGS)}")
    return CONFIGS[name]
