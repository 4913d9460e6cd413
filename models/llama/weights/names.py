"""Maps our parameters to the tensors of Hugging Face's checkpoints.

layers/self_attn/q_proj/weight          model.layers.0.self_attn.q_proj.weight
(stacked: L, out, in)                   model.layers.1.self_attn.q_proj.weight, ...

layers/0/mlp/experts/up_proj/weight     model.layers.0.mlp.experts.0.up_proj.weight
(E, out, in)                            model.layers.0.mlp.experts.1.up_proj.weight, ...

Where the first layers are `dense/layers`, those in `layers` are numbered behind them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.fresh import init
from spmd.models.llama.parameters import without_states
from spmd.models.llama.weights.files import Array, Index

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERTS = "experts"

_MIXTRAL: Mapping[str, str] = {
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""What a Mixtral's files call parts of a layer."""
_GPT_OSS = {"gate": "router"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of our parameters, and the tensors that it is made of."""

    path: str  # keys joined by `/`
    shape: tuple[int, ...]  # of the whole parameter; the first dim of a stacked one is the layers
    # Hugging Face's names, one for each index of the leading dims, the last of which runs first: of
    # layers, where they are stacked, and of experts
    names: tuple[str, ...]
    leading: int  # how many dims that is
    stacked: bool  # whether the first dim is the layers

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.shape[self.leading :]

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """Name -> where the tensor is in the leading dims: `()` if it is the whole parameter."""
        return dict(zip(self.names, np.ndindex(*self.shape[: self.leading]), strict=True))

    def inside(self, index: Index) -> Iterator[tuple[tuple[int, ...], str]]:
        """The tensors that a slice of the parameter touches: (where in the slice, name)."""
        names = np.array(self.names, object).reshape(self.shape[: self.leading])
        spans = [range(part.start, part.stop) for part in index[: self.leading]]
        for place in itertools.product(*spans):
            at = tuple(i - span.start for i, span in zip(place, spans, strict=True))
            yield at, names[place] if place else names.item()

    def read(self, index: Index, dtype: Any, part: Callable[[str, Index], Array]) -> Array:
        """A slice of the parameter, of slices of its tensors; one of them in memory at a time.

        Args:
            dtype: of a parameter that is made of several.
            part: reads a slice of a tensor.
        """
        if not self.leading:
            return part(self.names[0], index)
        block: Array = np.empty([span.stop - span.start for span in index], dtype)
        for place, name in self.inside(index):
            block[place] = part(name, index[self.leading :])
        return block


@functools.cache
def parameters(config: LlamaConfig) -> tuple[tuple[Parameter, ...], Any]:
    """The parameters of a model, without states of 8-bit products.

    Returns:
        (all parameters of `fresh.init`'s tree, in its order; the tree's structure).
    """
    structs = without_states(
        jax.eval_shape(functools.partial(init, config=config), jax.random.key(0))
    )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(structs)
    found = tuple(
        _parameter(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, config)
        for path, leaf in leaves
    )
    return found, treedef


def _parameter(path: str, shape: tuple[int, ...], config: LlamaConfig) -> Parameter:
    stack = config.stack_of(path)
    if stack is None:
        name = path.replace("/", ".")
        return Parameter(path, shape, (name if name == HEAD else f"model.{name}",), 0, False)
    parts, layers = path.removeprefix(stack).split("/"), config.stacks[stack]
    stacked, mixed = config.scan_layers, EXPERTS in parts
    if not stacked:
        layers = layers[int(parts.pop(0)) :][:1]
    renamed = {"mixtral": _MIXTRAL, "gpt_oss": _GPT_OSS}.get(config.model_type)
    if renamed and "mlp" in parts:
        parts = [renamed.get(part, part) for part in parts]
    before = parts.index(EXPERTS) + 1 if mixed else 0
    experts = [[str(i)] for i in range(config.num_experts)] if mixed else [[]]
    names = tuple(
        ".".join(["model.layers", str(layer), *parts[:before], *expert, *parts[before:]])
        for layer, expert in itertools.product(layers, experts)
    )
    return Parameter(path, shape, names, stacked + mixed, stacked)


def order(name: str) -> tuple[int, int]:
    """Sorting key for tensors in the order in which the model uses them, layer by layer."""
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2])
    return {EMBEDDING: 0, HEAD: 3}.get(name, 2), 0
