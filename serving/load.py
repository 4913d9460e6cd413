"""A bundle as what the server serves: backend, tokenizer and chat template, or named tensors."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.models.training.data.tokenizer import BYTE_VOCABULARY, BYTES, Tokenizer, load_tokenizer
from spmd.models.training.errors import DataError
from spmd.progress import Stopwatch
from spmd.serving.bundle.bundle import Bundle, seconds_of_xla
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.write import TOKENIZER
from spmd.serving.engine.backend import Backend
from spmd.serving.engine.model_backend import ModelBackend, generate
from spmd.serving.http.language import Loaded
from spmd.serving.language_backend import is_language_model, model_backend, step_seconds
from spmd.serving.tensor_backend import BundleInfer

_LOG = logging.getLogger("serving")

NEAR = {"float32": 0.02}
"""Dtype -> how far log-probabilities may be apart on other hardware."""

NEAR_ELSE = 0.25


def load_model(bundle: Bundle, folder: str | Path, name: str | None = None) -> Loaded:
    """What the server serves, warm and compared with the bundle's goldens.

    Args:
      folder: where it came from: the tokenizer is read there.
      name: in requests; the bundle's own if left out.

    Raises:
      BundleError: no usable tokenizer, a broken contract, or goldens that come out differently.
    """
    name = name or bundle.manifest.name
    if not is_language_model(bundle):
        return Loaded(name, infer=BundleInfer(bundle))
    backend = model_backend(bundle)
    clock = Stopwatch()
    clock("warm-up", backend.warm_up)
    dtype = bundle.manifest.contract["model"].get("dtype")
    near = NEAR.get(str(dtype), NEAR_ELSE)
    clock("goldens", check_goldens, backend, bundle.manifest.goldens, near)
    files = Path(folder) / TOKENIZER
    try:
        settings = json.loads((files / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    settings = settings if isinstance(settings, dict) else {}
    special = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    tokenizer = clock("tokenizer", _tokenizer, bundle, files)
    _tell_seconds({**bundle.seconds, **clock.seconds})
    return Loaded(
        name,
        background=_adding(bundle, backend),
        backend=backend,
        tokenizer=tokenizer,
        stop_ids=frozenset(bundle.manifest.contract.get("eos_token_ids", ())),
        chat_template=_chat_template(files, settings),
        special_tokens={name: text for name, text in special.items() if isinstance(text, str)},
    )


def _tell_seconds(parts: Mapping[str, float]) -> None:
    """Says where the time of a start went; `benchmarks/run starts` reads it."""

    def listed(seconds: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {took:.1f}" for name, took in seconds.items())

    _LOG.info("seconds: %s; on other threads: %s", listed(parts), listed(seconds_of_xla()))


def _adding(bundle: Bundle, backend: ModelBackend) -> threading.Thread:
    """Gives a backend the functions that are still being compiled, as they come."""

    def add() -> None:
        started, count = time.monotonic(), 0
        try:
            backend.warm_up("score")
            for name in bundle.arrivals():
                backend.add(name)
                backend.seconds = step_seconds(bundle, backend.limits, backend.info)
                count += 1
        except BundleError as error:
            _LOG.error("steps of other sizes take its place: %s", error)
        if count:
            seconds = time.monotonic() - started
            _LOG.info("%d more functions are compiled, after %.1f s", count, seconds)

    thread = threading.Thread(target=add, name="arrivals", daemon=True)
    thread.start()
    return thread


def check_goldens(backend: Backend, goldens: Any, tolerance: float) -> None:
    """Go on with each golden prompt, greedily, and compare.

    Another token that the model finds as likely ends the comparison of that prompt: sums in another
    order may decide so.

    Args:
      goldens: `prompt`, `tokens` and the tokens' `logprobs` of each.
      tolerance: how far log-probabilities may be apart.

    Raises:
      BundleError: a log-probability is further off.
    """
    for number, golden in enumerate(goldens):
        wanted, logprobs = golden["tokens"], golden["logprobs"]
        tokens, found = generate(backend, golden["prompt"], len(wanted))
        for position, (a, b) in enumerate(zip(tokens, wanted, strict=True)):
            if not abs(found[position] - logprobs[position]) < tolerance:  # nor for NaN
                raise BundleError(
                    f"golden prompt {number}: token {position} is {a} with log-probability "
                    f"{found[position]:.3f} and should be {b} with {logprobs[position]:.3f}; this "
                    "machine computes the model wrongly, or the bundle was changed"
                )
            if a != b:
                _LOG.warning("golden %d: token %d is a close call, and differs", number, position)
                break
    if goldens:
        _LOG.info("%d golden prompts come out as they should", len(goldens))


def _tokenizer(bundle: Bundle, files: Path) -> Tokenizer:
    vocabulary = bundle.manifest.contract["model"]["vocab_size"]
    if not (files / "tokenizer.json").is_file():
        if vocabulary < BYTE_VOCABULARY:
            raise BundleError(
                f"{bundle.manifest.name} has no tokenizer.json, and its vocabulary of {vocabulary} "
                "is too small for bytes; export it with --tokenizer"
            )
        return load_tokenizer(BYTES)
    try:
        return load_tokenizer(str(files))
    except DataError as error:
        raise BundleError(str(error)) from error


def _chat_template(files: Path, settings: dict[str, Any]) -> str | None:
    """`chat_template.jinja`, or what `tokenizer_config.json` has: a text, or several by name."""
    try:
        return (files / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
