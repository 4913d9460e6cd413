"""A language model as a bundle: its functions, its weights, and what servers have to know.

docs/language_models.md says what such a bundle holds, and what a model has to be.
"""

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import spmd
from spmd.models import sampling
from spmd.models.decode import PAGES, RowsModel, ServingShape, functions, step_name
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import PLATFORMS
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import write_bundle
from spmd.serving.engine.model_backend import generate
from spmd.serving.language_backend import KIND, model_backend

GOLDEN_TOKENS = 8

SMALL: Mapping[str, tuple[Any, ...]] = {"inputs/*": (), "outputs/*": ()}
"""Specs of what is read by the host, and written by it."""


def check_shape(shape: ServingShape) -> None:
    """Raise a `BundleError` that names the flag unless the sizes of a shape fit each other."""
    for name, size in shape._asdict().items():
        if isinstance(size, int) and size < (name not in ("top_logprobs", "drafts", "adapters")):
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


def write_language_bundle(
    folder: str | Path,
    model: RowsModel,
    shape: ServingShape,
    weights: Any,
    *,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    tokenizer_from: str | Path | None = None,
    golden_prompts: Sequence[Sequence[int]] = (),
    facts: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    name: str = "model",
    console: Console | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Write the bundle of a language model, for `scripts/serve`.

    Args:
      folder: new or empty.
      model: what it computes.
      weights: the tree that `model` takes, of arrays or whatever else `write_bundle` reads.
      eos_token_ids: tokens that end a text.
      bos_token_id: the token that begins one, if there is any.
      tokenizer_from: a folder with the tokenizer's files and its chat template; without one texts
        are bytes.
      golden_prompts: token ids; what the model goes on with is computed here, on all devices, and
        kept for servers to try.
      facts: on the model, for people; a `dtype` says how exact it is.
      name: of the bundle.
      platforms: as for `write_bundle`.

    Raises:
      BundleError: sizes that do not fit, or a folder that cannot be written.
    """
    check_shape(shape)
    longest = shape.max_length - GOLDEN_TOKENS
    for prompt in golden_prompts:
        if not 1 <= len(prompt) <= longest:
            raise BundleError(
                f"--golden_prompts: a prompt has {len(prompt)} tokens; 1 to {longest} fit"
            )
        if max(prompt) >= model.vocab_size:
            raise BundleError(f"--golden_prompts: token {max(prompt)} is not in the vocabulary")
    structs = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), weights)
    exported, state, specs, primary = functions(model, shape, structs)
    goldens = functools.partial(_goldens, prompts=golden_prompts, shape=shape)
    write_bundle(
        folder,
        exported,
        weights=weights,
        specs={**specs, **SMALL},
        state=state,
        primary=primary,
        tokenizer_from=tokenizer_from,
        contract={
            **contract(model, shape, facts),
            "bos_token_id": bos_token_id,
            "eos_token_ids": list(eos_token_ids),
        },
        goldens=goldens if golden_prompts else (),
        quantization=quantization,
        name=name,
        console=console,
        platforms=platforms,
    )


def contract(
    model: RowsModel, shape: ServingShape, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What servers have to know of the functions."""
    sizes = shape._asdict()
    if not shape.adapters:  # programs that know of none read such bundles, too
        del sizes["adapters"], sizes["adapter_rank"]
    return {
        "kind": KIND,
        "model": {**(facts or {}), "vocab_size": model.vocab_size},
        "shape": sizes,
        "unread": list(model.unread),
        "sampler": {"fields": list(sampling.FIELDS), "temperature_0": "takes the likeliest token"},
    }


def _goldens(
    folder: Path, *, prompts: Sequence[Sequence[int]], shape: ServingShape
) -> list[dict[str, Any]]:
    """What a bundle goes on with after each prompt, on the devices that are here."""
    devices = jax.devices()
    mesh = spmd.Mesh([device.id for device in devices], (len(devices),), ("model",))
    made = continue_prompts(folder, mesh, shape, prompts, GOLDEN_TOKENS)
    return [
        {"prompt": list(prompt), "tokens": tokens, "logprobs": found}
        for prompt, (tokens, found) in zip(prompts, made, strict=True)
    ]


def continue_prompts(
    folder: str | Path, mesh: Any, shape: ServingShape, prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[list[int], list[float]]]:
    """The likeliest continuation of each prompt, by those functions of a bundle that this takes.

    Args:
      prompts: token ids.
      count: how many tokens to draw behind each.

    Returns:
      (tokens, their log-probabilities) for each prompt.

    Raises:
      BundleError: it cannot be loaded.
    """
    longest = max(map(len, prompts))
    lengths = _up_to(shape.lengths, longest + count)
    sizes = itertools.product(_up_to(shape.rows, longest), lengths)
    names = [step_name("step", rows, length) for rows, length in sizes]
    pages = {PAGES: shape.pages_of_slot}  # one sequence is run at a time
    bundle = load_bundle(folder, mesh, verify=False, functions=("begin", *names), symbols=pages)
    backend = model_backend(bundle)
    return [generate(backend, prompt, count) for prompt in prompts]


def _up_to(sizes: Sequence[int], wanted: int) -> Sequence[int]:
    """Some ascending sizes up to the smallest that holds so many, or all."""
    return sizes[: bisect.bisect_left(sizes, wanted) + 1]
