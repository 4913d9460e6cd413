"""Low-rank adapters of a Llama (LoRA, Hu et al. 2021): they are trained, and the model is not.

Beside a projection's `weight` (O, I) lie `lora_A` (R, I) and `lora_B` (O, R), and its output is
`x W^T + (alpha / R) (x A^T) B^T`. While they are trained, parameters are
`{"base": those of the model, "lora": adapters by the same paths}`.
"""

import dataclasses
import functools
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from spmd.models.function import StateLeaf
from spmd.models.llama import fresh
from spmd.models.llama.config import DENSE, LAYERS, ConfigError, LlamaConfig
from spmd.models.llama.parameters import TOGETHER, Params
from spmd.models.llama.weights.files import FLOAT_NAMES, Array, Index, WeightsError, write_json
from spmd.models.llama.weights.save import gathered, publish
from spmd.models.llama.weights.tensors import Source, Tensor, unrolled
from spmd.models.placement import Spec
from spmd.models.training.checkpoints.tables import STACKED, by_path, nested
from spmd.models.training.paths import AnyPath

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder, as PEFT has them."""

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
    def parse(cls, text: str) -> "LoraConfig":
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
        (unfinished / TENSORS).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
        write_json(unfinished / CONFIG, about)

    publish(folder, write)


# Adapters that others trained, from PEFT's folders: served beside the weights, or merged into them.

Pair = tuple[Array, Array]
"""A (R, I) and B (O, R), in float32; B is scaled."""

LARGEST = 1e4
"""Of an adapter's numbers. Rows of others multiply what they are by 0, which must not overflow."""

HEEDED = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
))  # fmt: skip
"""Members of a config that are heeded, or change nothing once the adapter is trained."""

# Adapters that begin in another way are of weights that are not the base's.
HARMLESS = {"init_lora_weights": (True, "gaussian", "eva", "orthogonal"), "bias": ("none",)}

_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)


def places(config: LlamaConfig, count: int, rank: int) -> Any:
    """Room for adapters beside weights: leaves of zeros, `lora_A` (N, R, I), `lora_B` (N, R, O)."""
    if config.kv_lora_rank or config.dtype == "float16":  # in which others' products overflow
        raise ConfigError("--adapters: not with latent attention, and not in float16; leave it out")
    found, lora = dict[str, StateLeaf](), LoraConfig(rank)
    structs = jax.eval_shape(lambda key: fresh.init(key, unrolled(config)), jax.random.key(0))
    for path, leaf in by_path(structs).items():
        if lora.is_adapted(path):
            outer, inner = leaf.shape
            shapes = (count, rank, inner), (count, rank, outer)
            pair = [StateLeaf(shape, config.dtype) for shape in shapes]
            found |= dict(zip(_pair(path), pair, strict=True))
    return nested(found)


def read(folder: str | Path) -> dict[str, Pair]:
    """Reads what `peft.PeftModel.save_pretrained` writes: `model.layers.0.mlp.up_proj` -> pair.

    Raises:
        WeightsError: it is no such folder, it is broken, or has what is not served.
    """
    folder = Path(folder)
    scale = _scaling(folder / CONFIG)
    halves = dict[tuple[str, str], Array]()
    if not (folder / TENSORS).is_file():
        raise WeightsError(f"{folder} has no {TENSORS}; name a folder that PEFT wrote")
    try:
        with safe_open(folder / TENSORS, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                match, kind = _TENSOR.fullmatch(name), file.get_slice(name).get_dtype()
                if match is None or match[2] not in TARGETS or kind not in FLOAT_NAMES:
                    raise WeightsError(
                        f"{folder}: {name[:100]!r} ({kind}) is not served; adapters are of "
                        f"{', '.join(TARGETS)}, in float numbers"
                    )
                halves[match[1], match[3]] = file.get_tensor(name).astype(np.float32)
    except (SafetensorError, OSError, TypeError) as error:
        raise WeightsError(f"{folder / TENSORS} is truncated or broken: {error}") from None
    pairs = dict[str, Pair]()
    for module in sorted({module for module, _ in halves}):
        a, b = (halves.get((module, half), np.zeros(())) for half in "AB")
        if a.ndim != 2 or b.ndim != 2 or not a.size or not b.size or len(a) != b.shape[1]:
            raise WeightsError(f"{folder}: {module}: A {a.shape} and B {b.shape} are no pair")
        pairs[module] = a, b * np.float32(scale(module, len(a)))
        if not all(np.abs(half).max() <= LARGEST for half in pairs[module]):  # nor NaN
            raise WeightsError(f"{folder}: {module}: numbers beyond {LARGEST:g}, or none at all")
    return pairs


def _scaling(file: Path) -> Callable[[str, int], float]:
    """Checks a config; returns what the adapter of a module is multiplied by if it has a rank."""
    try:
        if not file.is_file() or file.stat().st_size > 1 << 20:
            raise ValueError("there is no such file, or a larger one than 1 MiB")
        about = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or about.get("peft_type") != "LORA":
            raise ValueError("it is no adapter of the type LORA")
        patterns = about.get("alpha_pattern") or {}
        if any(re.search(r"\)[*+?{]|([*+?{].*){4}", one) for one in patterns):  # it takes for ever
            raise ValueError("its alpha_pattern is too hard to match")
        alphas = [(re.compile(rf"(.*\.)?({k})$"), float(alpha)) for k, alpha in patterns.items()]
        usual = float(about.get("lora_alpha", 8))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, re.error) as error:
        raise WeightsError(f"{file} cannot be used: {str(error)[:200]}") from None
    given = (name for name, value in about.items() if value and value not in HARMLESS.get(name, ()))
    if unserved := sorted(set(given) - HEEDED):
        raise WeightsError(f"{file}: {', '.join(unserved)[:200]} cannot be served; train without")

    def scale(module: str, rank: int) -> float:
        alpha = next((alpha for one, alpha in alphas if one.match(module)), usual)
        return alpha / (rank**0.5 if about.get("use_rslora") else rank)

    return scale


def placed(pairs: Mapping[str, Pair], leaves: Mapping[str, Any], what: str) -> dict[str, Array]:
    """What a place of `places` holds of an adapter: by path A (R, I) and B (R, O), filled up.

    Args:
        leaves: path -> leaf of `places`.
        what: names the adapter in a `WeightsError` about modules, shapes or ranks that do not fit.
    """
    dense = len({path.split("/")[2] for path in leaves if path.startswith(DENSE)})
    found, rest = dict[str, Array](), dict(pairs)
    for path, leaf in leaves.items():
        *parents, name = path.removeprefix(DENSE).split("/")
        parents[1] = str(int(parents[1]) + (0 if path.startswith(DENSE) else dense))
        module, (most, width) = ".".join(("model", *parents)), leaf.shape[1:]
        found[path] = np.zeros((most, width), leaf.dtype)
        if module not in pairs:
            continue
        a, b = pairs[module]
        half = a if name == "lora_A" else b.T
        if half.shape[1] != width or len(half) > most:
            raise WeightsError(
                f"{what}: {module}: {name} is of rank {len(half)} and width {half.shape[1]}, and "
                f"there is room for rank {most} (--adapter_rank) of width {width}"
            )
        found[path][: len(half)] = half
        rest.pop(module, None)
    if rest:
        raise WeightsError(f"{what}: the model has no {min(rest)}")
    return found


def merged_source(source: Source, folder: str | Path) -> Source:
    """The same model with an adapter merged into its weights as they are read; see `read`."""
    tensors = dict(source.tensors)
    for module, (a, b) in read(folder).items():
        base = tensors.get(f"{module}.weight")
        if base is None or base.shape != (len(b), a.shape[1]):
            raise WeightsError(f"{folder}: the model has no {module} of {len(b)} x {a.shape[1]}")

        def merge(index: Index, base: Tensor = base, a: Array = a, b: Array = b) -> Array:
            product: Array = b[index[0]] @ a[:, index[1]]
            return base.read(index).astype(np.float32) + product

        # What is stored quantized does not stay as it is.
        tensors[base.name] = dataclasses.replace(base, read=merge, parts={})
    return dataclasses.replace(source, tensors=tensors, about=f"{source.about} with {folder}")
