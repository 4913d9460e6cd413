"""Loads a Llama from a Hugging Face checkpoint, shard by shard.

Each process reads the slices that its own devices hold, one at a time. Saving is in `save.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.parameters import Params
from spmd.models.llama.weights.config import CONFIG_FILE
from spmd.models.llama.weights.files import (
    FLOAT_NAMES,
    Array,
    Index,
    WeightsError,
)
from spmd.models.llama.weights.names import EMBEDDING, HEAD, Parameter, order, parameters
from spmd.models.llama.weights.packed import KEY, Weights, open_weights
from spmd.models.llama.weights.save import check_can_save, save
from spmd.models.progress import bytes_bar
from spmd.models.shards import local_bytes, put_shards
from spmd.models.training.errors import shortened
from spmd.models.training.paths import AnyPath

__all__ = ["WeightsError", "check_can_load", "check_can_save", "load", "save"]


def load(
    folder: str | AnyPath,
    config: LlamaConfig,
    shardings: Any = None,
    *,
    console: Console | None = None,
) -> Params:
    """Loads the parameters of a Hugging Face checkpoint; each shard is read directly from the file.

    Each process reads what its own devices hold, once, and converts it to `config.param_dtype`.
    Besides the devices' arrays, one shard is in memory; of quantized weights one matrix.

    Args:
        folder: has `model.safetensors`, or several files and their index.
        config: the model, as from `read_config`; `scan_layers` and the dtypes may be changed.
        shardings: a tree like that of `fresh.init` of `jax.sharding.Sharding`s, such as
            `compiled.in_shardings[0]` of a training step; None puts all on the first device.

    Returns:
        Parameters as from `fresh.init`.

    Raises:
        WeightsError: files are missing, truncated or not safetensors; or tensors are missing,
            superfluous, or have other shapes than the model's.

    Example:
        >>> config = read_config("/models/Llama-3.2-1B")
        >>> params = load("/models/Llama-3.2-1B", config, compiled.in_shardings[0])
    """
    wanted, treedef = parameters(config)
    default = SingleDeviceSharding(jax.devices()[0])
    placed = [default] * len(wanted) if shardings is None else treedef.flatten_up_to(shardings)
    dtype = jnp.dtype(config.param_dtype)
    total = sum(local_bytes(p.shape, dtype, s) for p, s in zip(wanted, placed, strict=True))
    with open_weights(folder) as stored, bytes_bar("loading weights", total, console) as advance:
        _check_fit(stored, wanted, config)
        leaves = [
            put_shards(p.shape, dtype, s, partial(_read_block, stored, p, config), advance)
            for p, s in zip(wanted, placed, strict=True)
        ]
    params: Params = jax.tree_util.tree_unflatten(treedef, leaves)
    return params


def check_can_load(folder: str | AnyPath, config: LlamaConfig) -> None:
    """Checks that `load` would find what it needs, from the files' headers alone.

    Raises:
        WeightsError: it would not.
    """
    wanted, _ = parameters(config)
    with open_weights(folder) as stored:
        _check_fit(stored, wanted, config)


def _read_block(stored: Weights, parameter: Parameter, config: LlamaConfig, index: Index) -> Array:
    """Reads one shard of a parameter, in `param_dtype`."""
    dtype, name = jnp.dtype(config.param_dtype), parameter.names[0]
    tensor = parameter.read(index, dtype, stored.read)
    is_tied = name == EMBEDDING and config.tie_word_embeddings and HEAD in stored.tensors
    if is_tied and not np.array_equal(stored.read(HEAD, index), tensor):
        raise WeightsError(
            f"{stored.path}: {HEAD} and {EMBEDDING} differ, and the config ties them; set "
            "tie_word_embeddings to false"
        )
    return tensor.astype(dtype, copy=False)


def _check_fit(stored: Weights, wanted: Sequence[Parameter], config: LlamaConfig) -> None:
    """Raises `WeightsError` with all differences between the folder and the model."""
    shapes = {name: p.tensor_shape for p in wanted for name in p.names}
    found = stored.tensors
    # Behind the last layer DeepSeek's files have one that predicts a further token.
    ignored = {HEAD} if config.tie_word_embeddings else set()
    missing = [name for name in shapes if name not in found]
    unexpected = [
        name
        for name in found
        if name not in shapes
        and name not in ignored
        and not name.endswith("rotary_emb.inv_freq")
        and not stored.is_idle_bias(name)
        and not (config.kv_lora_rank and order(name) >= (1, config.num_hidden_layers))
    ]
    both = [name for name in shapes if name in found]
    misshaped = [
        f"{name} is {found[name].shape} and should be {shapes[name]}"
        for name in both
        if found[name].shape != shapes[name]
    ]
    quantized = [
        f"{name} is {found[name].dtype}" for name in both if found[name].dtype not in FLOAT_NAMES
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshaped,
        "not floating point": quantized,
    }
    if not any(kinds.values()):
        return
    listed = "; ".join(
        f"{len(names)} {kind}: {shortened(names)}" for kind, names in kinds.items() if names
    )
    fix = f"Use the {CONFIG_FILE} that belongs to these weights"
    if quantized:
        fix = f"Quantized matrices are read as {CONFIG_FILE} says in {KEY}, and nothing else is"
    elif [name for names in kinds.values() for name in names] == [HEAD]:
        fix = "If the output is the embedding table, set tie_word_embeddings to true"
    raise WeightsError(f"{stored.path} does not fit the model: {listed}. {fix}")
