"""A Llama as a bundle: weights, read and quantized tensor by tensor, and what ends its texts."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from spmd.models.decode import ServingShape
from spmd.models.llama import quantize
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.weights.files import Array
from spmd.models.llama.weights.tensors import Source, Tensor
from spmd.serving.bundle.manifest import PLATFORMS
from spmd.serving.language_bundle import write_language_bundle


def write_llama_bundle(
    source: Source,
    folder: str | Path,
    shape: ServingShape,
    *,
    dtype: str = "bfloat16",
    kind: str = "none",
    name: str = "llama",
    golden_prompts: Sequence[Sequence[int]] = (),
    platforms: Sequence[str] = PLATFORMS,
    console: Console | None = None,
) -> None:
    """Write the bundle of a Llama; weights are read, converted and quantized tensor by tensor.

    Args:
      folder: new or empty.
      dtype: of weights that are not quantized, and of activations.
      kind: one of `quantize.QUANTIZATIONS`.
      golden_prompts: token ids; what the model goes on with is computed here, on all devices, and
        kept for servers to try.
      platforms: as for `write_bundle`.

    Raises:
      BundleError: sizes that do not fit, or a folder that cannot be written.
      ConfigError: weights that cannot be quantized so.
    """
    config = dataclasses.replace(source.config, dtype=dtype, param_dtype=dtype)
    made = {"kind": kind, "group": quantize.GROUP}
    write_language_bundle(
        folder,
        LlamaRows(config),
        shape,
        serving_weights(source, dtype, kind),
        eos_token_ids=eos_token_ids(source),
        bos_token_id=config.bos_token_id,
        tokenizer_from=source.tokenizer_from,
        golden_prompts=golden_prompts,
        facts=dataclasses.asdict(config),
        quantization=_stored_kind(source) if kind == "none" else made,
        name=name,
        console=console,
        platforms=platforms,
    )


def eos_token_ids(source: Source) -> list[int]:
    """Every token that ends a text: the config's, and those of `generation_config.json`."""
    found = source.config.eos_token_id
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if source.tokenizer_from is not None:
        try:
            file = source.tokenizer_from / "generation_config.json"
            more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            more = None
        ids += more if isinstance(more, list) else [] if more is None else [more]
    return [i for i in dict.fromkeys(ids) if isinstance(i, int)]


# Weights


def serving_weights(source: Source, dtype: str, kind: str) -> Any:
    """The tree of weights that `LlamaRows` takes; leaves are read when it is their turn.

    Matrices that are stored quantized stay as they are if `kind` is `none`.
    """
    tree = jax.tree.map(lambda tensor: tensor.astype(dtype), source.tree())
    if kind == "none":
        return _as_stored(tree)
    # Numbers are rounded once: from what is stored.
    return quantize.quantize(tree, kind, lambda t, kind: _parts(source.tensors[t.name], kind))


def _as_stored(tree: Any, name: str = "") -> Any:
    """The tree with parts in place of matrices that are stored quantized, where decoding can."""
    if not isinstance(tree, Mapping) or name == "experts":
        return tree
    if name in quantize.QUANTIZED and tree["weight"].parts:
        return {key: x for key, x in tree.items() if key != "weight"} | tree["weight"].parts
    is_latent = "kv_b_proj" in tree  # whose queries are multiplied by the model's own code
    return {k: x if is_latent and k == "q_proj" else _as_stored(x, k) for k, x in tree.items()}


def _stored_kind(source: Source) -> dict[str, Any] | None:
    """How the source's matrices are quantized: the nearest of `quantize.QUANTIZATIONS`."""
    for tensor in source.tensors.values():
        if tensor.parts:
            values, scales = tensor.parts["values"], tensor.parts["scales"]
            kind = {"uint8": "int4", "int8": "int8"}.get(values.dtype, "fp8")
            return {"kind": kind, "group": tensor.shape[1] // math.prod(scales.shape[1:])}
    return None


def _parts(tensor: Tensor, kind: str) -> dict[str, Tensor]:
    make = functools.partial(_quantized, tensor, kind)
    types = quantize.weight_types(tensor.shape, kind)
    return Tensor.several(tensor.name, types, make, tensor.together)


@functools.lru_cache(maxsize=1)
def _quantized(tensor: Tensor, kind: str) -> Mapping[str, Array]:
    """One after the other, values and scales are asked for: made once."""
    return quantize.quantize_weight(tensor, kind)
