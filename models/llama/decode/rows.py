"""A Llama as the functions of `models.decode` want it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from spmd.models.decode.attention import kv_leaves, write_and_attend
from spmd.models.decode.model import Rows
from spmd.models.decode.shape import ServingShape
from spmd.models.decode.state import State
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode.layers import Weights, logits, run_layers

SPECS: Mapping[str, tuple[Any, ...]] = {
    "weights/embed_tokens/": ("model", None),
    "weights/lm_head/": ("model", None),
    "weights/norm/": (None,),
    "weights/layers/*/input_layernorm/": (None,),
    "weights/layers/*/post_attention_layernorm/": (None,),
    "weights/layers/*/self_attn/q_proj/": ("model", None),
    "weights/layers/*/self_attn/o_proj/": (None, "model"),
    "weights/layers/*/self_attn/q_norm/": (None,),
    "weights/layers/*/self_attn/k_norm/": (None,),
    "weights/layers/*/mlp/gate_proj/": ("model", None),
    "weights/layers/*/mlp/up_proj/": ("model", None),
    "weights/layers/*/mlp/down_proj/": (None, "model"),
    "weights/layers/*/mlp/gate/": (None, None),
    "weights/layers/*/mlp/experts/gate_proj/": (None, "model", None),
    "weights/layers/*/mlp/experts/up_proj/": (None, "model", None),
    "weights/layers/*/mlp/experts/down_proj/": (None, None, "model"),
    "state/cache/*/": ("data", None, None, "...", None, None),
}
"""The beginning of a path -> spec. A spec is cut to a tensor's rank, or filled up with None.

Weights are tensor-parallel over `model`, groups of slots and pages are split over `data`. The
projections of keys and values and the cache's heads are left to the compiler: where `model` has
more devices than the model has key heads, it splits the heads there are, and the query heads of a
key head over the rest.
"""


@dataclasses.dataclass(frozen=True)
class LlamaRows:
    """A `models.decode.RowsModel`: a Llama whose cache has the keys and values of each layer.

    Its weights are a tree as `layers.Weights` says.
    """

    config: LlamaConfig  # the model

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def specs(self) -> Mapping[str, tuple[Any, ...]]:
        """How weights and cache are split."""
        return SPECS

    @property
    def unread(self) -> tuple[str, ...]:
        """The embedding, unless it is the head, too."""
        return () if self.config.tie_word_embeddings else ("weights/embed_tokens/",)

    def cache_leaves(self, shape: ServingShape, pages: Any) -> Any:
        """`I/values` and `I/scales` of layer I: see `models.decode.attention.kv_leaves`."""
        config = self.config
        layer = kv_leaves(shape, pages, config.kv_heads, config.head_width)
        return {str(i): dict(layer) for i in range(config.num_hidden_layers)}

    def run(self, weights: Weights, cache: State, rows: Rows) -> tuple[Any, State]:
        """See `models.decode.RowsModel.run`."""
        shape = rows["tokens"].shape

        def attend(
            q_XKGD: Any, kv_XK2D: Any, layer: State, window: int | None
        ) -> tuple[Any, State]:
            q_ARKGD, kv_ARK2D = (x.reshape(*shape, *x.shape[1:]) for x in (q_XKGD, kv_XK2D))
            heads_ARKGD, layer = write_and_attend(layer, q_ARKGD, kv_ARK2D, rows, window)
            return heads_ARKGD.reshape(-1, *heads_ARKGD.shape[2:]), layer

        positions_X = jnp.maximum(rows["positions"].reshape(-1), 0)
        tokens_X = rows["tokens"].reshape(-1)
        x_XH, cache = run_layers(weights, tokens_X, positions_X, cache, attend, self.config)
        return x_XH.reshape(*shape, -1), cache

    def logits(self, weights: Weights, x_XH: Any) -> Any:
        """See `models.decode.RowsModel.logits`."""
        return logits(weights, x_XH, self.config)
