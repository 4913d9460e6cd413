"""Maps our parameters to the tensors of Hugging Face's checkpoints.

layers/self_attn/q_proj/weight     model.layers.0.self_attn.q_proj.weight
(stacked: L, out, in)              model.layers.1.self_attn.q_proj.weight, ...
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from models.llama import model
from models.llama.config import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "layers/"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of our parameters, and the tensors that it is made of.

    Args:
        path: keys joined by `/`.
        shape: of the whole parameter; the first dim of a stacked one is the layers.
        names: Hugging Face's names: one, or one for each layer of a stacked parameter.
        stacked: whether the first dim is the layers.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.shape[1:] if self.stacked else self.shape


@functools.cache
def parameters(config: LlamaConfig) -> tuple[tuple[Parameter, ...], Any]:
    """The parameters of a model, without states of 8-bit products.

    Returns:
        (all parameters of `model.init`'s tree, in its order; the tree's structure).
    """
    structs = model.without_states(
        jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
    )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(structs)
    found = tuple(
        _parameter(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, config)
        for path, leaf in leaves
    )
    return found, treedef


def _parameter(path: str, shape: tuple[int, ...], config: LlamaConfig) -> Parameter:
    stacked = config.scan_layers and path.startswith(LAYERS)
    name = path.removeprefix(LAYERS).replace("/", ".")
    if stacked:
        layers = range(config.num_hidden_layers)
        names = tuple(f"model.layers.{layer}.{name}" for layer in layers)
    elif path.startswith(LAYERS):
        names = (f"model.layers.{name}",)
    else:
        names = (name if name == HEAD else f"model.{name}",)
    return Parameter(path, shape, names, stacked)


def order(name: str) -> tuple[int, int]:
    """Sorting key for tensors in the order in which the model uses them, layer by layer."""
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2])
    return {EMBEDDING: 0, HEAD: 3}.get(name, 2), 0
