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
from models.llama.decode.cache import ServingShape, state_leaves, symbolic_pages
from models.llama.decode.steps import begin, step

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
    "state/cache/*/": ("data", None, None, "...", None, None),
    "state/tokens": ("data", None),
    "state/seen": ("data", None, "..."),
    "state/drawn": ("data", None, "..."),
    "state/sampling/": ("data", None),
}
"""The beginning of a path -> spec. A spec is cut to a tensor's rank, or filled up with None.

Weights are tensor-parallel over `model`, groups of slots and pages are split over `data`. The
projections of keys and values and the cache's heads are left to the compiler: where `model` has
more devices than the model has key heads, it splits the heads there are, and the query heads of a
key head over the rest.
"""


def functions(
    config: LlamaConfig, shape: ServingShape, weights: Any
) -> tuple[list[Function], Any, Mapping[str, tuple[Any, ...]], str]:
    """Lists the functions to export.

    With rows (4, 16) and lengths (64, 128) these are

        begin    step_r4_t64     step_r16_t64     score_r16_t64
                 step_r4_t128    step_r16_t128    score_r16_t128

    where `score` is a step that also reports the log-probabilities of given tokens: of the most
    rows alone, as few ask for it, and each function takes its time to compile.

    Args:
        config: the model.
        shape: the sizes.
        weights: tree of `jax.ShapeDtypeStruct`s, see `layers.Weights`.

    Returns:
        (functions, tree of the state's `StateLeaf`s, specs by path pattern, the name of the
        function whose plan decides what the specs leave open). How many pages there are is a
        symbol of the functions, `cache.PAGES`.
    """
    leaves = state_leaves(config, shape, symbolic_pages(shape))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves)
    found = [Function(
        "begin", begin, (state, _request(config)), ("state", "inputs"), ("state", "input"),
        {"kind": "begin"},
    )]  # fmt: skip
    for length, rows in itertools.product(shape.lengths, shape.rows):
        kinds = [("step", False), *([("score", True)] if rows == shape.rows[-1] else [])]
        for kind, scores in kinds:
            fn = functools.partial(
                step, alternatives=shape.top_logprobs, scores=scores, config=config
            )
            found.append(Function(
                step_name(kind, rows, length),
                fn,
                (weights, state, _rows(shape, rows, length, scores)),
                ("weights", "state", "inputs"),
                ("weights", "state", "input"),
                {"kind": kind, "rows": rows, "length": length},
            ))  # fmt: skip
    # The step over the most rows and the longest tables moves the most: its plan matters most.
    primary = step_name("step", shape.rows[-1], shape.lengths[-1])
    return found, leaves, _specs({"weights": weights, "state": state}), primary


def step_name(kind: str, rows: int, length: int) -> str:
    """What the function of a kind (`step`, `score`) with these sizes is called."""
    return f"{kind}_r{rows}_t{length}"


def _specs(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Specs by path pattern, in which layers are `*`; each is as long as the tensor's rank."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for keys, leaf in leaves:
        path = "/".join(str(entry.key) for entry in keys)
        pattern = re.sub(r"/(layers|cache)/\d+/", r"/\1/*/", path)
        spec = next((SPECS[start] for start in SPECS if pattern.startswith(start)), None)
        if spec is not None:
            rank = len(leaf.shape)
            found[pattern] = (*spec, *(None,) * rank)[:rank]
    return found


def _rows(shape: ServingShape, rows: int, length: int, scores: bool) -> Any:
    """The inputs of `steps.step`."""
    groups, slots = shape.groups, shape.slots_of_group
    shapes = {
        "tokens": (rows,),
        "slots": (rows,),
        "positions": (rows,),
        "first": (slots + 1,),
        "table": (slots, length // shape.page),
        "draws": (min(rows, slots),),
        **({"targets": (rows,)} if scores else {}),
    }
    return {
        **{name: jax.ShapeDtypeStruct((groups, *dims), np.int32) for name, dims in shapes.items()},
        "alternatives": jax.ShapeDtypeStruct((), np.bool_),
    }


def _request(config: LlamaConfig) -> Any:
    """The inputs of `steps.begin`."""
    return {
        "slot": jax.ShapeDtypeStruct((), np.int32),
        "seen": jax.ShapeDtypeStruct((config.vocab_size,), np.bool_),
        "drawn": jax.ShapeDtypeStruct((config.vocab_size,), np.int32),
        "sampling": {
            name: jax.ShapeDtypeStruct((), dtype) for name, (dtype, _) in sampling.FIELDS.items()
        },
    }
