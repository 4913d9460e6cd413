"""The functions that serving exports: one for each bucket of sizes, with their specs."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from models import sampling
from models.function import Function
from models.llama.config import LlamaConfig
from models.llama.decode.cache import ServingShape, copy_slot, state_leaves
from models.llama.decode.steps import decode, prefill

SPECS: Mapping[str, tuple[Any, ...]] = {
    "weights/embed_tokens/": ("model", None),
    "weights/lm_head/": ("model", None),
    "weights/norm/": (None,),
    "weights/layers/*/input_layernorm/": (None,),
    "weights/layers/*/post_attention_layernorm/": (None,),
    "weights/layers/*/self_attn/q_proj/": ("model", None),
    "weights/layers/*/self_attn/o_proj/": (None, "model"),
    "weights/layers/*/mlp/gate_proj/": ("model", None),
    "weights/layers/*/mlp/up_proj/": ("model", None),
    "weights/layers/*/mlp/down_proj/": (None, "model"),
    "state/cache/*/": ("data", None, "...", None, None),
    "state/tokens": (None,),
    "state/lengths": (None,),
    "state/sampling/": (None,),
}
"""The beginning of a path -> spec. A spec is cut to a tensor's rank, or filled up with None.

Weights are tensor-parallel over `model`, slots are split over `data`. The projections of keys and
values and the cache's heads are left to the compiler: where `model` has more devices than the model
has key heads, it splits the heads there are, and the query heads of a key head over the rest.
"""


def functions(
    config: LlamaConfig, shape: ServingShape, weights: Any
) -> tuple[list[Function], Any, Mapping[str, tuple[Any, ...]], str]:
    """Lists the functions to export.

    With chunks (16,) and lengths (64, 128) these are

        decode_t64      prefill_s16_t64     score_s16_t64     copy_t64
        decode_t128     prefill_s16_t128    score_s16_t128    copy_t128

    where `score` is prefill that also reports the log-probabilities of the prompt's tokens.

    Args:
        config: the model.
        shape: the sizes.
        weights: tree of `jax.ShapeDtypeStruct`s, see `layers.Weights`.

    Returns:
        (functions, tree of the state's `StateLeaf`s, specs by path pattern, the name of the
        function whose plan decides what the specs leave open).
    """
    leaves = state_leaves(config, shape)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves)

    def function(name: str, fn: Any, inputs: Any, **tags: int | str) -> Function:
        names = ("weights", "state", "inputs")
        return Function(
            name, fn, (weights, state, inputs), names, ("weights", "state", "input"), tags
        )

    common: dict[str, Any] = {"alternatives": shape.top_logprobs, "config": config}
    found = []
    for length in shape.lengths:
        fn = functools.partial(decode, length=length, steps=shape.decode_steps, **common)
        name = f"decode_t{length}"
        found.append(function(name, fn, _control(shape), kind="decode", length=length))
    for length, chunk in itertools.product(shape.lengths, shape.chunks):
        if chunk > length:
            continue
        sizes = {"length": length, "chunk": chunk}
        for kind, scores in (("prefill", False), ("score", True)):
            fn = functools.partial(prefill, length=length, scores=scores, **common)
            name = f"{kind}_s{chunk}_t{length}"
            found.append(function(name, fn, _chunk(chunk, scores, config), kind=kind, **sizes))
    for length in shape.lengths:
        slots = _scalars("source", "target")
        found.append(Function(
            f"copy_t{length}", functools.partial(copy_slot, length=length), (state, slots),
            ("state", "inputs"), ("state", "input"), {"kind": "copy", "length": length},
        ))  # fmt: skip
    # Decode over the longest length reads the most of the cache: its plan matters most.
    primary = found[len(shape.lengths) - 1].name
    return found, leaves, _specs({"weights": weights, "state": state}), primary


def _specs(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Specs by path pattern, in which layers are `*`; each is as long as the tensor's rank."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for keys, leaf in leaves:
        path = "/".join(str(entry.key) for entry in keys)
        pattern = re.sub(r"/(layers|cache)/\d+/", r"/\1/*/", path)
        spec = next((SPECS[begin] for begin in SPECS if pattern.startswith(begin)), None)
        if spec is not None:
            rank = len(leaf.shape)
            found[pattern] = (*spec, *(None,) * rank)[:rank]
    return found


def _control(shape: ServingShape) -> Any:
    return {
        "active": jax.ShapeDtypeStruct((shape.slots,), np.bool_),
        "alternatives": jax.ShapeDtypeStruct((), np.bool_),
        **_scalars("steps"),
    }


def _chunk(size: int, scores: bool, config: LlamaConfig) -> Any:
    tokens = jax.ShapeDtypeStruct((size,), np.int32)
    return {
        **_scalars("slot", "start", "count"),
        "tokens": tokens,
        **({"targets": tokens} if scores else {}),
        "last": jax.ShapeDtypeStruct((), np.bool_),
        "seen": jax.ShapeDtypeStruct((config.vocab_size,), np.bool_),
        "sampling": {
            name: jax.ShapeDtypeStruct((), dtype) for name, (dtype, _) in sampling.FIELDS.items()
        },
    }


def _scalars(*names: str) -> Any:
    return {name: jax.ShapeDtypeStruct((), np.int32) for name in names}
