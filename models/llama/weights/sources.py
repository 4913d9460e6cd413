"""Where a Llama's tensors come from: files, a checkpoint of training, or chance."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from spmd.models.llama import fresh
from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.weights.bundled import small_files
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import NUMPY_NAMES, Array, Index, WeightsError
from spmd.models.llama.weights.load import check_can_load
from spmd.models.llama.weights.names import HEAD, Parameter, parameters
from spmd.models.llama.weights.packed import latest, open_weights
from spmd.models.llama.weights.save import local_tokenizer
from spmd.models.llama.weights.tensors import Source, Tensor, stamps, tensor_shapes, unrolled
from spmd.models.training.checkpoints.found import AUTO, find_saved
from spmd.models.training.checkpoints.pieces import chunk_shape
from spmd.models.training.paths import AnyPath, array_driver, array_spec, as_path
from spmd.models.training.run.description import RunFolder

# Hugging Face's files


@contextlib.contextmanager
def hf_source(folder: str | AnyPath) -> Iterator[Source]:
    """The tensors of a folder of safetensors with a `config.json`; open as long as the context.

    Raises:
      WeightsError: a file is broken.
      ConfigError: the model is not a Llama.
    """
    folder = as_path(folder)
    config = unrolled(read_config(folder))
    check_can_load(folder, config)
    with open_weights(folder) as stored, local_tokenizer(small_files(folder)) as tokenizer:
        parts = {
            name: Tensor.several(name, matrix.types, functools.partial(latest, matrix.make), "")
            for name, matrix in stored.matrices.items()
        }
        tensors = {
            name: Tensor(
                name, shape, NUMPY_NAMES[stored.tensors[name].dtype],
                functools.partial(stored.read, name), parts=parts.get(name, {}),
            )
            for name, shape in tensor_shapes(config).items()
        }  # fmt: skip
        if HEAD in stored.tensors and HEAD not in tensors:
            table = next(iter(tensors.values()))
            for start in range(0, table.shape[0], 4096):
                index = (slice(start, min(start + 4096, table.shape[0])), slice(0, table.shape[1]))
                if not np.array_equal(stored.read(HEAD, index), table.read(index)):
                    raise WeightsError(
                        f"{HEAD} and {table.name} differ, and the config ties them; set "
                        "tie_word_embeddings to false"
                    )
        yield Source(config, tensors, str(folder), tokenizer, stamps(folder))


# Checkpoints of training


@contextlib.contextmanager
def checkpoint_source(run_dir: str | AnyPath, step: int | str = AUTO) -> Iterator[Source]:
    """The parameters of a checkpoint of a training run.

    Layers that are stored together are read together, all layers of a parameter at once.

    Args:
      step: the checkpoint's, or `auto` for the latest that is whole.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      WeightsError: it is not of a Llama.
    """
    run = as_path(run_dir)
    folder = RunFolder.at(run).checkpoints
    if not folder.is_dir():
        raise WeightsError(f"{run_dir} is no folder of a run: it has no {folder.name}")
    found = find_saved(folder, step)
    try:
        config = LlamaConfig(**found.meta["config"]["model"])
    except (KeyError, TypeError, ConfigError) as error:
        raise WeightsError(f"the checkpoints in {folder} are of no Llama: {error}") from error
    state = folder / str(found.step) / "state"
    saved = found.meta["arrays"]
    tensors: dict[str, Tensor] = {}
    for parameter in parameters(config)[0]:
        entry = saved.get(f"params/{parameter.path}")
        if found.meta["config"].get("lora"):
            raise WeightsError(
                f"the checkpoints in {folder} hold adapters alone; go on from them with "
                "scripts/train_llama.py --resume --export_hf, which writes the whole model"
            )
        if entry is None or tuple(entry["shape"]) != parameter.shape:
            raise WeightsError(
                f"the checkpoint of step {found.step} has no params/{parameter.path} of shape "
                f"{list(parameter.shape)}, which its model has"
            )
        tensors |= _checkpoint_tensors(state, parameter, entry["dtype"])
    # Layers that are stored together stay in the order in which they are read.
    is_free = not any(tensor.together for tensor in tensors.values())
    ordered = {n: tensors[n] for n in tensor_shapes(config)} if is_free else tensors
    about = f"{run_dir}, step {found.step}"
    tokenizer = run / RunFolder.TOKENIZER
    with local_tokenizer(tokenizer) as files:
        yield Source(
            unrolled(config),
            ordered,
            about,
            files if tokenizer.is_dir() else None,
            stamps(folder / str(found.step)),
        )


def _checkpoint_tensors(state: AnyPath, parameter: Parameter, dtype: str) -> dict[str, Tensor]:
    key = "params." + parameter.path.replace("/", ".")
    together = parameter.stacked and chunk_shape(_open_array(state, key))[0] > 1

    def read(place: tuple[int, ...], index: Index) -> Array:
        if together:
            stack: Array = _read_stack(state, key)[place]
            return stack[index]
        part: Array = _open_array(state, key)[(*place, *index)].read().result()
        return part

    return {
        name: Tensor(
            name, parameter.tensor_shape, dtype, functools.partial(read, place),
            key if together else "",
        )
        for name, place in parameter.places.items()
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def _read_stack(state: AnyPath, key: str) -> Array:
    """Reads a parameter of all layers, once for all of them; only the latest one is kept."""
    stack: Array = _open_array(state, key).read().result()
    return stack


def _open_array(state: AnyPath, key: str) -> Any:
    """Opens an array in orbax's layout with tensorstore, which orbax writes with."""
    import tensorstore

    spec = array_spec(state, key, array_driver(state))
    try:
        return tensorstore.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise WeightsError(f"{state}: {key} cannot be read: {str(error)[:200]}") from error


# Chance


@contextlib.contextmanager
def fresh_source(config: LlamaConfig, seed: int) -> Iterator[Source]:
    """The parameters that `fresh.init` draws, one layer at a time."""
    config = unrolled(config)
    outer_key, keys_L = fresh.init_keys(jax.random.key(seed), config)
    make_outer = jax.jit(functools.partial(fresh.init_outer, config=config))
    make_layer = jax.jit(fresh.init_layer, static_argnums=(1, 2))

    @functools.lru_cache(maxsize=1)
    def part(stack: str | None, layer: int = 0) -> Mapping[str, Array]:
        if stack is None:
            made = make_outer(outer_key)
        else:
            made = make_layer(keys_L[config.stacks[stack][layer]], config, stack)
        flat, _ = jax.tree_util.tree_flatten_with_path(made)
        return {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x) for p, x in flat}

    def read(path: str, place: tuple[int, ...], index: Index) -> Array:
        stack = config.stack_of(path)
        if stack is None:
            return part(None)[path.replace("/", ".")][index]
        layer, rest = path.removeprefix(stack).replace("/", ".").split(".", 1)
        whole: Any = part(stack, int(layer))[rest]
        return np.asarray(whole[(*place, *index)])

    tensors = {
        name: Tensor(name, p.tensor_shape, config.param_dtype, functools.partial(read, p.path, at))
        for p in parameters(config)[0]
        for name, at in p.places.items()
    }
    yield Source(config, tensors, f"fresh parameters, seed {seed}")
