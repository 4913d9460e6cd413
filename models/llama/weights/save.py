"""Saves a Llama as a Hugging Face checkpoint; gathers and writes tensor by tensor."""

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from spmd.models.llama.config import DTYPES, LlamaConfig
from spmd.models.llama.parameters import Params, without_states
from spmd.models.llama.weights import stacked
from spmd.models.llama.weights.config import CONFIG_FILE, to_hf
from spmd.models.llama.weights.files import (
    Array,
    TensorEntry,
    WeightsError,
    plan_files,
    write_files,
    write_json,
)
from spmd.models.llama.weights.names import order, parameters
from spmd.models.progress import Advance, bytes_bar
from spmd.models.training.paths import (
    AnyPath,
    StorePath,
    as_path,
    file_sizes,
    json_object,
    remove_tree,
)

MAX_SHARD_BYTES = 5 * 10**9
GENERATION_CONFIG_FILE = "generation_config.json"
UNFINISHED = ".unfinished"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def check_can_save(folder: str | AnyPath) -> None:
    """Checks early, before a long run, that `save` can make `folder`.

    Raises:
        WeightsError: it cannot.
    """
    folder = as_path(folder).absolute()
    if isinstance(folder, StorePath):
        names = file_sizes(folder)
        if names and UNFINISHED not in names:
            raise WeightsError(f"{folder} exists already; name a new or an empty folder")
        try:
            (folder / UNFINISHED).write_text("")
            if not names:
                (folder / UNFINISHED).unlink()
        except OSError as error:
            raise WeightsError(f"{folder} cannot be made: {error}") from error
        return
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already; name a new or an empty folder")
    above = next(parent for parent in folder.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise WeightsError(f"{folder} cannot be made: {above} is no writable folder")


def save(
    params: Params,
    config: LlamaConfig,
    folder: str | AnyPath,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | AnyPath | None = None,
    console: Console | None = None,
) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Every process has to call it; process 0 writes. The folder is written under another name, which
    is left behind if the process is killed, and gets its own name when it is complete. On an object
    store it has a file `.unfinished` as long as it is not complete.

    Args:
        params: as from `fresh.init`, with any shardings.
        folder: new or empty.
        dtype: of the stored weights; None takes `config.param_dtype`.
        max_shard_bytes: the most bytes of tensors in one file; a larger tensor gets its own file.
        tokenizer_from: a folder whose tokenizer files are copied.

    Raises:
        WeightsError: the folder is not empty or cannot be written, the dtype is unknown, or the
            parameters are not those of the config. It is raised on all processes.
        ConfigError: transformers does not support the model.
    """
    dtype = dtype or config.param_dtype
    if dtype not in DTYPES:
        raise WeightsError(f"dtype is {dtype!r}, not one of {DTYPES}")
    description = to_hf(config, dtype)
    sources = _sources(params, config)
    entries = [TensorEntry(name, shape, dtype) for name, shape, _ in sources]
    plan = plan_files(entries, max_shard_bytes)
    with bytes_bar("saving weights", sum(entry.nbytes for entry in entries), console) as advance:
        arrays = _gathered(sources, dtype, advance)

        def write(unfinished: AnyPath) -> None:
            write_files(unfinished, plan, arrays)
            write_beside(unfinished, description, tokenizer_from)

        publish(folder, write, arrays)


def publish(
    folder: str | AnyPath, write: Callable[[AnyPath], None], arrays: Iterable[Any] = ()
) -> None:
    """Process 0 writes a new folder, which gets its name when it is complete.

    Args:
        write: writes into the folder.
        arrays: what it takes arrays from, which every process gathers together.

    Raises:
        WeightsError: it failed; raised on all processes.
    """
    failure: str | None = None
    if jax.process_index() == 0:
        try:
            target = as_path(folder)
            arriving: contextlib.AbstractContextManager[AnyPath] = (
                appearing(target) if isinstance(target, Path) else _appearing_on_store(target)
            )
            with arriving as unfinished:
                write(unfinished)
        except (OSError, WeightsError) as error:
            failure = str(error)
    for _ in arrays:  # gathering takes every process, also when writing has failed
        pass
    # Waits for process 0; if it failed, all processes raise.
    if bool(multihost_utils.broadcast_one_to_all(np.int32(failure is not None))):
        reason = failure or "process 0 says why"
        raise WeightsError(f"the weights could not be written to {folder}: {reason}")


Source = tuple[str, tuple[int, ...], Callable[[str], Array]]
"""A tensor's name and shape, and a function that gathers it in a dtype."""


def _sources(params: Params, config: LlamaConfig) -> list[Source]:
    """The tensors in the order of the file: the embedding, layer by layer, the norm, the head."""
    wanted, treedef = parameters(config)
    leaves, found = jax.tree_util.tree_flatten(without_states(params))
    shapes = [leaf.shape for leaf in leaves]
    if found != treedef or shapes != [parameter.shape for parameter in wanted]:
        raise WeightsError(
            "the parameters are not those of the config (scan_layers, tie_word_embeddings and all "
            "sizes have to be the same)"
        )
    sources = [
        (name, parameter.tensor_shape, functools.partial(gathered, leaf, place))
        for parameter, leaf in zip(wanted, leaves, strict=True)
        for name, place in parameter.places.items()
    ]
    sources.sort(key=lambda source: order(source[0]))
    given: stacked.Tensors = {name: (shape, gather) for name, shape, gather in sources}
    if config.model_type in stacked.FAMILIES:
        given = stacked.joined(given)
    return [(name, shape, gather) for name, (shape, gather) in given.items()]


def _gathered(sources: Sequence[Source], dtype: str, advance: Advance) -> Iterator[Array]:
    for _, _, gather in sources:
        array = gather(dtype)
        advance(array.nbytes)
        yield array


def gathered(leaf: jax.Array, place: tuple[int, ...], dtype: str) -> Array:
    """A parameter, or one layer or expert of it, whole on every host."""
    tensor: jax.Array = _at(leaf, tuple(map(np.int32, place)), dtype)
    whole: Array = (
        np.asarray(tensor)
        if tensor.is_fully_addressable
        else multihost_utils.process_allgather(tensor, tiled=True)
    )
    return whole


@functools.partial(jax.jit, static_argnames="dtype")
def _at(leaf: jax.Array, place: tuple[Any, ...], dtype: str) -> jax.Array:
    for row in place:
        leaf = jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)
    return leaf.astype(dtype)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets the name of `folder` at the end of the block.

    Raises:
        WeightsError: `folder` is there already, or cannot be made.
    """
    check_can_save(folder)
    folder = folder.absolute()
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextlib.contextmanager
def _appearing_on_store(folder: StorePath) -> Iterator[AnyPath]:
    check_can_save(folder)
    remove_tree(folder)  # what was left unfinished
    (folder / UNFINISHED).write_text("")
    try:
        yield folder
        (folder / UNFINISHED).unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(folder)
        raise


def write_beside(
    folder: AnyPath, description: Mapping[str, Any], tokenizer_from: str | AnyPath | None
) -> None:
    """Writes the files of a checkpoint other than weights.

    Args:
        description: what goes into `config.json`.
        tokenizer_from: a folder with a tokenizer, and what its model knows of tokens: the padding,
            and how they are drawn.
    """
    tokens = {key: description[key] for key in ("bos_token_id", "eos_token_id")}
    if any(token is not None for token in tokens.values()):
        write_json(folder / GENERATION_CONFIG_FILE, {"_from_model_config": True, **tokens})
    if tokenizer_from is not None:
        copy_small_files(as_path(tokenizer_from), folder)
        known = json_object(folder / CONFIG_FILE)
        if "pad_token_id" in known:
            description = {**description, "pad_token_id": known["pad_token_id"]}
    write_json(folder / CONFIG_FILE, description)


def copy_small_files(source: AnyPath, folder: AnyPath) -> None:
    """Copies what is not about weights in a model's folder."""
    for name in (*TOKENIZER_FILES, CONFIG_FILE, GENERATION_CONFIG_FILE):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


@contextlib.contextmanager
def local_tokenizer(folder: AnyPath) -> Iterator[Path]:
    """A local folder with the small files of a model's folder: what is not about weights."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        copy_small_files(folder, Path(made))
        yield Path(made)
