"""Types of values, and the structured attributes of ops."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, local_shape

Order = tuple[int, ...]
"""A tensor's layout in memory: its dims, major to minor. None instead means: as numbered."""


class TensorType(NamedTuple):
    """A tensor's static shape and MLIR element type (`f32`, `bf16`, ...); `token` for a token."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor; elements smaller than a byte are packed."""
        return _bytes_of(self)

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape

    @property
    def is_packed(self) -> bool:
        """Whether elements take less than a byte, as those of `i4`."""
        return dtype_bits(self.dtype) < 8

    def __str__(self) -> str:
        if self.dtype == "token":
            return "!stablehlo.token"
        return "tensor<" + "".join(f"{n}x" for n in self.shape) + self.dtype + ">"

    def with_shape(self, shape: tuple[int, ...]) -> "TensorType":
        """Returns the type with the same element type and another shape."""
        return TensorType(shape, self.dtype)

    def with_dim(self, dim: int, size: int) -> "TensorType":
        """Returns the type with size `size` in dim `dim`."""
        return self.with_shape((*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def scaled(self, dim: int, times: int, parts: int = 1) -> "TensorType":
        """Returns the type with a dim's size times `times` and divided by `parts`, rounded down."""
        return self.with_dim(dim, self.shape[dim] * times // parts)


def types_text(types: Iterable[TensorType]) -> str:
    """Returns types as text: `(tensor<4x8xf32>, tensor<i1>)`."""
    return f"({', '.join(map(str, types))})"


@functools.cache
def _bytes_of(type_: TensorType) -> int:
    return -(-type_.size * dtype_bits(type_.dtype) // 8)


def local_type(type_: TensorType, sharding: Sharding, mesh: Mesh) -> TensorType:
    """Returns the type of one device's piece, padding included, of a value so typed and sharded."""
    return type_.with_shape(local_shape(type_.shape, sharding, mesh))


_SMALL_FLOATS = (
    "f4E2M1FN", "f8E3M4", "f8E4M3", "f8E4M3FN", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2",
    "f8E5M2FNUZ", "f8E8M0FNU",
)  # fmt: skip
_NUMPY_DTYPES: dict[str, Any] = {
    "i1": np.bool_,
    **{f"i{n}": getattr(np, f"int{n}") for n in (8, 16, 32, 64)},
    **{f"ui{n}": getattr(np, f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"f{n}": getattr(np, f"float{n}") for n in (16, 32, 64)},
    **{f"i{n}": getattr(ml_dtypes, f"int{n}") for n in (2, 4)},
    **{f"ui{n}": getattr(ml_dtypes, f"uint{n}") for n in (2, 4)},
    **{f: getattr(ml_dtypes, f"float{f[1]}_{f[2:].lower()}") for f in _SMALL_FLOATS},
    "bf16": ml_dtypes.bfloat16,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
}

_BITS: dict[str, int] = {
    **{name: np.dtype(made).itemsize * 8 for name, made in _NUMPY_DTYPES.items()},
    **{"i2": 2, "ui2": 2, "i4": 4, "ui4": 4, "f4E2M1FN": 4, "token": 0},
}
"""Maps an element type to the bits of an element; those smaller than a byte are packed."""

PACKED = frozenset(np.dtype(_NUMPY_DTYPES[name]) for name, bits in _BITS.items() if 0 < bits < 8)
"""Dtypes whose elements numpy has in a byte each, and XLA does not."""


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy (or ml_dtypes) dtype of an MLIR element type; KeyError if there is none."""
    found: np.dtype[Any] = np.dtype(_NUMPY_DTYPES[dtype])
    return found


def dtype_bits(dtype: str) -> int:
    """Returns the bits of one element in memory, 8 for an `i1`; KeyError for an unknown type."""
    if dtype not in _BITS:
        raise KeyError(f"unknown element type {dtype}")
    return _BITS[dtype]


_X64 = frozenset({"i64", "ui64", "f64", "complex<f64>"})


def needs_x64(types: Iterable[TensorType]) -> bool:
    """Whether any type has 64-bit numbers, which jax makes 32 bits wide unless x64 is enabled."""
    return any(t.dtype in _X64 for t in types)


def is_float(dtype: str) -> bool:
    """Whether an element type is a real floating-point type."""
    return dtype.startswith(("f", "bf"))


def is_integer(dtype: str) -> bool:
    """Whether an element type is an integer type, predicates included."""
    return dtype.startswith(("i", "ui"))


class Dense(NamedTuple):
    """A constant's elements: `data` holds one element if `splat`, else all in row-major order."""

    type: TensorType
    data: bytes
    splat: bool

    def array(self) -> np.ndarray[Any, Any]:
        """Returns the elements as a numpy array of the full shape (a broadcast view if splat)."""
        flat = np.frombuffer(self.data, numpy_dtype(self.type.dtype))
        return np.broadcast_to(flat.reshape(() if self.splat else self.type.shape), self.type.shape)

    @staticmethod
    def of(array: Any, dtype: str) -> "Dense":
        """Returns the constant with an array's elements, as `dtype`; a splat if all are equal."""
        # Elements are compared as bytes, which keeps -0.0 apart from 0.0 and knows equal NaNs.
        elements = np.asarray(array, numpy_dtype(dtype))
        kind = TensorType(tuple(elements.shape), dtype)
        raw = elements.tobytes()
        first = elements.reshape(-1)[:1].tobytes()
        splat = elements.size > 0 and raw == first * elements.size
        return Dense(kind, first if splat else raw, splat)


class Opaque(NamedTuple):
    """An attribute kept as MLIR text, for which there is no structure here."""

    text: str


class DotDims(NamedTuple):
    """The dims of a matrix product (`#stablehlo.dot`): each operand's batch and contracted ones."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]


class GatherDims(NamedTuple):
    """The dims of a gather (`#stablehlo.gather`), by the names of StableHLO's specification."""

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...]
    start_indices_batching_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    index_vector_dim: int


class ScatterDims(NamedTuple):
    """The dims of a scatter (`#stablehlo.scatter`), by the names of StableHLO's specification."""

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    input_batching_dims: tuple[int, ...]
    scatter_indices_batching_dims: tuple[int, ...]
    scatter_dims_to_operand_dims: tuple[int, ...]
    index_vector_dim: int


class ConvDims(NamedTuple):
    """A convolution's dims (`#stablehlo.conv`): batch, feature, space of input, kernel, output."""

    input_batch: int
    input_feature: int
    input_spatial: tuple[int, ...]
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_feature: int
    output_spatial: tuple[int, ...]


DIM_NUMBERS: Mapping[type, tuple[str, tuple[str, ...]]] = {
    DotDims: ("dot", tuple(f"{name}ing_dimensions" for name in DotDims._fields)),
    GatherDims: ("gather", GatherDims._fields),
    ScatterDims: ("scatter", ScatterDims._fields),
}
"""Maps a class of dims to (attribute in MLIR, MLIR's names of its fields, in our order)."""


class ShardingAttr(NamedTuple):
    """A user's mark as a module has it: by names of axes, not yet by atoms of a mesh."""

    # for each dim, the (axis name, pre, size) entries that split it; size 0 is the whole axis
    dims: tuple[tuple[tuple[str, int, int], ...], ...]
    open: tuple[bool, ...]  # for each dim, whether the compiler may split it further


Attribute = Any  # bool | int | float | str | tuple | Dense | Opaque | a NamedTuple above | Body
