"""A model's tensors, which are read when they are asked for.

Whatever they come from (`sources.py`), they have Hugging Face's names and shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.weights.files import Array, Index
from spmd.models.llama.weights.names import Parameter, parameters
from spmd.models.training.paths import AnyPath


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is read when it is asked for: all of it by `numpy.asarray`, or a slice."""

    name: str  # Hugging Face's name
    shape: tuple[int, ...]
    dtype: str  # numpy's name of its dtype
    # returns a slice, in any dtype that can be converted to this one
    read: Callable[[Index], Array]
    # tensors with the same value are stored in the same place; reading them one after the other is
    # quickest
    together: str = ""
    # of a matrix that is stored quantized, and read in float32: it as it is (`packed.Matrix`)
    parts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, compare=False)

    @staticmethod
    def several(
        name: str, types: Mapping[str, Any], make: Callable[[], Mapping[str, Array]], together: str
    ) -> dict[str, Tensor]:
        """Tensors that are made together: a part of what `make` returns for each of `types`."""

        def read(part: str, index: Index) -> Array:
            return make()[part][index]

        return {
            part: Tensor(
                f"{name}.{part}", tuple(struct.shape), np.dtype(struct.dtype).name,
                functools.partial(read, part), together,
            )
            for part, struct in types.items()
        }  # fmt: skip

    def __getitem__(self, index: Index) -> Array:
        """Reads a slice; `index` has a slice with start and stop for each dim."""
        return self.read(index).astype(self.dtype, copy=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del copy
        whole = self[tuple(slice(0, size) for size in self.shape)]
        return whole if dtype is None else whole.astype(dtype)

    def astype(self, dtype: str) -> Tensor:
        """The same tensor in another dtype; it is converted when it is read."""
        return dataclasses.replace(self, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Source:
    """A model's config and tensors."""

    config: LlamaConfig  # the model, with layers unrolled
    tensors: Mapping[str, Tensor]  # in the order in which the model uses them
    about: str  # where they come from, for people
    tokenizer_from: Path | None = None  # a folder with tokenizer files; None if there is none
    stamps: tuple[str, ...] = ()  # sizes and times of the files; they differ if a file has changed

    def with_tokenizer(self, folder: Path) -> Source:
        """The same source with tokenizer files from another folder."""
        return dataclasses.replace(self, tokenizer_from=folder)

    def astype(self, dtype: str | None) -> Source:
        """The same source with all tensors in another dtype; None keeps every tensor's bits."""
        if dtype is None:
            return self
        tensors = {name: tensor.astype(dtype) for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors)

    def tree(self) -> Any:
        """The tensors as a tree like that of `fresh.init` with layers unrolled."""
        wanted, treedef = parameters(self.config)
        return jax.tree.unflatten(treedef, [self._whole(p) for p in wanted])

    def _whole(self, parameter: Parameter) -> Tensor:
        """A parameter: its one tensor, or its experts' together."""
        parts = [self.tensors[name] for name in parameter.names]
        if not parameter.leading:
            return parts[0]
        read = functools.partial(
            parameter.read, dtype=parts[0].dtype, part=lambda name, index: self.tensors[name][index]
        )
        return Tensor(parameter.path, parameter.shape, parts[0].dtype, read)


def unrolled(config: LlamaConfig) -> LlamaConfig:
    """The same model with layers unrolled."""
    return dataclasses.replace(config, scan_layers=False)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model."""
    return {name: p.tensor_shape for p in parameters(unrolled(config))[0] for name in p.names}


def stamps(folder: AnyPath) -> tuple[str, ...]:
    """Name, size and time of every file directly in a folder."""
    inside: list[AnyPath] = list(folder.iterdir())
    files = sorted((path for path in inside if path.is_file()), key=lambda path: path.name)
    found = [(path.name, path.stat()) for path in files]
    return tuple(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in found)
