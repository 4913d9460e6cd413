"""The tree of a model's parameters, and its other forms.

Layers are stacked or apart; where products are in 8-bit floats, states of their scales lie beside
the weights.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

import spmd
from spmd.models.llama.config import LlamaConfig

Params = dict[str, Any]
"""Nested dicts of arrays, under Hugging Face's names."""

QUERY_KEY_VALUE, OUTPUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
GATE_AND_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)

TOGETHER = (
    *(QUERY_KEY_VALUE, OUTPUT, GATE_AND_UP, DOWN, ("q_b_proj",), ("kv_b_proj",)),
    *((query, "kv_a_proj_with_mqa") for query in ("q_a_proj", "q_proj")),
)
"""Projections of a layer, those together that read one input."""

FP8 = "fp8"
"""Beside the projections of a block: the states of their 8-bit products, by the names of each."""

TEACHER = "teacher"
"""Beside a model's parameters: those of the teacher that it is distilled from."""


def with_states(params: Params, config: LlamaConfig) -> Params:
    """The parameters with states of their 8-bit products; fresh ones where they have none."""
    add = functools.partial(layer_with_states, config=config)
    if config.scan_layers:
        return on_stacks(jax.vmap(add), params)
    return on_stacks(lambda layers: {at: add(layer) for at, layer in layers.items()}, params)


def on_stacks(change: Callable[[Params], Params], params: Params) -> Params:
    """The parameters with their layers changed: all of `LlamaConfig.stacks`."""
    first = {"dense": on_stacks(change, params["dense"])} if "dense" in params else {}
    return {**params, **first, "layers": change(params["layers"])}


def without_states(params: Params) -> Params:
    """The parameters without states, as they are loaded and exported."""
    return {
        name: without_states(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if name != FP8
    }


def without_teacher(params: Params) -> Params:
    """The parameters of a model alone, where those of its teacher stand among them."""
    return {name: part for name, part in params.items() if name != TEACHER}


def layer_with_states(layer: Params, config: LlamaConfig) -> Params:
    """One layer's parameters with fresh states of its products, if these are in 8-bit floats."""
    if config.matmul != "fp8":
        return layer
    return layer | {block: _block_with_states(layer[block]) for block in ("self_attn", "mlp")}


def _block_with_states(weights: Params) -> Params:
    fresh = {
        " ".join(names): spmd.ops.fp8_state(tuple(weights[name]["weight"] for name in names))
        for names in TOGETHER
        if all(name in weights for name in names)
    }
    return {FP8: fresh} | weights
