"""Reads and writes the keys of a `config.json` that say how heads are rotated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from models.llama.config import ROPE_TYPES, ConfigError, RopeScaling
from models.llama.weights.families import SIZES, typed

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


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
            f"default, {' and '.join(ROPE_TYPES)} are"
        )
    _check_keys(key, rope_type, entry)
    return _theta(key, entry, values, default), _scaling(key, rope_type, entry, values)


def _check_keys(key: str, rope_type: str, entry: Mapping[str, Any]) -> None:
    # transformers reads the original length for llama3 alone, but it stands with others too.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
    known |= {"original_max_position_embeddings"}
    if rope_type == "llama3":
        known |= {"low_freq_factor", "high_freq_factor"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(f"{key} has keys that {rope_type} scaling lacks: {', '.join(unknown)}")
    if entry.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor of {key} must be 1: whole heads are rotated")


def _scaling(
    key: str, rope_type: str, entry: Mapping[str, Any], values: Mapping[str, Any]
) -> RopeScaling | None:
    factor, low, high = (
        typed(f"{name} of {key}", entry.get(name), 0.0)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if rope_type == "default":
        if factor not in (0.0, 1.0):
            raise ConfigError(f"{key} has a factor, {factor}, but no rope_type to apply it")
        return None
    if not factor:
        raise ConfigError(f"{key} of type {rope_type} has no factor")
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=factor)
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low or None,
        high_freq_factor=high or None,
        original_max_position_embeddings=_original_length(entry, values),
    )


def _theta(key: str, entry: Mapping[str, Any], values: Mapping[str, Any], default: float) -> float:
    outer: float = typed("rope_theta", values.get("rope_theta"), default)
    inner: float = typed(f"rope_theta of {key}", entry.get("rope_theta"), outer)
    if inner != outer and values.get("rope_theta") is not None:
        raise ConfigError(f"rope_theta is {outer}, and {inner} in {key}; remove one of them")
    return inner


def _original_length(entry: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The length of sequences in pretraining, looked up in the same places as by transformers."""
    name = "original_max_position_embeddings"
    places = (values.get(name), entry.get(name), values.get("max_position_embeddings"))
    found = next((place for place in places if place is not None), None)
    length: int = typed(name, found, SIZES["max_position_embeddings"])
    return length


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The content of `rope_scaling`."""
    if scaling is None:
        return None
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
