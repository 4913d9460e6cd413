"""A checkpoint cut for tensor parallelism: one file of safetensors for each rank.

    sharding.json          how each tensor is split
    config.json            of the whole model
    rank-0000.safetensors  the shards of rank 0, under Hugging Face's names
    ...

The projections of queries, keys, values, gate and up, and the vocabulary, are split by their
outputs. The output projections of attention and MLP are split by their inputs. Norms are not split,
nor the bias of an output projection, which belongs behind the sum. So each rank computes its own
heads and its own part of the MLP, and the sum over ranks is what the whole model computes (Shoeybi
et al. 2019, section 3). With more ranks than key heads, several ranks have the same key head.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import (
    FLOAT_NAMES,
    NUMPY_NAMES,
    Array,
    Index,
    WeightsError,
    read_slice,
)
from spmd.models.llama.weights.names import EMBEDDING, HEAD
from spmd.models.llama.weights.tensors import Source, Tensor, stamps, tensor_shapes, unrolled

SHARDING_FILE = "sharding.json"
FORMAT = "spmd-ranks"
SCHEMA = 1
AXIS = "model"

_BY_OUTPUTS = ("q_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_BY_INPUTS = ("o_proj", "down_proj", "w2")


@dataclasses.dataclass(frozen=True)
class RankCut:
    """How a tensor is split over ranks."""

    dim: int | None  # the dim that is split; None if every rank has the whole tensor
    pieces: int = 1  # number of equal pieces
    copies: int = 1  # so many neighbouring ranks have the same piece; pieces x copies is all ranks

    def index(self, shape: tuple[int, ...], rank: int) -> Index:
        """The slice of a tensor that a rank has."""
        whole = [slice(0, size) for size in shape]
        if self.dim is not None:
            size = shape[self.dim] // self.pieces
            piece = rank // self.copies
            whole[self.dim] = slice(piece * size, (piece + 1) * size)
        return tuple(whole)


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:04}.safetensors"


def cuts(config: LlamaConfig, ranks: int) -> dict[str, RankCut]:
    """How each tensor of a model is split over ranks, by name.

    A vocabulary that the number of ranks does not divide is not split.

    Raises:
      WeightsError: the ranks do not divide the heads or the MLP's width; names what does.
    """
    heads, keys, width = config.num_attention_heads, config.kv_heads, config.expert_width
    if config.first_k_dense_replace:
        width = math.gcd(width, config.intermediate_size)
    possible = [
        n for n in range(1, heads + 1) if not (heads % n or width % n or (keys % n and n % keys))
    ]
    if ranks not in possible:
        raise WeightsError(
            f"{heads} query heads, {keys} key heads and an MLP of {width} do not divide into "
            f"{ranks} ranks; {', '.join(map(str, possible))} ranks are possible"
        )
    return {name: _cut(name, shape, config, ranks) for name, shape in tensor_shapes(config).items()}


def _cut(name: str, shape: tuple[int, ...], config: LlamaConfig, ranks: int) -> RankCut:
    part = name.split(".")[-2]
    if part in _BY_INPUTS and len(shape) == 1:  # a bias of sums over ranks: added once, by any
        return RankCut(None, 1, ranks)
    if part in ("k_proj", "v_proj"):
        pieces = min(ranks, config.kv_heads)
        return RankCut(0, pieces, ranks // pieces)
    if part in _BY_OUTPUTS:
        return RankCut(0, ranks)
    if part in _BY_INPUTS:
        return RankCut(1, ranks)
    if name in (EMBEDDING, HEAD) and shape[0] % ranks == 0:
        return RankCut(0, ranks)
    return RankCut(None, 1, ranks)


# Writing


def describe(source: Source, ranks: int) -> dict[str, Any]:
    """The content of `sharding.json`."""
    split = cuts(source.config, ranks)
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "mesh": {AXIS: ranks},
        "files": [rank_file(rank) for rank in range(ranks)],
        "key_head_copies": max(1, ranks // source.config.kv_heads),
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "spec": [
                    AXIS if dim == split[name].dim else None for dim in range(len(tensor.shape))
                ],
                "pieces": split[name].pieces,
                "copies": split[name].copies,
            }
            for name, tensor in source.tensors.items()
        },
    }


def shard(tensor: Tensor, cut: RankCut, rank: int) -> Tensor:
    """The part of a tensor that a rank has, as a tensor."""
    index = cut.index(tensor.shape, rank)
    shape = tuple(part.stop - part.start for part in index)

    def read(inner: Index) -> Array:
        return tensor.read(
            tuple(
                slice(outer.start + part.start, outer.start + part.stop)
                for outer, part in zip(index, inner, strict=True)
            )
        )

    return dataclasses.replace(tensor, shape=shape, read=read)


# Reading


@contextlib.contextmanager
def ranks_source(folder: str | Path) -> Iterator[Source]:
    """The whole tensors of a folder of ranks; a slice is read from the files that have it.

    If several ranks have the same piece, the copies are compared.

    Raises:
      WeightsError: files are missing, broken, or disagree with each other.
    """
    folder = Path(folder)
    config = unrolled(read_config(folder))
    ranks, dtypes = _read_sharding(folder, config)
    split = cuts(config, ranks)
    with contextlib.ExitStack() as stack:
        files = [_open(folder / rank_file(rank), stack) for rank in range(ranks)]
        tensors = {}
        for name, shape in tensor_shapes(config).items():
            _check_shards(folder, files, name, shape, split[name], dtypes[name])
            read = functools.partial(_read, folder, files, name, shape, split[name])
            tensors[name] = Tensor(name, shape, dtypes[name], read)
        yield Source(config, tensors, f"{folder}, {ranks} ranks", folder, stamps(folder))


def _read_sharding(folder: Path, config: LlamaConfig) -> tuple[int, Mapping[str, str]]:
    """(number of ranks, name -> dtype of every tensor)."""
    file = folder / SHARDING_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        known = content["format"] == FORMAT and content["schema"] == SCHEMA
        ranks, tensors = content["mesh"][AXIS], content["tensors"]
        dtypes = {name: tensors[name]["dtype"] for name in tensor_shapes(config)}
        if not known or type(ranks) is not int or not set(dtypes.values()) <= set(_STORED):
            raise ValueError(f"format {content['format']!r:.40}, schema {content['schema']!r:.40}")
    except KeyError as error:
        raise WeightsError(f"{file} lacks {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} cannot be used: {error}") from error
    return ranks, dtypes


_STORED = {NUMPY_NAMES[stored]: stored for stored in FLOAT_NAMES}


def _open(file: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="np"))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is missing, truncated or no safetensors: {error}") from error


def _check_shards(
    folder: Path, files: list[Any], name: str, shape: tuple[int, ...], cut: RankCut, dtype: str
) -> None:
    for rank, file in enumerate(files):
        wanted = [part.stop - part.start for part in cut.index(shape, rank)]
        try:
            entry = file.get_slice(name)
        except SafetensorError:
            raise WeightsError(f"{folder / rank_file(rank)} has no {name}") from None
        found = (entry.get_shape(), entry.get_dtype())
        if found != (wanted, _STORED[dtype]):
            raise WeightsError(
                f"{folder / rank_file(rank)}: {name} is {found[1]} {found[0]} and should be "
                f"{_STORED[dtype]} {wanted}"
            )


def _read(
    folder: Path, files: list[Any], name: str, shape: tuple[int, ...], cut: RankCut, index: Index
) -> Array:
    if cut.dim is None:
        return _read_copies(folder, files, range(len(files)), name, index)
    dim, size = cut.dim, shape[cut.dim] // cut.pieces
    start, stop = index[dim].start, index[dim].stop
    parts = []
    for piece in range(start // size, -(-stop // size)):
        low, high = max(start, piece * size), min(stop, (piece + 1) * size)
        local = (*index[:dim], slice(low - piece * size, high - piece * size), *index[dim + 1 :])
        holders = range(piece * cut.copies, (piece + 1) * cut.copies)
        parts.append(_read_copies(folder, files, holders, name, local))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)


def _read_copies(folder: Path, files: list[Any], holders: range, name: str, index: Index) -> Array:
    """Reads a slice that several ranks have; they have to be equal, bit for bit."""
    first = read_slice(files[holders[0]], name, index)
    for rank in holders[1:]:
        if first.tobytes() != read_slice(files[rank], name, index).tobytes():
            raise WeightsError(
                f"{folder}: ranks {holders[0]} and {rank} should hold the same {name}, and differ"
            )
    return first
