"""Reads and writes the keys of a `config.json` that tell families apart.

Which keys a family has is in `families.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from models.llama.config import ConfigError, LlamaConfig
from models.llama.weights.families import FAMILIES, Family, typed

FULL, SLIDING = "full_attention", "sliding_attention"

WINDOW = 4096
"""transformers' default of `sliding_window`, where a family has one."""

_FIELDS = {field.name: field for field in dataclasses.fields(LlamaConfig)}


def read_parts(values: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """The fields of `LlamaConfig` that tell families apart.

    Args:
        values: the content of a `config.json`.

    Raises:
        ConfigError: a key has a value that is not one of its own, or windows are not in the last
            layers.
    """
    window, first = _read_window(values, family, layers)
    return {
        "model_type": values["model_type"],
        "attention_bias": _read_bias(values, family),
        "qk_norm": family.qk_norm,
        "sliding_window": window,
        "max_window_layers": first,
        **_read_experts(values, family),
    }


def _read_experts(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of experts; none if the family has none."""
    found: dict[str, Any] = {}
    for field, keys in family.experts:
        given = {key: values[key] for key in keys if values.get(key) is not None}
        default = family.defaults.get(keys[0])
        if len(set(given.values())) > 1:
            raise ConfigError(f"{' and '.join(given)} disagree; remove one of them")
        for key, value in given.items():
            typed(key, value, default)
        found[field] = next(iter(given.values()), default)
    return found


def _read_bias(values: Mapping[str, Any], family: Family) -> str:
    if family.attention_bias is not None:
        return family.attention_bias
    return "qkvo" if _flag(values, "attention_bias") else "none"


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value not in (True, False, None) or isinstance(value, int) != isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {json.dumps(value)}")
    return bool(value)


def _read_window(values: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, int]:
    """(the window, how many layers in front have none)."""
    default = family.defaults.get("sliding_window", WINDOW)
    window = values.get("sliding_window", default) if family.window else None
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"sliding_window must be a positive integer, not {json.dumps(window)}")
    if "use_sliding_window" in family.window and not _flag(values, "use_sliding_window"):
        window = None
    if "layer_types" not in family.window:
        return window, 0
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ConfigError(f"max_window_layers must be an integer, not {json.dumps(first)}")
    else:
        first = list(types).count(FULL)
        if list(types) != [FULL] * first + [SLIDING] * (layers - first):
            raise ConfigError(
                f"layer_types has to be {FULL} for some of {layers} layers, then {SLIDING} for the "
                f"others, not {json.dumps(types)}"
            )
        if window is None and first < layers:
            raise ConfigError(f"layer_types has {SLIDING}, and use_sliding_window is not true")
    return (window, first) if window is not None and first < layers else (None, 0)


def write_parts(config: LlamaConfig) -> dict[str, Any]:
    """The keys of a `config.json` that tell families apart.

    Raises:
        ConfigError: the family's models have not what this one has.
    """
    family = FAMILIES[config.model_type]
    has_window = config.sliding_window is not None
    layered = {
        "use_sliding_window": has_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers if has_window else config.num_hidden_layers,
    }
    keys = {
        "model_type": config.model_type,
        "architectures": [family.architecture],
        **{keys[0]: getattr(config, field) for field, keys in family.experts},
        **{key: supported[0] for key, supported in family.fixed},
        **{key: value for key, value in layered.items() if key in family.window},
        "attention_bias": config.attention_bias == "qkvo",
    }
    if family.attention_bias == "qkv":
        del keys["attention_bias"]
    if "moe_intermediate_size" in keys:
        keys["moe_intermediate_size"] = config.expert_width
    read = read_parts(keys, family, config.num_hidden_layers)
    wrong = [
        f"{name} {getattr(config, name)!r}"
        for name in ("attention_bias", "qk_norm", "num_experts", "norm_topk_prob")
        if read.get(name, _FIELDS[name].default) != getattr(config, name)
    ]
    as_read = dataclasses.replace(config, **{"moe_intermediate_size": None, **read})
    if as_read.expert_width != config.expert_width:
        wrong.append(f"moe_intermediate_size {config.moe_intermediate_size}")
    if as_read.window_spans != config.window_spans:
        wrong.append(f"a window of {config.sliding_window} from layer {config.max_window_layers}")
    if wrong:
        raise ConfigError(f"transformers has no {config.model_type} with {', '.join(wrong)}")
    return keys
