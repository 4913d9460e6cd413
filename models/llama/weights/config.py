"""Reads Hugging Face's `config.json`, and writes one for transformers.

Such a file can describe models that are not ours. A key that may change what the model computes is
either supported or an error. Only keys that are known to change nothing are ignored. What tells
families apart is in `families.py`.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from spmd.models.llama.config import (
    ROPE_NUMBERS,
    ROPE_TYPES,
    ConfigError,
    LlamaConfig,
    RopeScaling,
)
from spmd.models.llama.weights import bundled, families, packed
from spmd.models.llama.weights.families import SIZES, typed
from spmd.models.training.paths import AnyPath, as_path

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
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
}
"""Keys that change what is computed -> the values that we support, the usual one first.

A family reads some of them itself, with other values."""

_RUNNING = """
    model_type transformers_version _name_or_path name_or_path torch_dtype dtype use_cache
    initial_context_length
    _attn_implementation attn_implementation _attn_implementation_autoset _commit_hash
    _experts_implementation use_flash_attention_2 torchscript use_bfloat16 tf_legacy_loss
    output_attentions output_hidden_states return_dict use_return_dict return_dict_in_generate
    output_scores chunk_size_feed_forward is_decoder tie_encoder_decoder max_sequence_length
    pad_token_id sep_token_id cls_token_id decoder_start_token_id tokenizer_class prefix
    aux_loss_alpha seq_aux ep_size qk_head_dim num_nextn_predict_layers num_mtp_layers
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
        path: the file, or the folder that it is in, or a bundle's.

    Raises:
        ConfigError: there is no such file, it is not a JSON object, the architecture is not
            Llama's or a relative's, or a key is unknown, not supported, or has the wrong type.

    Example:
        >>> config = read_config("/models/Llama-3.2-1B")
        >>> config = dataclasses.replace(config, dtype="bfloat16", scan_layers=False)
    """
    path = as_path(path)
    if path.is_dir() and bundled.is_bundle(path):
        return bundled.read_manifest(path)[0]
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds {type(values).__name__}, not a JSON object")
    try:
        return parse_config(values, ignore_keys)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_config(values: Mapping[str, Any], ignore_keys: Collection[str] = ()) -> LlamaConfig:
    """Like `read_config`, for the content of a file."""
    family = families.family_of(values)
    values = _with_one_rope(values)
    bare = family.architecture.replace("ForCausalLM", "Model")  # saved without a head
    own = {"architectures": ([family.architecture], [bare], None), **dict(family.fixed)}
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
    packed.check_quantization(values.get(packed.KEY))
    known = {*SIZES, *ROPE_KEYS, *_TOKENS, *_SUPPORTED, *_HARMLESS, *own, *family.keys, packed.KEY}
    unknown = sorted(set(values) - known - set(ignore_keys))
    if unknown:
        raise ConfigError(
            f"unknown keys {', '.join(unknown)}, which might change the model; if they do not, "
            f"remove them, or pass --ignore_config_keys {','.join(unknown)} "
            "(ignore_keys of read_config)"
        )
    given = {**SIZES, **_TOKENS, **family.defaults, **values}
    sizes = {key: typed(key, given[key], default) for key, default in SIZES.items()}
    if not any(map(given.get, ROPE_KEYS[1:3])):
        given["rope_scaling"] = family.rope_scaling
    theta, scaling = parse_rope(given, family.theta)
    eos = given["eos_token_id"]
    if isinstance(eos, list):
        ids = (_token_id("eos_token_id", item) for item in eos)
        eos = tuple(item for item in ids if item is not None)
    else:
        eos = _token_id("eos_token_id", eos)
    return LlamaConfig(
        **{**sizes, **families.read_parts(values, family, sizes["num_hidden_layers"])},
        rope_theta=theta,
        rope_scaling=scaling,
        bos_token_id=_token_id("bos_token_id", given["bos_token_id"]),
        eos_token_id=eos,
    )


def _token_id(key: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{key} must be a token id or null, not {json.dumps(value)}")


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
    eos, scaling = config.eos_token_id, config.rope_scaling
    scaled = {} if scaling is None else dataclasses.asdict(scaling)
    return {
        **families.write_parts(config),
        **own,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.rope_width,
        "hidden_act": config.hidden_act,
        "attention_dropout": 0.0,
        **({"mlp_bias": False, "pretraining_tp": 1} if config.model_type == "llama" else {}),
        "rope_theta": config.rope_theta,
        "rope_scaling": {key: x for key, x in scaled.items() if x is not None} or None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "torch_dtype": dtype,
        "use_cache": True,
    }


# How heads are rotated.

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


def _with_one_rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with `rope_parameters` of each kind of layers as the keys that were before them."""
    nested = values.get("rope_parameters")
    if not isinstance(nested, dict) or not set(nested) & {families.FULL, families.SLIDING}:
        return values
    local = nested.get(families.SLIDING) or {}
    if set(local) - {"rope_theta", "rope_type"} or local.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters of {families.SLIDING} are not supported: {local}")
    theta = local.get("rope_theta", values.get("rope_local_base_freq"))
    own = {"rope_parameters": nested.get(families.FULL), "rope_local_base_freq": theta}
    return {**values, **own}


def parse_rope(values: Mapping[str, Any], default: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). `rope_scaling` beside `rope_theta` is the older form."""
    found = {
        key: _parse_entry(key, values[key], values, default)
        for key in ("rope_scaling", "rope_parameters")
        if values.get(key)
    }
    if len(set(found.values())) > 1:
        raise ConfigError("rope_scaling and rope_parameters disagree; remove one of them")
    if found:
        return next(iter(found.values()))
    return typed("rope_theta", values.get("rope_theta"), default), None


def _parse_entry(
    key: str, entry: Any, values: Mapping[str, Any], default: float
) -> tuple[float, RopeScaling | None]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{key} must be an object or null, not {json.dumps(entry)}")
    rope_type = entry.get("rope_type", entry.get("type", "default"))
    if rope_type not in ("default", *ROPE_TYPES):
        raise ConfigError(
            f"rope_type {json.dumps(rope_type)} of {key} is not supported; "
            f"default, {', '.join(ROPE_TYPES)} are"
        )
    # transformers reads the original length for llama3 alone, but it stands with others too.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
    known |= {"original_max_position_embeddings"}
    known |= set(ROPE_NUMBERS.get(rope_type, ()))
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(f"{key} has keys that {rope_type} scaling lacks: {', '.join(unknown)}")
    if entry.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor of {key} must be 1: whole heads are rotated")
    outer: float = typed("rope_theta", values.get("rope_theta"), default)
    theta: float = typed(f"rope_theta of {key}", entry.get("rope_theta"), outer)
    if theta != outer and values.get("rope_theta") is not None:
        raise ConfigError(f"rope_theta is {outer}, and {theta} in {key}; remove one of them")
    return theta, _scaling(key, rope_type, entry, values)


def _scaling(
    key: str, rope_type: Any, entry: Mapping[str, Any], values: Mapping[str, Any]
) -> RopeScaling | None:
    factor = typed(f"factor of {key}", entry.get("factor"), 0.0)
    if rope_type == "default":
        if factor not in (0.0, 1.0):
            raise ConfigError(f"{key} has a factor, {factor}, but no rope_type to apply it")
        return None
    if not factor:
        raise ConfigError(f"{key} of type {rope_type} has no factor")
    usual = {"beta_slow": 1.0, "beta_fast": 32.0}
    numbers: dict[str, Any] = {
        number: typed(f"{number} of {key}", entry.get(number), 0.0) or usual.get(number)
        for number in ROPE_NUMBERS[rope_type]
        if number != "truncate"
    }
    # The length of sequences in pretraining, looked up in the same places as by transformers.
    name = "original_max_position_embeddings"
    if name in numbers:
        places = (values.get(name), entry.get(name), values.get("max_position_embeddings"))
        found = next((place for place in places if place is not None), None)
        numbers[name] = typed(name, found, SIZES["max_position_embeddings"])
    if "truncate" in ROPE_NUMBERS[rope_type]:
        numbers["truncate"] = typed(f"truncate of {key}", entry.get("truncate"), True) and None
    return RopeScaling(rope_type=rope_type, factor=factor, **numbers)
