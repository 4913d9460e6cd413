"""What the server asks of a model of tensors: named arrays in, named arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class TensorSpec(NamedTuple):
    """A tensor's name, numpy's name of its dtype (or `bfloat16`), and shape; -1 is any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Infer(Protocol):
    """A function of tensors; the server calls it from one thread at a time."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What goes in."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """What comes out."""

    def infer(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run it.

        Args:
          tensors: all inputs, of their dtypes, and of shapes that fit.

        Raises:
          ValueError: the values do not fit; the message is for whoever sent them.
        """
