"""Reads and writes folders of safetensors in Hugging Face's layout.

A folder has `model.safetensors`, or several files and `model.safetensors.index.json`, which lists
the tensors of each. Files are memory-mapped, so reading a slice reads only its own bytes; those on
an object store are read by ranges.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from spmd.models.training.errors import shortened
from spmd.models.training.paths import AnyPath, StorePath, as_path, at_once

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Array = npt.NDArray[Any]
Index = tuple[slice, ...]

DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
        **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
        **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    }
)
"""numpy's name of a dtype that can be written -> safetensors' name."""

NUMPY_NAMES = {stored: name for name, stored in DTYPE_NAMES.items()}

FLOAT_NAMES = ("F64", "F32", "BF16", "F16")
"""safetensors' names of the dtypes that weights may have."""


class WeightsError(ValueError):
    """Weights that cannot be read, do not fit the model, or cannot be written."""


# Reading


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored; `dtype` is safetensors' name."""

    file: AnyPath
    shape: tuple[int, ...]
    dtype: str


class HeldTensor(NamedTuple):
    """A tensor that is a part of others, or is made of them."""

    tensor: StoredTensor
    read: Callable[[Index], Array]  # a slice


@dataclasses.dataclass(frozen=True)
class Folder:
    """An open folder: its tensors, and its memory-mapped files."""

    path: AnyPath
    tensors: Mapping[str, StoredTensor]
    _files: Mapping[AnyPath, Any]
    _maps: dict[AnyPath, Mapping[str, Array]] = dataclasses.field(default_factory=dict)
    _added: str = ""  # before the files' names

    def read(self, name: str, index: Index) -> Array:
        """Reads a slice of a tensor, in the dtype of the file.

        Args:
            name: one of `tensors`.
            index: a slice for each dim, with start and stop.
        """
        try:
            file = self._files[self.tensors[name].file]
            return read_slice(file, name.removeprefix(self._added), index)
        except (SafetensorError, OSError) as error:
            file = self.tensors[name].file
            raise WeightsError(f"{file}: {name} cannot be read: {error}") from None

    def view(self, name: str, index: Index) -> Array:
        """What `read` returns, but of the mapped file: read-only, its bytes are read when used.

        `safe_open` copies what it reads, and lets no other thread run Python meanwhile.
        """
        file = self.tensors[name].file
        if not isinstance(file, Path):
            return self.read(name, index)
        if file not in self._maps:
            data = np.asarray(np.memmap(file, np.uint8, "r"))
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = json.loads(data[8:start].tobytes())
            header.pop("__metadata__", None)
            self._maps[file] = {
                name: data[slice(*(start + offset for offset in entry["data_offsets"]))]
                .view(NUMPY_NAMES[entry["dtype"]])
                .reshape(entry["shape"])
                for name, entry in header.items()
                if entry["dtype"] in NUMPY_NAMES
            }
        return read_slice(self._maps[file], name.removeprefix(self._added), index)


def read_slice(file: Any, name: str, index: Index) -> Array:
    """Reads a slice; every byte of a tensor that is read comes through here."""
    if isinstance(file, Mapping):
        return np.asarray(file[name][index])
    part = file.get_slice(name)
    is_whole = all(s.indices(n) == (0, n, 1) for s, n in zip(index, part.get_shape(), strict=True))
    array: Array = file.get_tensor(name) if is_whole else part[index]  # twice as fast
    return array


@contextlib.contextmanager
def open_folder(path: str | AnyPath) -> Iterator[Folder]:
    """Opens a folder; reads the files' headers and checks their sizes, but reads no tensor.

    Raises:
        WeightsError: there are no safetensors, a file is truncated or broken, or the index is
            broken, disagrees with the files, or names files outside of the folder.
    """
    path = as_path(path)
    listed = _listed_files(path)
    with contextlib.ExitStack() as stack:
        files = {path / name: _open_file(path / name, stack) for name in listed}
        tensors = {
            tensor: stored
            for file, names in ((path / name, names) for name, names in listed.items())
            for tensor, stored in _stored(file, files[file], names).items()
        }
        # transformers' models without a head are saved without the name of what is below it.
        added = "model." if "embed_tokens.weight" in tensors else ""
        tensors = {f"{added}{name}": tensor for name, tensor in tensors.items()}
        yield Folder(path, MappingProxyType(tensors), MappingProxyType(files), _added=added)


def _listed_files(path: AnyPath) -> dict[str, set[str] | None]:
    """File name -> names of its tensors; None in place of these if there is no index."""
    if not path.is_dir():
        raise WeightsError(f"{path} is no folder; name one that holds {SINGLE_FILE}")
    if (path / INDEX_FILE).exists():
        return _read_index(path / INDEX_FILE)
    if (path / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    hint = "download the whole checkpoint"
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        hint = "convert its pickled weights with transformers' save_pretrained"
    raise WeightsError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; {hint}")


def _read_index(file: AnyPath) -> dict[str, set[str] | None]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{file} has no weight_map from tensors to files")
    listed: dict[str, set[str] | None] = {}
    for tensor, name in weight_map.items():
        # The index came with the weights: it must not make us open files elsewhere.
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise WeightsError(
                f"{file} says that {tensor} lies in {name!r}, which is no file of the folder itself"
            )
        names = listed.setdefault(name, set())
        assert names is not None
        names.add(tensor)
    return listed


def _open_file(file: AnyPath, stack: contextlib.ExitStack) -> Any:
    if not file.is_file():
        raise WeightsError(f"{file} is missing, and {INDEX_FILE} names it; download it again")
    try:
        if isinstance(file, StorePath):
            return RangedFile(file)
        return stack.enter_context(safe_open(file, framework="np"))
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is truncated or no safetensors file ({error}); download it again"
        ) from None


def _stored(file: AnyPath, opened: Any, listed: set[str] | None) -> dict[str, StoredTensor]:
    names = set(opened.keys())
    if listed is not None and names != listed:
        differing = sorted(names ^ listed)
        raise WeightsError(
            f"{file} and {INDEX_FILE} disagree about {shortened(differing)}; download both again"
        )
    slices = {name: opened.get_slice(name) for name in sorted(names)}
    return {
        name: StoredTensor(file, tuple(entry.get_shape()), entry.get_dtype())
        for name, entry in slices.items()
    }


# Writing


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written: name, shape, and numpy's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        bits = DTYPE_NAMES[self.dtype].lstrip("BFIU")
        return math.prod(self.shape) * (int(bits) // 8 if bits.isdecimal() else 1)


def plan_files(entries: Sequence[TensorEntry], max_bytes: int) -> dict[str, list[TensorEntry]]:
    """Distributes tensors over files of at most `max_bytes`; a larger one has a file of its own.

    Returns:
        File name -> its tensors, in order.
    """
    groups: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.nbytes for e in groups[-1]) + entry.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def write_files(
    folder: AnyPath, plan: Mapping[str, Sequence[TensorEntry]], arrays: Iterator[Array]
) -> None:
    """Writes tensors as they come, one in memory at a time, then the index of several files.

    safetensors' own writers take all tensors of a file at once. So the format is written here: the
    header's length, the header, the data.

    Args:
        folder: an existing folder.
        plan: as from `plan_files`.
        arrays: one for each entry, in the order of the plan.

    Raises:
        OSError: a file cannot be written, for instance because the disk is full.
    """
    for name, entries in plan.items():
        with (folder / name).open("wb") as file:
            content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for entry in entries:
                content[entry.name] = {
                    "dtype": DTYPE_NAMES[entry.dtype],
                    "shape": list(entry.shape),
                    "data_offsets": [offset, offset + entry.nbytes],
                }
                offset += entry.nbytes
            header = json.dumps(content, separators=(",", ":")).encode()
            header += b" " * (-len(header) % 8)  # data starts aligned
            file.write(len(header).to_bytes(8, "little") + header)
            for entry in entries:
                array = next(arrays)
                assert (array.shape, array.dtype.name) == (entry.shape, entry.dtype), entry
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if isinstance(folder, Path):  # a store has it when it is closed
                file.flush()
                os.fsync(file.fileno())
    if len(plan) > 1:
        write_json(folder / INDEX_FILE, file_index(plan))


def write_json(file: AnyPath, content: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def file_index(plan: Mapping[str, Sequence[TensorEntry]]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    entries = [entry for group in plan.values() for entry in group]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for entry in entries),
            "total_size": sum(entry.nbytes for entry in entries),
        },
        "weight_map": {entry.name: file for file, group in plan.items() for entry in group},
    }


# Reads safetensors that are on an object store: the header, then of each tensor what is needed.

REQUEST_BYTES = 2**23
"""How much a request asks for; several are under way at a time."""

KEPT_BLOCKS = 4
"""Blocks of rows that are kept: the shards of columns on a host's devices need the same rows."""

BLOCK_BYTES = 2**26

HEADER_BYTES = 2**20
"""More than most headers have: one request reads such a file's header."""

_NUMPY = {stored: np.dtype(getattr(ml_dtypes, name, name)) for stored, name in NUMPY_NAMES.items()}


class RangedFile:
    """An open file of safetensors, with the methods of `safetensors.safe_open` that are used here.

    Raises:
        SafetensorError: it is truncated, or no such file.
        OSError: the store cannot be read.
    """

    # The format: 8 bytes with the header's length, the header in JSON, the data.

    def __init__(self, path: StorePath) -> None:
        size = path.stat().st_size
        begin = path.read_bytes(0, min(size, HEADER_BYTES))
        length = int.from_bytes(begin[:8], "little")
        if len(begin) < 8 or 8 + length > size:
            raise SafetensorError("the header is cut off")
        header = begin[8 : 8 + length]
        if len(header) < length:
            header += path.read_bytes(len(begin), 8 + length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorError(f"the header cannot be read: {error}") from error
        if 8 + length + end != size:
            raise SafetensorError(f"it has {size:,} bytes and should have {8 + length + end:,}")
        self.path, self._entries, self._data = path, entries, 8 + length
        self._kept = functools.lru_cache(maxsize=KEPT_BLOCKS)(self._rows)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> "RangedTensor":
        """A tensor, of which nothing is read yet."""
        if name not in self._entries:
            raise SafetensorError(f"it has no tensor {name}")
        return RangedTensor(self, name, self._entries[name])

    def get_tensor(self, name: str) -> Array:
        """A whole tensor."""
        return self.read(name, tuple(slice(0, size) for size in self._entries[name]["shape"]))

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A slice of a tensor; rows of which a part is needed are read whole."""
        shape = tuple(self._entries[name]["shape"])
        if not shape:
            return self._rows(name, 0, 1).reshape(())
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        (low, high), rest = bounds[0], tuple(slice(*bound) for bound in bounds[1:])
        if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
            return self._rows(name, low, high).reshape(high - low, *shape[1:])
        made = np.empty([stop - start for start, stop in bounds], self._dtype(name))
        step = max(1, BLOCK_BYTES // max(1, self._row_bytes(name)))
        for start in range(low - low % step, high, step):
            block = self._kept(name, start, min(start + step, shape[0]))
            block = block.reshape(-1, *shape[1:])
            first, last = max(start, low), min(start + step, high)
            made[first - low : last - low] = block[(slice(first - start, last - start), *rest)]
        return made

    def _dtype(self, name: str) -> np.dtype[Any]:
        return _NUMPY[str(self._entries[name]["dtype"])]

    def _row_bytes(self, name: str) -> int:
        inner: list[int] = self._entries[name]["shape"][1:]
        return math.prod(inner) * int(self._dtype(name).itemsize)

    def _rows(self, name: str, low: int, high: int) -> Array:
        """Rows `low` to before `high`, flat."""
        begin, row = self._data + self._entries[name]["data_offsets"][0], self._row_bytes(name)
        starts = range(begin + low * row, begin + high * row, REQUEST_BYTES)

        def read(start: int) -> bytes:
            return self.path.read_bytes(start, min(start + REQUEST_BYTES, begin + high * row))

        return np.frombuffer(b"".join(at_once(read, starts)), self._dtype(name))


class RangedTensor:
    """A tensor of a `RangedFile`, with the methods of safetensors' slices."""

    def __init__(self, file: RangedFile, name: str, entry: dict[str, Any]) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Safetensors' name of its dtype."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        return self._file.read(self._name, index)
