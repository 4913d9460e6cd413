"""Reads Hugging Face's `config.json`, and writes one for transformers.

Such a file can describe models that are not ours. A key that may change what the model computes is
either supported or an error. Only keys that are known to change nothing are ignored. What tells
families apart is in `family_parts.py`, rotary embeddings in `rope_keys.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from models.llama.config import ConfigError, LlamaConfig
from models.llama.weights.families import SIZES, Family, family_of, typed
from models.llama.weights.family_parts import read_parts, write_parts
from models.llama.weights.rope_keys import ROPE_KEYS, parse_rope, scaling_to_hf
from models.training.paths import AnyPath, as_path

CONFIG_FILE = "config.json"

_TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
"""Keys of tokens -> transformers' default for a Llama."""

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "use_mrope": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
}
"""Keys that change what is computed -> the values that we support, the usual one first.

A family reads some of them itself, with other values."""

_RUNNING = """
    model_type transformers_version _name_or_path name_or_path torch_dtype dtype use_cache
    _attn_implementation attn_implementation _attn_implementation_autoset _commit_hash
    _experts_implementation use_flash_attention_2 torchscript use_bfloat16 tf_legacy_loss
    output_attentions output_hidden_states return_dict use_return_dict return_dict_in_generate
    output_scores chunk_size_feed_forward is_decoder tie_encoder_decoder max_sequence_length
    pad_token_id sep_token_id cls_token_id decoder_start_token_id tokenizer_class prefix
    task_specific_params problem_type finetuning_task num_labels id2label label2id
"""
_GENERATING = """
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
"""
_HARMLESS = frozenset((_RUNNING + _GENERATING).split())
"""Keys that do not change what the model computes."""


def read_config(path: str | AnyPath, ignore_keys: Collection[str] = ()) -> LlamaConfig:
    """Reads the model that a `config.json` describes. The dtypes in it are ignored.

    Args:
        path: the file, or the folder that it is in.

    Raises:
        ConfigError: there is no such file, it is not a JSON object, the architecture is not
            Llama's or a relative's, or a key is unknown, not supported, or has the wrong type.

    Example:
        >>> config = read_config("/models/Llama-3.2-1B")
        >>> config = dataclasses.replace(config, dtype="bfloat16", scan_layers=False)
    """
    path = as_path(path)
    file = path / CONFIG_FILE if path.is_dir() else path
    values = _read_object(file)
    try:
        return parse_config(values, ignore_keys)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _read_object(file: AnyPath) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds {type(values).__name__}, not a JSON object")
    return values


def parse_config(values: Mapping[str, Any], ignore_keys: Collection[str] = ()) -> LlamaConfig:
    """Like `read_config`, for the content of a file."""
    family = family_of(values)
    _check_supported(values, family)
    _check_known(values, family, ignore_keys)
    given = {**SIZES, **_TOKENS, **family.defaults, **values}
    sizes = {key: typed(key, given[key], default) for key, default in SIZES.items()}
    theta, scaling = parse_rope(given, family.theta)
    return LlamaConfig(
        **sizes,
        **read_parts(values, family, sizes["num_hidden_layers"]),
        rope_theta=theta,
        rope_scaling=scaling,
        bos_token_id=_token_id("bos_token_id", given["bos_token_id"]),
        eos_token_id=_token_ids(given["eos_token_id"]),
    )


def _check_supported(values: Mapping[str, Any], family: Family) -> None:
    own = {"architectures": ([family.architecture], None), **dict(family.fixed)}
    checked = {**{k: v for k, v in _SUPPORTED.items() if k not in family.keys}, **own}
    wrong = [
        f"{key} is {json.dumps(values[key])}, not {json.dumps(supported[0])}"
        for key, supported in checked.items()
        if key in values and values[key] not in supported
    ]
    if wrong:
        raise ConfigError(
            f"a {values['model_type']} of this kind is not supported: {'; '.join(wrong)}"
        )


def _check_known(values: Mapping[str, Any], family: Family, ignore_keys: Collection[str]) -> None:
    own = {"architectures", *family.keys}
    known = {*SIZES, *ROPE_KEYS, *_TOKENS, *_SUPPORTED, *_HARMLESS, *own, *ignore_keys}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"unknown keys {', '.join(unknown)}, which might change the model; if they do not, "
            f"remove them, or pass --ignore_config_keys {','.join(unknown)} "
            "(ignore_keys of read_config)"
        )


def _token_id(key: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{key} must be a token id or null, not {json.dumps(value)}")


def _token_ids(value: Any) -> int | tuple[int, ...] | None:
    if not isinstance(value, list):
        return _token_id("eos_token_id", value)
    ids = (_token_id("eos_token_id", item) for item in value)
    return tuple(item for item in ids if item is not None)


# Writing


def to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` that transformers reads, from version 4.43 on.

    Args:
        dtype: of the stored weights.

    Raises:
        ConfigError: transformers does not support the model.
    """
    if config.model_type == "llama" and config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"transformers refuses a hidden_size, {config.hidden_size}, that is no multiple of "
            f"num_attention_heads, {config.num_attention_heads}"
        )
    own = {key: getattr(config, key) for key in SIZES}
    eos = config.eos_token_id
    return {
        **write_parts(config),
        **own,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **({"mlp_bias": False, "pretraining_tp": 1} if config.model_type == "llama" else {}),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "torch_dtype": dtype,
        "use_cache": True,
    }
