"""A bundle as what the server serves: backend, tokenizer and chat template, or named tensors."""

import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmd.models.decode.shape import most_drafts
from spmd.models.llama.weights.save import GENERATION_CONFIG_FILE
from spmd.models.training.data.chat import special_tokens, template_source
from spmd.models.training.data.tokenizer import (
    BYTE_VOCABULARY,
    BYTES,
    SETTINGS,
    Tokenizer,
    load_tokenizer,
    same_ids,
)
from spmd.models.training.errors import DataError
from spmd.models.training.paths import json_object
from spmd.progress import Stopwatch
from spmd.serving import language_backend as language
from spmd.serving.bundle.bundle import Bundle, seconds_of_xla
from spmd.serving.bundle.folder import read_manifest
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import Manifest
from spmd.serving.bundle.write import TOKENIZER
from spmd.serving.engine.backend import Backend
from spmd.serving.engine.draft_model import DraftedBackend
from spmd.serving.engine.model_backend import ModelBackend, generate
from spmd.serving.http.language import Loaded
from spmd.serving.tensor_backend import BundleInfer

_LOG = logging.getLogger("serving")

NEAR = {"float32": 0.02}
"""Dtype -> how far log-probabilities may be apart on other hardware."""

NEAR_ELSE = 0.25


def check_draft(folder: str | Path, draft: str | Path) -> None:
    """Raise a `BundleError` unless the bundle `draft` can guess tokens for the one in `folder`."""
    both = [(Path(one), read_manifest(one)) for one in (folder, draft)]
    for one, manifest in both:
        if manifest.contract.get("kind") != language.KIND:
            raise BundleError(f"--speculative_model: {one} is no language model")
    sizes = [{**of.contract["shape"], **of.contract["model"]} for _, of in both]
    if not most_drafts(sizes[0].get("drafts", 0), sizes[0]["page"], sizes[0]["max_length"]):
        raise BundleError(f"--speculative_model: {folder} was exported with --drafts 0")
    names = ("slots", "groups", "page", "max_length", "vocab_size")
    if wrong := [name for name in names if sizes[0][name] != sizes[1][name]]:
        ours, theirs = (", ".join(f"{name} {of[name]}" for name in wrong) for of in sizes)
        raise BundleError(
            f"--speculative_model: {draft} has {theirs}, and {folder} {ours}; export a model of "
            "the same vocabulary with the same sizes"
        )
    if not same_ids(*(_tokenizer(manifest, one / TOKENIZER) for one, manifest in both)):
        raise BundleError(f"--speculative_model: {draft} has another tokenizer than {folder}")


def load_model(
    bundle: Bundle,
    folder: str | Path,
    name: str | None = None,
    draft: Bundle | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> Loaded:
    """What the server serves, warm and compared with the bundle's goldens.

    Args:
      folder: where it came from: the tokenizer is read there.
      name: in requests; the bundle's own if left out.
      draft: of a model that guesses next tokens, which `check_draft` has found to fit.
      adapters: name -> folder of those that are served from the start.

    Raises:
      BundleError: an adapter that cannot be read, no usable tokenizer, a broken contract, or
        goldens that come out differently.
    """
    name = name or bundle.manifest.name
    room = bundle.manifest.contract.get("shape", {}).get("adapters", 0)
    if len(adapters) > room or {name, ""} & {*adapters, *adapters.values()}:
        raise BundleError(
            f"--adapter: give NAME=FOLDER, other names than {name}; there is room for {room}, as "
            "export_llama --adapters has it"
        )
    if not language.is_language_model(bundle.manifest):
        files = Path(folder) / TOKENIZER
        has_text = (files / "tokenizer.json").is_file() or bundle.manifest.contract.get(BYTES)
        tokenizer = _read_tokenizer(files) if has_text else None
        return Loaded(name, infer=BundleInfer(bundle), tokenizer=tokenizer)
    clock = Stopwatch()
    backends = [(one, _warm(one, clock)) for one in (bundle, draft) if one is not None]
    adapt = functools.partial(language.put_adapter, bundle)
    for place, from_folder in enumerate((None, *adapters.values()) if room else (), start=-1):
        clock("adapters", adapt, max(place, 0), from_folder)  # first none: that warms it up
    files = Path(folder) / TOKENIZER
    settings, generation = (
        json_object(files / name) for name in (SETTINGS, GENERATION_CONFIG_FILE)
    )
    # Those of a Llama are in its contract, too; another model's exporter may have left them out.
    found = generation.get("eos_token_id")
    ends = {i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)}
    tokenizer = clock("tokenizer", _tokenizer, bundle.manifest, files)
    parts = {**bundle.seconds, **clock.seconds}, seconds_of_xla()
    lists = (", ".join(f"{part} {took:.1f}" for part, took in one.items()) for one in parts)
    _LOG.info("seconds: %s; on other threads: %s", *lists)
    return Loaded(
        name,
        background=_adding(backends),
        backend=backends[0][1] if draft is None else DraftedBackend(*(b for _, b in backends)),
        tokenizer=tokenizer,
        stop_ids=frozenset(bundle.manifest.contract.get("eos_token_ids", ())) | ends,
        chat_template=template_source(files, settings),
        generation_config=generation,
        adapt=adapt if room else None,
        adapters=tuple(adapters),
        special_tokens=special_tokens(settings),
    )


def _warm(bundle: Bundle, clock: Stopwatch) -> ModelBackend:
    """What runs a bundle, after it has run its functions once and gone on with its goldens."""
    backend = language.model_backend(bundle)
    clock("warm-up", backend.warm_up)
    dtype = bundle.manifest.contract["model"].get("dtype")
    near = NEAR.get(str(dtype), NEAR_ELSE)
    clock("goldens", check_goldens, backend, bundle.manifest.goldens, near)
    return backend


def _adding(backends: Sequence[tuple[Bundle, ModelBackend]]) -> threading.Thread:
    """Gives backends the functions that are still being compiled, as they come."""

    def add() -> None:
        started, count = time.monotonic(), 0
        for bundle, backend in backends:
            try:
                backend.warm_up("score")
                for name in bundle.arrivals():
                    backend.add(name)
                    backend.seconds = language.step_seconds(bundle, backend.limits, backend.info)
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


def _tokenizer(manifest: Manifest, files: Path) -> Tokenizer:
    vocabulary = manifest.contract["model"]["vocab_size"]
    if not (files / "tokenizer.json").is_file() and vocabulary < BYTE_VOCABULARY:
        raise BundleError(
            f"{manifest.name} has no tokenizer.json, and its vocabulary of {vocabulary} "
            "is too small for bytes; export it with --tokenizer"
        )
    return _read_tokenizer(files)


def _read_tokenizer(files: Path) -> Tokenizer:
    if not (files / "tokenizer.json").is_file():
        return load_tokenizer(BYTES)
    try:
        return load_tokenizer(str(files))
    except DataError as error:
        raise BundleError(str(error)) from error
