"""Low-rank adapters of a Llama (LoRA, Hu et al. 2021): they are trained, and the model is not.

Beside a projection's `weight` (O, I) lie `lora_A` (R, I) and `lora_B` (O, R), and its output is
`x W^T + (alpha / R) (x A^T) B^T`. While they are trained, parameters are
`{"base": those of the model, "lora": adapters by the same paths}`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.numpy

from spmd.models.llama.config import DENSE, LAYERS, ConfigError
from spmd.models.llama.parameters import TOGETHER, Params
from spmd.models.llama.weights.files import write_json
from spmd.models.llama.weights.save import gathered, publish
from spmd.models.placement import Spec
from spmd.models.training.checkpoints.tables import STACKED, by_path, nested
from spmd.models.training.paths import AnyPath

TARGETS = tuple(dict.fromkeys(name for names in TOGETHER for name in names))
"""The projections of attention and of the MLP. Those of experts get no adapters."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What the adapters are.

    Raises:
        ConfigError: a rank or alpha that is not positive, or targets that are no projections.
    """

    rank: int
    alpha: float = 0.0  # their output is multiplied by `alpha / rank`; 0 is twice the rank
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 0 or not set(self.targets) <= set(TARGETS):
            raise ConfigError(f"{self}: give rank=16,alpha=32,targets={'+'.join(TARGETS)}, or less")

    @classmethod
    def parse(cls, text: str) -> LoraConfig:
        """`"rank=16"`, `"rank=16,alpha=32,targets=q_proj+v_proj"`."""
        given = dict(part.partition("=")[::2] for part in text.split(","))
        try:
            targets = given.pop("targets", "+".join(TARGETS))
            numbers = int(given.pop("rank")), float(given.pop("alpha", 0))
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{text!r} has no {error}; as in rank=16,alpha=32") from error
        if given:
            raise ConfigError(f"adapters have no {', '.join(given)}, but rank, alpha and targets")
        return cls(*numbers, tuple(targets.split("+")))

    def __str__(self) -> str:
        return f"rank={self.rank},alpha={self.alpha:g},targets={'+'.join(self.targets)}"

    @property
    def scale(self) -> float:
        """What the adapters' output is multiplied by."""
        return (self.alpha or 2.0 * self.rank) / self.rank

    def is_adapted(self, path: str) -> bool:
        """Whether the parameter of a path gets an adapter."""
        *_, block, name, kind = ("", "", *path.split("/"))
        return kind == "weight" and name in self.targets and block in ("self_attn", "mlp")


def init(key: jax.Array, base: Params, lora: LoraConfig) -> Params:
    """Draws adapters as PEFT does: A uniform in +-1/sqrt(I), B 0, so that they change nothing yet.

    Args:
        base: the model's parameters or structs, layers stacked or apart.
    """
    adapters: dict[str, jax.Array] = {}
    for path, leaf in by_path(base).items():
        if lora.is_adapted(path):
            *layers, outer, inner = leaf.shape
            one, bound = jax.random.fold_in(key, zlib.crc32(path.encode())), inner**-0.5
            a = jax.random.uniform(one, (*layers, lora.rank, inner), leaf.dtype, -bound, bound)
            b = jnp.zeros((*layers, outer, lora.rank), leaf.dtype)
            adapters |= dict(zip(_pair(path), (a, b), strict=True))
    return nested(adapters)


def rules(of_base: Mapping[str, Spec], lora: LoraConfig) -> dict[str, Spec]:
    """Specs of adapters by path pattern, of those of the weights: the rank is not split."""
    found: dict[str, Spec] = {}
    for path, spec in of_base.items():
        if lora.is_adapted(path):
            *layers, outer, inner = spec
            specs = (*layers, None, inner), (*layers, outer, None)
            found |= dict(zip(_pair(path), specs, strict=True))
    return found


def _pair(path: str) -> tuple[str, str]:
    parent = path.removesuffix("weight")
    return f"{parent}lora_A", f"{parent}lora_B"


def applied(params: Params, lora: LoraConfig) -> Params:
    """The parameters as `model.forward` takes them: adapters beside the weights, scaled."""
    adapters = {
        path: leaf * lora.scale if path.endswith("lora_B") else leaf
        for path, leaf in by_path(params["lora"]).items()
    }
    return nested({**by_path(params["base"]), **adapters})


def merged(params: Params, lora: LoraConfig) -> Params:
    """The parameters of a model that computes the same without adapters; others stay in place."""
    adapters, leaves = by_path(params["lora"]), by_path(params["base"])
    for path in filter(lora.is_adapted, leaves):
        weight, (a, b) = leaves[path], (adapters[name] for name in _pair(path))
        leaves[path] = _merge(weight, a, b, lora.scale, weight.sharding)
    return nested(leaves)


@functools.partial(jax.jit, static_argnames=("scale", "sharding"))
def _merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float, sharding: Any) -> jax.Array:
    wide = [x.astype(jnp.float32) for x in (weight, a, b)]
    found = wide[0] + scale * jnp.einsum("...or,...ri->...oi", wide[2], wide[1])
    placed: jax.Array = jax.lax.with_sharding_constraint(found.astype(weight.dtype), sharding)
    return placed


def save(adapters: Params, lora: LoraConfig, folder: str | AnyPath, base: str | None) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads; every process has to call it.

    Args:
        folder: new or empty.
        base: where the model's own weights are, for those who read `adapter_config.json`.

    Raises:
        WeightsError: the folder cannot be written.
    """
    tensors, first = {}, adapters.get("dense", {}).get("layers", {})
    dense = len(first) if "0" in first else len(next(iter(by_path(first).values()), ()))
    for path, leaf in by_path(adapters).items():
        stack = STACKED.match(path)
        places: list[tuple[int, ...]] = [(i,) for i in range(leaf.shape[0])] if stack else [()]
        for place in places:
            name = f"layers/{place[0]}/{stack['rest']}" if stack else path
            if path.startswith(LAYERS):  # behind those that are dense
                index, rest = name.removeprefix(LAYERS).split("/", 1)
                name = f"{LAYERS}{int(index) + dense}/{rest}"
            name = name.removeprefix(DENSE)
            dotted = f"base_model.model.model.{name}.weight".replace("/", ".")
            tensors[dotted] = gathered(leaf, place, "float32")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }

    def write(unfinished: AnyPath) -> None:
        (unfinished / "adapter_model.safetensors").write_bytes(
            safetensors.numpy.save(tensors, {"format": "pt"})
        )
        write_json(unfinished / "adapter_config.json", about)

    publish(folder, write)
