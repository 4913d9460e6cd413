"""The flags of scripts/train_llama.py on models and weights in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console

from models.llama.config import DTYPES, ConfigError, LlamaConfig, named_config
from models.llama.weights import load as weights
from models.llama.weights.config import read_config

_CONFIG = flags.DEFINE_string(
    "config", None, "A config.json in Hugging Face's format, instead of --model."
)
_IGNORE_CONFIG_KEYS = flags.DEFINE_list(
    "ignore_config_keys", [], "Keys of the config.json that are unknown and change nothing."
)
_INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "Folder of safetensors in Hugging Face's format to start from; its config.json says which "
    "Llama, unless --config or --model does.",
)
_EXPORT_HF = flags.DEFINE_string(
    "export_hf", None, "New folder that transformers can load, written at the end."
)
_EXPORT_DTYPE = flags.DEFINE_enum(
    "export_dtype", None, DTYPES, "What --export_hf stores weights in. Default: as in training."
)


def chosen_config(model: flags.Flag[str]) -> LlamaConfig:
    """The model that --config, --model or --init_from names; all folders are checked here, early.

    Args:
        model: the flag --model.

    Raises:
        ConfigError: both --config and --model, or a file that describes no Llama.
        WeightsError: --init_from does not fit the model, or --export_hf cannot be made.
    """
    if _EXPORT_HF.value:
        weights.check_can_save(_EXPORT_HF.value)
    if _CONFIG.value and model.present:
        raise ConfigError("--config and --model both name a model; give one of them")
    file = _config_file(model)
    config = (
        read_config(file, _IGNORE_CONFIG_KEYS.value) if file else named_config(str(model.value))
    )
    if _INIT_FROM.value:
        weights.check_can_load(_INIT_FROM.value, config)
    return config


def model_name(model: flags.Flag[str]) -> str:
    """What to call the model in print."""
    file = _config_file(model)
    return Path(file).name if file else str(model.value)


def _config_file(model: flags.Flag[str]) -> str | None:
    """The file, or the folder of the file, that describes the model; None if --model names it."""
    if model.present:
        return None
    return _CONFIG.value or _INIT_FROM.value or None


def load_params(config: LlamaConfig, shardings: Any, console: Console) -> Any:
    """The parameters in --init_from, or None without the flag.

    Args:
        config: the model that is trained.
        shardings: where its parameters go, a tree like them.
        console: for the progress bar.
    """
    if not _INIT_FROM.value:
        return None
    params = weights.load(_INIT_FROM.value, config, shardings, console=console)
    console.print(f"weights: {Path(_INIT_FROM.value).absolute()}")
    return params


def export_params(params: Any, config: LlamaConfig, console: Console) -> None:
    """Write --export_hf, with the tokenizer of --init_from, if asked for."""
    if not _EXPORT_HF.value:
        return
    weights.save(
        params,
        config,
        _EXPORT_HF.value,
        dtype=_EXPORT_DTYPE.value,
        tokenizer_from=_INIT_FROM.value,
        console=console,
    )
    console.print(f"exported: {Path(_EXPORT_HF.value).absolute()}")
