"""A Llama's bundle as the engine wants it, and its likeliest tokens to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models import sampling
from models.llama.decode import ServingShape
from serving.backend import Limits
from serving.bundle import Bundle
from serving.function import BundleError
from serving.model_backend import ModelBackend

KIND = "llama"
GOLDEN_TOKENS = 8


def model_backend(bundle: Bundle) -> ModelBackend:
    """What the engine runs: a Llama's bundle.

    Raises:
      BundleError: it is of something else.
    """
    contract = bundle.manifest.contract
    if contract.get("kind") != KIND:
        kind = repr(contract.get("kind"))[:40]
        raise BundleError(f"{bundle.manifest.name} is no language model: its kind is {kind}")
    try:
        shape, model = dict(contract["shape"]), contract["model"]
        limits = Limits(
            slots=int(shape["slots"]),
            max_length=int(shape["max_length"]),
            chunks=tuple(map(int, shape["chunks"])),
            decode_steps=int(shape["decode_steps"]),
            top_logprobs=int(shape["top_logprobs"]),
            vocab_size=int(model["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the contract of {bundle.manifest.name} is broken: {error}") from error
    return ModelBackend(bundle, limits, info(bundle))


def info(bundle: Bundle) -> dict[str, Any]:
    """Facts about a bundle for people and metrics; bytes are those of all devices together."""
    device = bundle.devices[0]
    return {
        "name": bundle.manifest.name,
        "mesh": str(bundle.mesh),
        "devices": bundle.mesh.size,
        "device_kind": str(device.device_kind),
        "weight_bytes": sum(x.nbytes for x in bundle.weights.values()),
        "state_bytes": sum(x.nbytes for x in bundle.state.values()),
    }


# Goldens


def golden(
    bundle: Bundle, prompt: Sequence[int], shape: ServingShape, vocab_size: int
) -> dict[str, Any]:
    """The likeliest tokens after a prompt, with log-probabilities.

    Returns:
      `prompt` and `tokens`, ids; `logprobs` of `tokens`. A later token may be another one on other
      hardware where two are about as likely: then its log-probability is close.
    """
    bundle.reset_state()
    largest = shape.chunks[-1]
    report: Any = None
    for start in range(0, len(prompt), largest):
        report = _prefill(bundle, prompt, start, prompt[start : start + largest], shape, vocab_size)
    tokens, logprobs = [int(report.ids[0])], [float(report.logprobs[0])]
    while len(tokens) < GOLDEN_TOKENS:
        steps = min(shape.decode_steps, GOLDEN_TOKENS - len(tokens))
        length = bucket(shape.lengths, len(prompt) + len(tokens) + steps)
        active = np.arange(shape.slots) == 0
        control = {"active": active, "alternatives": False, "steps": steps}
        made = bundle.run(f"decode_t{length}", control)
        tokens += np.asarray(made.ids)[:steps, 0].tolist()
        logprobs += np.asarray(made.logprobs)[:steps, 0].tolist()
    return {"prompt": list(prompt), "tokens": tokens, "logprobs": logprobs}


def _prefill(
    bundle: Bundle,
    prompt: Sequence[int],
    start: int,
    part: Sequence[int],
    shape: ServingShape,
    vocab_size: int,
) -> Any:
    size = bucket(shape.chunks, len(part))
    length = bucket(shape.lengths, max(start + len(part), size))
    greedy = {n: np.asarray(neutral, dtype) for n, (dtype, neutral) in sampling.FIELDS.items()}
    seen = np.zeros(vocab_size, np.bool_)
    seen[list(prompt)] = True
    chunk = {
        "tokens": np.pad(np.asarray(part, np.int32), (0, size - len(part))),
        "count": len(part),
        "slot": 0,
        "start": start,
        "last": start + len(part) == len(prompt),
        "seen": seen,
        "sampling": {**greedy, "temperature": np.float32(0)},
    }
    return bundle.run(f"prefill_s{size}_t{length}", chunk)["first"]


def bucket(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of some ascending sizes that holds so many; the last one if none does."""
    return next((size for size in sizes if size >= wanted), sizes[-1])
