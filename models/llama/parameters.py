"""The tree of a model's parameters, and its other forms.

Layers are stacked or apart; where products are in 8-bit floats, states of their scales lie beside
the weights.
"""

import functools
from typing import Any

import jax

import spmd
from spmd.models.llama.config import LlamaConfig

Params = dict[str, Any]
"""Nested dicts of arrays, under Hugging Face's names."""

QUERY_KEY_VALUE, OUTPUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
GATE_AND_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)

TOGETHER = (QUERY_KEY_VALUE, OUTPUT, GATE_AND_UP, DOWN)
"""Projections of a layer, those together that read one input."""

FP8 = "fp8"
"""Beside the projections of a block: the states of their 8-bit products, by the names of each."""

TEACHER = "teacher"
"""Beside a model's parameters: those of the teacher that it is distilled from."""


def unstack_layers(params: Params) -> Params:
    """Parameters with a leading dim L -> parameters with a dict for each layer."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = {
        str(index): jax.tree.map(lambda leaf, i=index: leaf[i], params["layers"])
        for index in range(count)
    }
    return {**params, "layers": layers}


def with_states(params: Params, config: LlamaConfig) -> Params:
    """The parameters with states of their 8-bit products; fresh ones where they have none."""
    layers, add = params["layers"], functools.partial(layer_with_states, config=config)
    if config.scan_layers:
        return {**params, "layers": jax.vmap(add)(layers)}
    return {**params, "layers": {index: add(layer) for index, layer in layers.items()}}


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
        if names[0] in weights
    }
    return {FP8: fresh} | weights
