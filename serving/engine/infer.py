"""What the server asks of a model without text: named arrays go in, named arrays come out.

KServe's protocol has names of its own for dtypes (`DATATYPES`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class TensorSpec(NamedTuple):
    """An input or output."""

    name: str  # what requests call it
    dtype: str  # numpy's name of it, or `bfloat16`
    shape: tuple[int, ...]  # sizes of its dims; -1 is any size


class Infer(Protocol):
    """A function of tensors; the server calls it from one thread at a time.

    It may have `batch_sizes`, numbers of rows in order: then the first dim of all inputs and
    outputs is a batch, whose rows do not depend on each other. Requests are joined and padded, and
    `infer` is called with one of these numbers of rows. It may have `not_batched`, which says why
    it has no `batch_sizes`.
    """

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The inputs."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs."""

    def infer(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        """Runs the function.

        Args:
          tensors: all inputs by name; dtypes and shapes are those of `inputs`.

        Returns:
          All outputs by name.

        Raises:
          ValueError: the function does not accept these values. The client gets the message.
        """


DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype.name: name for name, dtype in DATATYPES.items()}
