"""Where a Llama's tensors live on a mesh with the axes `replica`, `data` and `model`.

A table says it for parameters, batch and activations, and that is all that is marked. Everything
else, gradients and optimizer state included, is for the compiler to infer. `TABLES` has one for
each usual way to train; an axis that a mesh lacks counts as having size 1, so every table works on
every mesh.

The batch is split over `replica` and `data`. Nothing else is split over `replica`: on a mesh of
several slices (`spmd.HybridMesh`) it is the axis that crosses them, so that slow links carry
gradients alone. `data` may cross slices too (`dcn={"data": 2}`): then parameters are gathered over
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import EllipsisType, MappingProxyType
from typing import Any, NamedTuple

import jax

import spmd
from models.llama.config import ConfigError, LlamaConfig
from models.llama.model import Mark

Entry = str | tuple[str, ...] | EllipsisType | None
Spec = tuple[Entry, ...]

MESH_AXES = ("replica", "data", "model")

BATCH = ("replica", "data")
"""The axes over which sequences are split."""

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
    "inputs_embeds": (BATCH, None, "model"),
    "q": (BATCH, None, "model"),
    "k": (BATCH, None, "model"),
    "v": (BATCH, None, "model"),
    "attention_weights": (BATCH, "model", None, None),
    "attention_output": (BATCH, None, "model"),
    "mlp_output": (BATCH, None, "model"),
    "logits": (BATCH, None, "model"),
}
"""Point of `model.MARK_POINTS` -> spec of the value there.

Fused attention has no weights to mark: it splits its heads as those of `q`, `k` and `v` are.
"""

RESIDUALS = ("inputs_embeds", "attention_output", "mlp_output")
"""The points that lie on, or are added to, the stream between layers (B, S, H)."""


class Table(NamedTuple):
    """Specs of everything that is marked.

    Attributes:
        parameters: parameter -> spec of its dims, without the dim of stacked layers.
        activations: point -> spec.
        batch: spec of token ids (B, S).
    """

    parameters: Mapping[str, Spec]
    activations: Mapping[str, Spec]
    batch: Spec = (BATCH, None)

    def with_residuals(self, spec: Spec) -> Table:
        """The same, with another spec of the stream between layers."""
        return self._replace(activations={**self.activations, **dict.fromkeys(RESIDUALS, spec)})

    def over(self, axes: Mapping[str, Entry]) -> Table:
        """The same with axes exchanged for others, in parameters and activations."""
        return self._replace(
            parameters={name: _exchanged(spec, axes) for name, spec in self.parameters.items()},
            activations={name: _exchanged(spec, axes) for name, spec in self.activations.items()},
        )


def _exchanged(spec: Spec, axes: Mapping[str, Entry]) -> Spec:
    return tuple(axes.get(entry, entry) if isinstance(entry, str) else entry for entry in spec)


TWO_D = Table(PARAMETER_SPECS, ACTIVATION_SPECS)
_TENSOR = TWO_D._replace(parameters=TWO_D.over({"data": None}).parameters)
_ALL_AXES = (*BATCH, "model")

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        # Parameters over both axes, a layer's arithmetic and the stream's width over `model`.
        "2d": TWO_D,
        # The same with the stream's sequence over `model`: no device norms what another norms too.
        "2d-sequence": TWO_D.with_residuals((BATCH, "model", None)),
        # Parameters and sequences over both axes; a layer is gathered when it is computed.
        "fsdp": Table(
            TWO_D.over({"data": ("data", "model"), "model": None}).parameters,
            {point: (_ALL_AXES, *[None] * (len(s) - 1)) for point, s in ACTIVATION_SPECS.items()},
            (_ALL_AXES, None),
        ),
        # Parameters over `model` alone, as Megatron-LM splits them; the stream is whole.
        "tensor": _TENSOR.with_residuals((BATCH, None, None)),
        # The same with the stream's sequence over `model` (Korthikanti et al. 2022).
        "tensor-sequence": _TENSOR.with_residuals((BATCH, "model", None)),
    }
)
"""The usual ways to split a Llama, by name."""


def table_named(name: str) -> Table:
    """The table called `name`.

    Raises:
        ConfigError: there is none of that name; lists those there are.
    """
    if name not in TABLES:
        raise ConfigError(f"no sharding is called {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]


def mark_params(params: Any, mesh: spmd.Mesh, config: LlamaConfig, table: Table = TWO_D) -> Any:
    """Parameters, or `ShapeDtypeStruct`s of them, with the shardings of a table.

    Args:
        params: a tree as from `model.init`.
        mesh: a mesh with axes of `MESH_AXES`; one that it lacks counts as having size 1.
        config: the model.
        table: what goes where.
    """
    return spmd.mark_tree(params, mesh, parameter_rules(config, mesh.shape, table))


def mark_batch(batch: Any, mesh: spmd.Mesh, table: Table = TWO_D) -> Any:
    """A tree of token ids (B, S), or `ShapeDtypeStruct`s, with the table's spec of a batch."""
    spec = _present(table.batch, mesh.shape)
    return jax.tree.map(lambda leaf: spmd.mark_sharding(leaf, mesh, spec), batch)


def activation_marks(mesh: spmd.Mesh, config: LlamaConfig, table: Table = TWO_D) -> Mark:
    """The `mark` that applies a table's specs of activations on `mesh`."""
    specs = activation_specs(config, mesh.shape, table)

    def mark(name: str, x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x, mesh, specs[name]) if name in specs else x

    return mark


def parameter_rules(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: Table = TWO_D
) -> dict[str, Spec]:
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
        spec = _fit(table.parameters[path], shape, mesh_shape, otherwise=None)
        if not path.startswith("layers/"):
            rules[path] = spec
        elif config.scan_layers:
            rules[path] = (None, *spec)
        else:
            rules[path.replace("layers/", "layers/*/")] = spec
    return rules


def activation_specs(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: Table = TWO_D
) -> dict[str, Spec]:
    """Point -> spec. An entry whose axis does not divide what it splits is left open.

    `q`, `k`, `v` and the attention weights are split between heads, never inside one, so
    there the number of heads has to divide.
    """
    units = _split_units(config)
    return {
        name: _fit(table.activations[name], sizes, mesh_shape, otherwise=...)
        for name, sizes in units.items()
    }


def dropped_marks(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: Table = TWO_D
) -> tuple[str, ...]:
    """One sentence for each entry of a table that does not fit `config` on this mesh."""
    parameters = {
        path: (table.parameters[path], shape) for path, shape in config.parameter_shapes().items()
    }
    units = _split_units(config)
    activations = {name: (table.activations[name], sizes) for name, sizes in units.items()}
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
        f"{name}: {_named(entry)} of size {_axis_size(entry, mesh_shape)} does not divide {size} "
        f"(dim {dim}); {outcome}"
        for name, (spec, sizes) in table.items()
        for dim, (entry, size) in enumerate(zip(spec, sizes, strict=True))
        if size % _axis_size(entry, mesh_shape)
    ]


def _named(entry: Entry) -> str:
    if isinstance(entry, tuple):
        return f"axes {' x '.join(entry)}"
    return f"axis {entry!r}"


def _present(spec: Spec, mesh_shape: Mapping[str, int]) -> Spec:
    """A spec without the axes that a mesh lacks."""
    return tuple(_present_entry(entry, mesh_shape) for entry in spec)


def _present_entry(entry: Entry, mesh_shape: Mapping[str, int]) -> Entry:
    if not isinstance(entry, str | tuple):
        return entry
    names = (entry,) if isinstance(entry, str) else entry
    present = tuple(name for name in names if name in mesh_shape)
    return present if len(present) > 1 else (present[0] if present else None)


def _axis_size(entry: Entry, mesh_shape: Mapping[str, int]) -> int:
    if isinstance(entry, tuple):
        return math.prod(mesh_shape.get(name, 1) for name in entry)
    return mesh_shape.get(entry, 1) if isinstance(entry, str) else 1
