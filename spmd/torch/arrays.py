"""Tensors to arrays and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.ops import mappings

from spmd.errors import ArgumentError

INTEGERS = {torch.int64: torch.int32, torch.uint64: torch.uint32}
"""What 64-bit integers are inside, where jax has none of 64 bits."""

WIDE = (torch.float64, torch.complex128)

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def array_of(tensor: torch.Tensor, what: str) -> Any:
    """A tensor as an array of its own memory, so that later changes of the tensor do not reach it.

    A tensor on a GPU stays there, by DLPack. Where jax has no 64 bits, integers become narrower.
    ArgumentError if it has no values, or values that do not fit into 32 bits.
    """
    tensor = narrow(tensor.detach(), what)
    if tensor.is_meta:
        raise ArgumentError(
            f"{what} is on the meta device and has no values",
            fix="give it values by load_state_dict(), here or of the module",
        )
    if not tensor.is_cpu:
        return jax.dlpack.from_dlpack(tensor.clone(memory_format=torch.contiguous_format))
    dtype = mappings.t2j_dtype(tensor.dtype)
    tensor = tensor.contiguous()
    if tensor.dtype in mappings.NUMPY_UNSUPPORTED_DTYPES:
        return np.array(tensor.view(_BITS[tensor.itemsize]).numpy()).view(dtype)
    return np.array(tensor.numpy())


def struct_of(tensor: torch.Tensor, what: str) -> jax.ShapeDtypeStruct:
    """The type that `array_of` gives a tensor, without its values."""
    dtype = narrow_dtype(tensor.dtype, what)
    return jax.ShapeDtypeStruct(tuple(tensor.shape), mappings.t2j_dtype(dtype))


def narrow_dtype(dtype: torch.dtype, what: str) -> torch.dtype:
    """The dtype inside: of 32 bits where jax has no more, unless numbers would lose digits."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return dtype
    if dtype in WIDE:
        raise ArgumentError(
            f"{what} is {dtype}, and jax computes in 32 bits",
            required="float32 or narrower",
            fix="convert it, as in module.float(), or call "
            "jax.config.update('jax_enable_x64', True) first",
        )
    return INTEGERS.get(dtype, dtype)


def narrow(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor in its dtype inside, if its values fit."""
    dtype = narrow_dtype(tensor.dtype, what)
    if dtype == tensor.dtype or tensor.is_meta:
        return tensor
    small = tensor.to(dtype)
    if not torch.equal(small.to(tensor.dtype), tensor):
        raise ArgumentError(
            f"{what} has integers that do not fit into 32 bits",
            actual=f"{tensor.dtype}, from {tensor.min()} to {tensor.max()}",
            fix="keep them smaller, or call jax.config.update('jax_enable_x64', True) first",
        )
    return small


def tensor_of(array: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """An array of jax, however it is split, as one tensor; to a GPU it goes by DLPack."""
    if device is not None and torch.device(device).type != "cpu":
        first = min(array.sharding.device_set, key=lambda d: d.id)
        tensor = torch.from_dlpack(jax.device_put(array, first)).to(device)
    else:
        found = np.array(array)
        own = mappings.j2t_dtype(jnp.dtype(found.dtype))
        if own in mappings.NUMPY_UNSUPPORTED_DTYPES:
            bits = found.view(np.dtype(f"u{found.dtype.itemsize}"))
            tensor = torch.from_numpy(bits).view(own)
        else:
            tensor = torch.from_numpy(found)
    return tensor if dtype is None else tensor.to(dtype)
