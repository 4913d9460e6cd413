"""A Llama as a bundle: weights, read and quantized tensor by tensor, and what ends its texts."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from spmd.models.decode import ServingShape
from spmd.models.decode.exports import default_specs
from spmd.models.function import Function
from spmd.models.llama import quantize
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.model import last_states
from spmd.models.llama.weights.files import Array
from spmd.models.llama.weights.save import GENERATION_CONFIG_FILE
from spmd.models.llama.weights.tensors import Source, Tensor
from spmd.models.training.data.tokenizer import BYTES
from spmd.models.training.paths import json_object
from spmd.serving.bundle.manifest import PLATFORMS
from spmd.serving.bundle.write import write_bundle
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


POOLINGS = ("last", "mean")


def write_embedding_bundle(
    source: Source,
    folder: str | Path,
    length: int,
    pooling: str,
    *,
    dtype: str = "bfloat16",
    name: str = "llama",
    platforms: Sequence[str] = PLATFORMS,
    console: Console | None = None,
) -> None:
    """Write a bundle that makes vectors of texts, for `/v1/embeddings`.

    Its one function takes `input_ids` and `attention_mask` (B, L), which is 0 behind a text, and
    gives `embeddings` (B, H) of length 1: of the last token's state, or of the mean of all.

    Args:
      length: L, the tokens of a text at most.
      pooling: one of `POOLINGS`.

    Raises:
      BundleError: as of `write_bundle`.
    """
    config = dataclasses.replace(source.config, dtype=dtype, param_dtype=dtype, attention="auto")

    def embed(weights: Any, ids_BL: Any, mask_BL: Any) -> dict[str, Any]:
        states_BLH = last_states(weights, ids_BL, config)[0].astype(np.float32)
        if pooling == "last":
            ends_B1 = jnp.sum(mask_BL, axis=1, keepdims=True) - 1
            weight_BL = jnp.arange(length) == ends_B1
        else:
            weight_BL = mask_BL / jnp.sum(mask_BL, axis=1, keepdims=True)
        pooled_BH = jnp.einsum("blh,bl->bh", states_BLH, weight_BL.astype(np.float32))
        norm_B1 = jnp.linalg.norm(pooled_BH, axis=1, keepdims=True)
        return {"embeddings": pooled_BH / jnp.maximum(norm_B1, 1e-12)}

    weights = jax.tree.map(lambda tensor: tensor.astype(dtype), source.tree())
    structs = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), weights)
    ids = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), length), np.int32)
    names = ("weights", "input_ids", "attention_mask")
    function = Function("embed", embed, (structs, ids, ids), names, ("weights", "input", "input"))
    specs = default_specs(LlamaRows(config), {"weights": structs})
    of_rows = dict.fromkeys((*names[1:], "outputs/embeddings"), ("data", None))
    write_bundle(
        folder, [function], weights=weights, specs={**specs, **of_rows},
        tokenizer_from=source.tokenizer_from, contract={BYTES: source.tokenizer_from is None},
        name=name, platforms=platforms, console=console,
    )  # fmt: skip


def eos_token_ids(source: Source) -> list[int]:
    """Every token that ends a text: the config's, and those of `generation_config.json`."""
    found = source.config.eos_token_id
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if source.tokenizer_from is not None:
        more = json_object(source.tokenizer_from / GENERATION_CONFIG_FILE).get("eos_token_id")
        ids += more if isinstance(more, list) else [] if more is None else [more]
    return [i for i in dict.fromkeys(ids) if isinstance(i, int)]


# Weights


def serving_weights(source: Source, dtype: str, kind: str) -> Any:
    """The tree of weights that `LlamaRows` takes; leaves are read when it is their turn.

    Matrices that are stored quantized stay as they are if `kind` is `none`.
    """
    stored = source.tree()
    tree = jax.tree.map(lambda tensor: tensor.astype(dtype), stored)
    if kind == "none":
        return _as_stored(tree)
    # Numbers are rounded once: from what is stored.
    exact = {tensor.name: tensor for tensor in jax.tree.leaves(stored)}
    return quantize.quantize(tree, kind, lambda t, kind: _parts(exact[t.name], kind))


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
    """One after the other, values and scales are asked for: made once, expert by expert."""
    if len(tensor.shape) == 2:
        return quantize.quantize_weight(tensor, kind)
    inside = tuple(slice(0, size) for size in tensor.shape[1:])
    pieces = (tensor[(slice(i, i + 1), *inside)] for i in range(tensor.shape[0]))
    found = [quantize.quantize_weight(piece, kind) for piece in pieces]
    return {part: np.concatenate([one[part] for one in found]) for part in found[0]}
