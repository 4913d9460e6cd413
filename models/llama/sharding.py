"""Where a Llama's tensors live on a mesh with the axes `data` and `model`.

The tables are all that is marked. Everything else, gradients and optimizer state included, is for
the compiler to infer. Weights and activations are both split over both axes: parameters and their
optimizer state are spread over all devices, and a layer's arithmetic over `model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import jax

import spmd
from models.llama.config import LlamaConfig
from models.llama.model import Mark

Entry = str | EllipsisType | None
Spec = tuple[Entry, ...]

MESH_AXES = ("data", "model")

PARAMETER_SPECS: Mapping[str, Spec] = {
    "embed_tokens/weight": ("model", "data"),
    "layers/input_layernorm/weight": (None,),
    "layers/self_attn/q_proj/weight": ("data", "model"),
    "layers/self_attn/k_proj/weight": ("data", "model"),
    "layers/self_attn/v_proj/weight": ("data", "model"),
    "layers/self_attn/o_proj/weight": ("model", "data"),
    "layers/post_attention_layernorm/weight": (None,),
    "layers/mlp/gate_proj/weight": ("model", "data"),
    "layers/mlp/up_proj/weight": ("model", "data"),
    "layers/mlp/down_proj/weight": ("data", "model"),
    "norm/weight": (None,),
    "lm_head/weight": ("model", "data"),
}
"""Parameter -> spec of its (out, in) dims. A stacked parameter's leading dim is not split."""

ACTIVATION_SPECS: Mapping[str, Spec] = {
    "inputs_embeds": ("data", None, "model"),
    "q": ("data", None, "model"),
    "k": ("data", None, "model"),
    "v": ("data", None, "model"),
    "attention_weights": ("data", "model", None, None),
    "attention_output": ("data", None, "model"),
    "mlp_output": ("data", None, "model"),
    "logits": ("data", None, "model"),
}
"""Point of `model.MARK_POINTS` -> spec of the value there.

Fused attention has no weights to mark: it splits its heads as those of `q`, `k` and `v` are.
"""

BATCH_SPEC: Spec = ("data", None)
"""Spec of token ids (B, S)."""


def mark_params(params: Any, mesh: spmd.Mesh, config: LlamaConfig) -> Any:
    """Parameters, or `ShapeDtypeStruct`s of them, with the shardings of the table.

    Args:
        params: a tree as from `model.init`.
        mesh: a mesh with axes of `MESH_AXES`; one that it lacks counts as having size 1.
        config: the model.
    """
    return spmd.mark_tree(params, mesh, parameter_rules(config, mesh.shape))


def mark_batch(batch: Any, mesh: spmd.Mesh) -> Any:
    """A tree of token ids (B, S), or `ShapeDtypeStruct`s, with `BATCH_SPEC`."""
    spec = _present(BATCH_SPEC, mesh.shape)
    return jax.tree.map(lambda leaf: spmd.mark_sharding(leaf, mesh, spec), batch)


def activation_marks(mesh: spmd.Mesh, config: LlamaConfig) -> Mark:
    """The `mark` that applies `ACTIVATION_SPECS` on `mesh`."""
    specs = activation_specs(config, mesh.shape)

    def mark(name: str, x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x, mesh, specs[name]) if name in specs else x

    return mark


def parameter_rules(config: LlamaConfig, mesh_shape: Mapping[str, int]) -> dict[str, Spec]:
    """Path pattern -> spec, for `spmd.mark_tree`, of the parameters that `config` has.

    A dim that its axis does not divide stays whole; `dropped_marks` says which.

    Example:
        >>> from models.llama.config import named_config
        >>> rules = parameter_rules(named_config("tiny"), {"data": 4, "model": 2})
        >>> rules["layers/mlp/up_proj/weight"]
        (None, 'model', 'data')
    """
    rules = {}
    for path, shape in config.parameter_shapes().items():
        spec = _fit(PARAMETER_SPECS[path], shape, mesh_shape, otherwise=None)
        if not path.startswith("layers/"):
            rules[path] = spec
        elif config.scan_layers:
            rules[path] = (None, *spec)
        else:
            rules[path.replace("layers/", "layers/*/")] = spec
    return rules


def activation_specs(config: LlamaConfig, mesh_shape: Mapping[str, int]) -> dict[str, Spec]:
    """Point -> spec. An entry whose axis does not divide what it splits is left open.

    `q`, `k`, `v` and the attention weights are split between heads, never inside one, so
    there the number of heads has to divide.
    """
    units = _split_units(config)
    return {
        name: _fit(ACTIVATION_SPECS[name], sizes, mesh_shape, otherwise=...)
        for name, sizes in units.items()
    }


def dropped_marks(config: LlamaConfig, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """One sentence for each entry of the tables that does not fit `config` on this mesh."""
    parameters = {
        path: (PARAMETER_SPECS[path], shape) for path, shape in config.parameter_shapes().items()
    }
    units = _split_units(config)
    activations = {name: (ACTIVATION_SPECS[name], sizes) for name, sizes in units.items()}
    return (
        *_misfits(parameters, mesh_shape, "it stays whole along that dim"),
        *_misfits(activations, mesh_shape, "that dim is left to the compiler"),
    )


def _split_units(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Of each activation there is, and each dim, how many things may go to different devices.

    0 where that is not for the model to say (batch and sequence): every axis divides it.
    """
    heads, kv_heads, hidden = config.num_attention_heads, config.kv_heads, config.hidden_size
    weights = {"attention_weights": (0, heads, 0, 0)} if config.attention == "einsum" else {}
    return {
        "inputs_embeds": (0, 0, hidden),
        "q": (0, 0, heads),
        "k": (0, 0, kv_heads),
        "v": (0, 0, kv_heads),
        **weights,
        "attention_output": (0, 0, hidden),
        "mlp_output": (0, 0, hidden),
        "logits": (0, 0, config.vocab_size),
    }


def _fit(
    spec: Spec, sizes: tuple[int, ...], mesh_shape: Mapping[str, int], otherwise: Entry
) -> Spec:
    return tuple(
        entry if size % _axis_size(entry, mesh_shape) == 0 else otherwise
        for entry, size in zip(_present(spec, mesh_shape), sizes, strict=True)
    )


def _misfits(
    table: Mapping[str, tuple[Spec, tuple[int, ...]]], mesh_shape: Mapping[str, int], outcome: str
) -> list[str]:
    return [
        f"{name}: axis {entry!r} of size {_axis_size(entry, mesh_shape)} does not divide {size} "
        f"(dim {dim}); {outcome}"
        for name, (spec, sizes) in table.items()
        for dim, (entry, size) in enumerate(zip(spec, sizes, strict=True))
        if size % _axis_size(entry, mesh_shape)
    ]


def _present(spec: Spec, mesh_shape: Mapping[str, int]) -> Spec:
    return tuple(None if isinstance(e, str) and e not in mesh_shape else e for e in spec)


def _axis_size(entry: Entry, mesh_shape: Mapping[str, int]) -> int:
    return mesh_shape.get(entry, 1) if isinstance(entry, str) else 1
