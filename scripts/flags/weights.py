"""The flags of scripts/train_llama.py on models and weights in Hugging Face's format."""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from spmd.cli.flags import Add, words
from spmd.models.llama.config import DTYPES, ConfigError, LlamaConfig
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.bundled import small_files
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.load import WeightsError
from spmd.models.llama.weights.save import local_tokenizer
from spmd.models.training.data.beginnings import as_trained
from spmd.models.training.data.tokenizer import (
    BYTE_VOCABULARY,
    BYTES,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    same_ids,
)
from spmd.models.training.paths import as_path
from spmd.models.training.run.description import FREE_TO_CHANGE, RunConfig

DEFAULT_MODEL = "quickstart"

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def add_model_flags(add: Add) -> None:
    """Adds what says which Llama it is."""
    known = sorted(CONFIGS)
    add(
        "--model",
        choices=known,
        metavar="NAME",
        help=f"which Llama: {', '.join(known)} (default: {DEFAULT_MODEL})",
    )
    add("--config", help="a config.json in Hugging Face's format, instead of --model")
    add(
        "--ignore_config_keys",
        type=words,
        default=(),
        help="keys of the config.json that are unknown and change nothing",
    )


def add_weight_flags(add: Add) -> None:
    """Adds where weights come from and go to."""
    add(
        "--init_from",
        help="folder or URL of safetensors in Hugging Face's format to start from; its config.json "
        "says which Llama, unless --config or --model does",
    )
    add("--export_hf", help="new folder or URL that transformers can load, written at the end")
    add("--export_lora", help="the same for the adapters of --lora, a folder that peft can load")
    add(
        "--export_dtype",
        choices=DTYPES,
        help="what --export_hf stores weights in (default: as in training)",
    )


def chosen_config(given: argparse.Namespace) -> LlamaConfig:
    """The model that --config, --model or --init_from names; all folders are checked here, early.

    Raises:
        ConfigError: both --config and --model, or a file that describes no Llama.
        WeightsError: --init_from does not fit the model, or --export_hf cannot be made.
    """
    if given.export_lora and not given.lora:
        raise WeightsError("--export_lora writes adapters, and there are none without --lora")
    for folder in filter(None, (given.export_hf, given.export_lora)):
        weights.check_can_save(folder)
    if given.config and given.model:
        raise ConfigError("--config and --model both name a model; give one of them")
    file = _config_file(given)
    if file:
        config = read_config(file, given.ignore_config_keys)
    else:
        config = named_config(given.model or DEFAULT_MODEL)
    if given.init_from:
        weights.check_can_load(given.init_from, config)
    return config


def teacher_config(run: RunConfig) -> LlamaConfig | None:
    """The model of --teacher, which runs as the one that is trained; None without the flag.

    Raises:
        WeightsError: its weights do not fit, or its tokens are others.
    """
    if not run.teacher:
        return None
    ways = (name.removeprefix("model.") for name in FREE_TO_CHANGE)
    changes = {name: getattr(run.model, name) for name in ways}
    config = dataclasses.replace(read_config(run.teacher), **changes, param_dtype=run.model.dtype)
    weights.check_can_load(run.teacher, config)
    file = small_files(as_path(run.teacher)) / TOKENIZER
    tokens = config.vocab_size, run.model.vocab_size
    if tokens[0] != tokens[1]:
        raise WeightsError(f"--teacher: it knows {tokens[0]} tokens, and the model {tokens[1]}")
    if file.is_file() and not same_ids(load_tokenizer(str(file)), load_tokenizer(run.tokenizer)):
        raise WeightsError(f"--teacher: {run.teacher} has another tokenizer than {run.tokenizer}")
    return config


def chosen_tokenizer(given: argparse.Namespace, model: LlamaConfig) -> str:
    """The tokenizer to train with: the one that is named, else that of --init_from, else bytes.

    Raises:
        WeightsError: --init_from has none, and its model was made for another than bytes.
    """
    if given.tokenizer is not None:
        return str(given.tokenizer)
    if (
        given.init_from
        and ((beside := small_files(as_path(given.init_from))) / TOKENIZER).is_file()
    ):
        return str(beside)
    if given.init_from and model.vocab_size > BYTE_VOCABULARY:
        raise WeightsError(
            f"--init_from: {given.init_from} has no {TOKENIZER}, and its model knows "
            f"{model.vocab_size} tokens: name the model's tokenizer with --tokenizer (`bytes` if "
            "it is to learn bytes)"
        )
    return BYTES


def model_name(given: argparse.Namespace) -> str:
    """What to call the model in print."""
    file = _config_file(given)
    return as_path(file).name if file else given.model or DEFAULT_MODEL


def _config_file(given: argparse.Namespace) -> str | None:
    """The file, or the folder of the file, that describes the model; None if --model names it."""
    return None if given.model else given.config or given.init_from


def load_params(
    given: argparse.Namespace, config: LlamaConfig, shardings: Any, console: Console
) -> Any:
    """The parameters in --init_from, or None without the flag.

    Args:
        shardings: where its parameters go, a tree like them.
    """
    if not given.init_from:
        return None
    params = weights.load(given.init_from, config, shardings, console=console)
    console.print(f"weights: {as_path(given.init_from).absolute()}")
    return params


def export_params(
    given: argparse.Namespace,
    params: Any,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    console: Console,
) -> None:
    """Write --export_hf if asked for, with the tokenizer that was trained with.

    Args:
        tokenizer: what made the tokens of training.
    """
    if not given.export_hf:
        return
    with tokenizer_files(tokenizer, given.init_from) as folder:
        weights.save(
            params,
            config,
            given.export_hf,
            dtype=given.export_dtype,
            tokenizer_from=folder,
            console=console,
        )
    console.print(f"exported: {as_path(given.export_hf).absolute()}")
    if folder is None:
        console.print("it has no tokenizer: the model was trained on bytes")


@contextlib.contextmanager
def tokenizer_files(tokenizer: Tokenizer, init_from: str | None) -> Iterator[Path | None]:
    """A folder with the files of a tokenizer, as transformers has them; None for bytes.

    Args:
        init_from: a model's folder. If the tokenizer is that model's, so are the files: they may
            hold more, such as a chat template.
    """
    if tokenizer.spec is None:
        yield None
        return
    own = [small_files(as_path(init_from))] if init_from else []
    for known in (*own, as_path(tokenizer.name).parent):
        beside = known / TOKENIZER
        is_whole = (known / TOKENIZER_CONFIG).is_file()
        if is_whole and beside.is_file() and same_ids(load_tokenizer(str(beside)), tokenizer):
            with local_tokenizer(beside.parent) as here, as_trained(here, tokenizer) as folder:
                yield folder
            return
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(tokenizer, Path(made))
        yield Path(made)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer, which begins texts as in training; nothing if ids are bytes."""
    if not isinstance(tokenizer, FileTokenizer):
        return
    ids = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    names = {kind: tokenizer.decode([one]) for kind, one in ids.items() if one is not None}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    folder.mkdir(parents=True, exist_ok=True)
    begins = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    content = tokenizer.spec if tokenizer.begins == begins else tokenizer.beginning_with(begins)
    (folder / TOKENIZER).write_text(content, encoding="utf-8")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
