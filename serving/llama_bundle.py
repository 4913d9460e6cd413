"""A Llama as a bundle: the functions of `models.llama.decode`, weights, and what callers need."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import spmd
from models import sampling
from models.llama import decode, quantize
from models.llama.config import LlamaConfig
from models.llama.decode import ServingShape
from models.llama.weights.files import Array, Index
from models.llama.weights.sources import Source, Tensor
from serving.bundle.function import BundleError
from serving.bundle.manifest import PLATFORMS
from serving.bundle.read import load_bundle
from serving.bundle.write import write_bundle
from serving.engine.model_backend import generate
from serving.llama_backend import KIND, model_backend

GOLDEN_TOKENS = 8


def check_shape(shape: ServingShape) -> None:
    """Raise a `BundleError` that names the flag unless the sizes of a shape fit each other."""
    for name, size in shape._asdict().items():
        if isinstance(size, int) and size < (0 if name == "top_logprobs" else 1):
            raise BundleError(f"--{name}: {size} is too few")
    if shape.slots % shape.groups:
        raise BundleError(
            f"--slots: {shape.slots} cannot be split evenly into --groups {shape.groups}"
        )
    for name, sizes in (("rows", shape.rows), ("length", shape.lengths)):
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise BundleError(f"--{name}: {list(sizes)} are no ascending positive numbers")
    uneven = [n for n in (shape.max_length, *shape.lengths) if n % shape.page]
    if uneven:
        flag = "max_length" if uneven[0] == shape.max_length else "length"
        raise BundleError(f"--{flag}: {uneven[0]} is no multiple of --page {shape.page}")
    if shape.lengths[-1] != shape.max_length:
        raise BundleError(
            f"--length: the last, {shape.lengths[-1]}, has to be --max_length {shape.max_length}"
        )
    if shape.rows[-1] < shape.slots_of_group:
        raise BundleError(
            f"--rows: the last, {shape.rows[-1]}, is less than the {shape.slots_of_group} slots of "
            "a group, which all decode in one step"
        )


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
      source: the model.
      folder: new or empty.
      shape: the sizes that it serves with.
      dtype: of weights that are not quantized, and of activations.
      kind: one of `quantize.QUANTIZATIONS`.
      name: of the bundle.
      golden_prompts: token ids; what the model goes on with is computed here, on all devices, and
        kept for servers to try.
      platforms: as for `write_bundle`.
      console: progress bars go here.

    Raises:
      BundleError: sizes that do not fit, or a folder that cannot be written.
      ConfigError: weights that cannot be quantized so.
    """
    check_shape(shape)
    config = dataclasses.replace(source.config, dtype=dtype, param_dtype=dtype)
    for prompt in golden_prompts:
        _check_prompt(prompt, shape, config)
    weights = serving_weights(source, dtype, kind)
    structs = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), weights)
    functions, state, specs, primary = decode.functions(config, shape, structs)
    contract = {
        "kind": KIND,
        "model": dataclasses.asdict(config),
        "shape": shape._asdict(),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos_token_ids(source),
        "sampler": {"fields": list(sampling.FIELDS), "temperature_0": "takes the likeliest token"},
    }
    goldens = functools.partial(_goldens, prompts=golden_prompts, shape=shape, config=config)
    write_bundle(
        folder,
        functions,
        weights=weights,
        # Small: they are read by the host, and written by it.
        specs={**specs, "inputs/*": (), "outputs/*": ()},
        state=state,
        primary=primary,
        tokenizer_from=source.tokenizer_from,
        contract=contract,
        goldens=goldens if golden_prompts else (),
        quantization=None if kind == "none" else {"kind": kind, "group": quantize.GROUP},
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
    """The tree of weights that `decode.functions` takes; leaves are read when it is their turn."""
    tree = jax.tree.map(lambda tensor: tensor.astype(dtype), source.tree())
    exact = {name: tensor for name, tensor in source.tensors.items()}
    # Numbers are rounded once: from what is stored.
    return quantize.quantize(tree, kind, lambda t, kind: _parts(exact[t.name], kind))


def _parts(tensor: Tensor, kind: str) -> dict[str, Tensor]:
    def read(part: str, index: Index) -> Array:
        return _quantized(tensor, kind)[part][index]

    return {
        part: Tensor(
            f"{tensor.name}.{part}", tuple(struct.shape), np.dtype(struct.dtype).name,
            functools.partial(read, part), tensor.together,
        )
        for part, struct in quantize.weight_types(tensor.shape, kind).items()
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def _quantized(tensor: Tensor, kind: str) -> Mapping[str, Array]:
    """One after the other, values and scales are asked for: made once."""
    return quantize.quantize_weight(tensor, kind)


# Goldens


def _check_prompt(prompt: Sequence[int], shape: ServingShape, config: LlamaConfig) -> None:
    longest = shape.max_length - GOLDEN_TOKENS
    if not 1 <= len(prompt) <= longest:
        raise BundleError(
            f"--golden_prompts: a prompt has {len(prompt)} tokens; 1 to {longest} fit"
        )
    if max(prompt) >= config.vocab_size:
        raise BundleError(f"--golden_prompts: token {max(prompt)} is not in the vocabulary")


def _goldens(
    folder: Path, *, prompts: Sequence[Sequence[int]], shape: ServingShape, config: LlamaConfig
) -> list[dict[str, Any]]:
    """What a bundle goes on with after each prompt, on the devices that are here."""
    devices = jax.devices()
    mesh = spmd.Mesh([device.id for device in devices], (len(devices),), ("model",))
    longest = max(map(len, prompts))
    lengths = _up_to(shape.lengths, longest + GOLDEN_TOKENS)
    sizes = itertools.product(_up_to(shape.rows, longest), lengths)
    names = [decode.step_name("step", rows, length) for rows, length in sizes]
    pages = {decode.PAGES: shape.pages_of_slot}  # one sequence is run at a time
    bundle = load_bundle(folder, mesh, verify=False, functions=("begin", *names), symbols=pages)
    backend = model_backend(bundle)
    made = [(prompt, *generate(backend, prompt, GOLDEN_TOKENS)) for prompt in prompts]
    return [{"prompt": list(p), "tokens": tokens, "logprobs": found} for p, tokens, found in made]


def _up_to(sizes: Sequence[int], wanted: int) -> Sequence[int]:
    """Some ascending sizes up to the smallest that holds so many, or all."""
    return sizes[: bisect.bisect_left(sizes, wanted) + 1]
