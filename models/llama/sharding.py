"""How a model's tensors are split over axes replica, data, expert, seq, model and stage.

A table has the specs of parameters, batch and activations, and only these are marked. Everything
else, such as gradients and optimizer state, is inferred by the compiler. `TABLES` has a table for
each usual way to train. An axis that a mesh lacks counts as one of size 1, so every table works on
every mesh.

The batch is split over `replica`, `data` and `expert`. Nothing else is over `replica`, and over
`expert` nothing but the experts of a mixture. On a mesh of several slices (`spmd.HybridMesh`)
`replica` is the axis that crosses slices, so that their slow links carry gradients only. `data` may
cross slices too (`dcn={"data": 2}`); then parameters are gathered over the slow links as well.

Activations are split along the sequence over `seq` (`docs/long_sequences.md`), parameters over
`data` and `seq` together. Over `stage` stacked layers are split, where the config has a pipeline
(`LlamaConfig.stages`), and the sequences behind it: no stage computes the logits of all.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

import spmd
from spmd.models.llama.config import DENSE, LAYERS, ConfigError, LlamaConfig
from spmd.models.llama.marks import Mark
from spmd.models.placement import Entry, Fitted, Spec, fitted, present

MESH_AXES = ("replica", "data", "expert", "seq", "model", "stage")

BATCH = ("replica", "data", "expert")
"""The axes over which a batch's sequences are spread."""

LEAVING = (*BATCH, "stage")
"""The same behind a pipeline."""

WEIGHTS = ("data", "seq")
"""The axes over which parameters are split beside `model`."""

PARAMETER_SPECS: Mapping[str, Spec] = {
    "embed_tokens/weight": ("model", WEIGHTS),
    "layers/input_layernorm/weight": (None,),
    **{f"layers/self_attn/{x}_proj/weight": (WEIGHTS, "model") for x in "qkv"},
    "layers/self_attn/o_proj/weight": ("model", WEIGHTS),
    **{f"layers/self_attn/{x}_proj/bias": ("model",) for x in "qkv"},
    "layers/self_attn/o_proj/bias": (None,),
    "layers/self_attn/sinks": ("model",),
    **{f"layers/self_attn/{x}_norm/weight": (None,) for x in "qk"},
    # Of latent attention: what is as narrow as a latent is whole, heads are over `model`.
    "layers/self_attn/q_a_proj/weight": (None, WEIGHTS),
    "layers/self_attn/kv_a_proj_with_mqa/weight": (None, WEIGHTS),
    **{f"layers/self_attn/{x}_a_layernorm/weight": (None,) for x in ("q", "kv")},
    **{f"layers/self_attn/{x}_b_proj/weight": ("model", WEIGHTS) for x in ("q", "kv")},
    "layers/post_attention_layernorm/weight": (None,),
    **{f"layers/{x}_feedforward_layernorm/weight": (None,) for x in ("pre", "post")},
    "layers/mlp/gate_proj/weight": ("model", WEIGHTS),
    "layers/mlp/up_proj/weight": ("model", WEIGHTS),
    "layers/mlp/down_proj/weight": (WEIGHTS, "model"),
    "layers/mlp/gate/weight": (None, None),
    "layers/mlp/gate/bias": (None,),
    "layers/mlp/gate/e_score_correction_bias": (None,),
    "layers/mlp/experts/gate_proj/weight": ("expert", "model", WEIGHTS),
    "layers/mlp/experts/up_proj/weight": ("expert", "model", WEIGHTS),
    "layers/mlp/experts/down_proj/weight": ("expert", WEIGHTS, "model"),
    **{f"layers/mlp/experts/{x}_proj/bias": ("expert", "model") for x in ("gate", "up")},
    "layers/mlp/experts/down_proj/bias": ("expert", None),
    "norm/weight": (None,),
    "lm_head/weight": ("model", WEIGHTS),
}
"""Parameter -> spec of its dims (out, in), experts before them. Stacked layers are not split.

A model has some of them: biases, norms of heads and experts where its config says so. Those of
`dense` layers are split as those of others, shared experts as any MLP."""

ACTIVATION_SPECS: Mapping[str, Spec] = {
    "inputs_embeds": (BATCH, "seq", "model"),
    **dict.fromkeys("qkv", (BATCH, "seq", "model")),
    "attention_weights": (BATCH, "model", "seq", None),
    "attention_output": (BATCH, "seq", "model"),
    "mlp_output": (BATCH, "seq", "model"),
    "logits": (LEAVING, "seq", "model"),
}
"""Point of `marks.MARK_POINTS` -> spec of the value there.

Fused attention has no attention weights that could be marked. It splits its heads as `q`, `k` and
`v` are split."""

RESIDUALS = ("inputs_embeds", "attention_output", "mlp_output")
"""The points whose values are on the residual stream (B, S, H), or are added to it."""


class SpecTable(NamedTuple):
    """The specs of everything that is marked."""

    # parameter -> spec of its dims, without the leading dim of stacked layers
    parameters: Mapping[str, Spec]
    activations: Mapping[str, Spec]  # point -> spec
    batch: Spec = (BATCH, None)  # spec of token ids (B, S)

    def with_residuals(self, spec: Spec) -> "SpecTable":
        """The same table with another spec of the residual stream."""
        return self._replace(activations={**self.activations, **dict.fromkeys(RESIDUALS, spec)})

    def over(self, axes: Mapping[Entry, Entry]) -> "SpecTable":
        """The same table with entries replaced by others, in parameters and activations.

        Args:
            axes: entry -> what stands in its place; None splits over nothing.
        """
        return self._replace(
            parameters={name: _exchanged(spec, axes) for name, spec in self.parameters.items()},
            activations={name: _exchanged(spec, axes) for name, spec in self.activations.items()},
        )


def _exchanged(spec: Spec, axes: Mapping[Entry, Entry]) -> Spec:
    return tuple(axes.get(entry, entry) for entry in spec)


TWO_D = SpecTable(PARAMETER_SPECS, ACTIVATION_SPECS)
_EXPERTS = {name: spec for name, spec in PARAMETER_SPECS.items() if "/experts/" in name}
_TENSOR = TWO_D._replace(parameters=TWO_D.over({WEIGHTS: None}).parameters)
_ALL_AXES = (*BATCH, "model")
_SEQUENCE = (BATCH, ("seq", "model"), None)

TABLES: Mapping[str, SpecTable] = MappingProxyType(
    {
        # Parameters over both axes, a layer's arithmetic and the stream's width over `model`.
        "2d": TWO_D,
        # The same with the stream's sequence over `model`: no device norms what another norms too.
        "2d-sequence": TWO_D.with_residuals(_SEQUENCE),
        # The same with experts over `data`, which then has no part of any of them.
        "2d-experts": TWO_D._replace(
            parameters={
                **PARAMETER_SPECS,
                "layers/mlp/experts/gate_proj/weight": ("data", "model", "seq"),
                "layers/mlp/experts/up_proj/weight": ("data", "model", "seq"),
                "layers/mlp/experts/down_proj/weight": ("data", "seq", "model"),
            }
        ),
        # Experts over an axis of their own, and all else over it as well: less is held, mostly.
        "2d-all": TWO_D._replace(
            parameters={**TWO_D.over({WEIGHTS: ("data", "expert", "seq")}).parameters, **_EXPERTS}
        ),
        # Parameters and sequences over both axes; a layer is gathered when it is computed.
        "fsdp": SpecTable(
            TWO_D.over({WEIGHTS: (*WEIGHTS, "model"), "model": None}).parameters,
            TWO_D.over(
                {BATCH: _ALL_AXES, LEAVING: (*_ALL_AXES, "stage"), "model": None}
            ).activations,
            (_ALL_AXES, None),
        ),
        # Parameters over `model` alone, as Megatron-LM splits them; the stream is whole.
        "tensor": _TENSOR.with_residuals((BATCH, "seq", None)),
        # The same with the stream's sequence over `model` (Korthikanti et al. 2022).
        "tensor-sequence": _TENSOR.with_residuals(_SEQUENCE),
    }
)
"""The usual ways to split a Llama, by name."""


def table_named(name: str) -> SpecTable:
    """The table called `name`.

    Raises:
        ConfigError: there is no such table; the message lists those there are.
    """
    if name not in TABLES:
        raise ConfigError(f"no sharding is called {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]


def mark_params(params: Any, mesh: spmd.Mesh, config: LlamaConfig, table: SpecTable = TWO_D) -> Any:
    """Marks parameters, or `ShapeDtypeStruct`s of them, with the shardings of a table.

    Args:
        params: a tree as from `fresh.init`.
        mesh: has axes of `MESH_AXES`; one that it lacks counts as one of size 1.
    """
    return spmd.mark_tree(params, mesh, parameter_rules(config, mesh.shape, table))


def mark_batch(batch: Any, mesh: spmd.Mesh, table: SpecTable = TWO_D) -> Any:
    """Marks a tree of token ids (B, S), or `ShapeDtypeStruct`s, with a table's spec of a batch.

    Numbers of a sequence (B,) are split as their sequences are.
    """
    spec = tuple(present(entry, mesh.shape) for entry in table.batch)
    return jax.tree.map(lambda leaf: spmd.mark_sharding(leaf, mesh, spec[: leaf.ndim]), batch)


def activation_marks(mesh: spmd.Mesh, config: LlamaConfig, table: SpecTable = TWO_D) -> Mark:
    """Returns the `mark` for `model.forward` that applies a table's specs on `mesh`."""
    specs = activation_specs(config, mesh.shape, table)

    def mark(name: str, x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x, mesh, specs[name]) if name in specs else x

    return mark


def parameter_rules(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: SpecTable = TWO_D
) -> dict[str, Spec]:
    """Path pattern -> spec of the parameters that `config` has, for `spmd.mark_tree`.

    A dim that its axis does not divide is not split; `dropped_marks` lists these.

    Example:
        >>> from spmd.models.llama.named import named_config
        >>> rules = parameter_rules(named_config("tiny"), {"data": 4, "model": 2})
        >>> rules["layers/mlp/up_proj/weight"]
        (None, 'model', 'data')
    """
    rules = {}
    for path, (spec, _) in _parameters(config, mesh_shape, table).items():
        if config.stack_of(path) is None:
            rules[path] = spec
        elif config.scan_layers:
            rules[path] = (present("stage", mesh_shape) if config.stages > 1 else None, *spec)
        else:
            rules[path.replace(LAYERS, f"{LAYERS}*/")] = spec
    return rules


def activation_specs(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: SpecTable = TWO_D
) -> dict[str, Spec]:
    """Point -> spec. An entry whose axis does not divide the dim is left to the compiler.

    `q`, `k`, `v` and the attention weights are split between heads, never inside one. So their
    axis has to divide the number of heads.
    """
    found = _activations(config, mesh_shape, table)
    return {name: activation.spec for name, activation in found.items()}


def dropped_marks(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: SpecTable = TWO_D
) -> tuple[str, ...]:
    """A sentence for each entry of a table that does not fit `config` on this mesh."""
    parameters = _parameters(config, mesh_shape, table).values()
    activations = _activations(config, mesh_shape, table).values()
    return tuple(note for found in (*parameters, *activations) for note in found.notes)


def _parameters(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: SpecTable
) -> dict[str, Fitted]:
    return {
        path: fitted(path, table.parameters[alike(path)], shape, mesh_shape, otherwise=None)
        for path, shape in config.parameter_shapes().items()
    }


def alike(path: str) -> str:
    """The parameter of a table that is split as this one is."""
    return path.removeprefix(DENSE).replace("shared_experts/", "")


def _activations(
    config: LlamaConfig, mesh_shape: Mapping[str, int], table: SpecTable
) -> dict[str, Fitted]:
    if config.stages == 1:
        mesh_shape = {axis: size for axis, size in mesh_shape.items() if axis != "stage"}
    return {
        name: fitted(name, table.activations[name], sizes, mesh_shape)
        for name, sizes in _split_units(config).items()
    }


def _split_units(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """For each dim of each activation, the number of units that may be on different devices.

    It is 0 for batch and sequence, whose sizes are not known here: every axis divides 0.
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
