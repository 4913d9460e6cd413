"""State dicts: a module's tensors under torch's names, out of the mesh and into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spmd.errors import ArgumentError, described
from spmd.torch.arrays import array_of, tensor_of
from spmd.torch.program import Arrays


def state_dict(module: Any, arrays: Arrays) -> dict[str, Any]:
    """Tensors under the names of `module.state_dict()`; tied names share one tensor."""
    tensors: dict[str, torch.Tensor] = {}
    found = {}
    for name, own in module.state_dict(keep_vars=True).items():
        first = arrays.state.aliases.get(name)
        if first is None:
            found[name] = own  # what a module adds by get_extra_state
            continue
        if first not in tensors:
            array = arrays.value(first)
            tensors[first] = (
                own.detach().clone() if array is None else tensor_of(array, dtype=own.dtype)
            )
        found[name] = tensors[first]
    return found


def load_state_dict(module: Any, arrays: Arrays, given: Mapping[str, Any]) -> None:
    """Replaces tensors; where they lie on the mesh stays.

    Raises:
      ArgumentError: names or shapes differ from the module's.
    """
    known = [name for name in module.state_dict(keep_vars=True) if name in arrays.state.aliases]
    unknown = [name for name in given if name not in arrays.state.aliases]
    missing = [name for name in known if name not in given]
    if unknown or missing:
        raise ArgumentError(
            "the state dict has other names than the module",
            actual="; ".join(
                f"{what} {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                for what, names in (("unknown", unknown), ("missing", missing))
                if names
            ),
            fix="load it into the module first if it may differ, with strict=False",
        )
    for name, tensor in given.items():
        replace(arrays, arrays.state.aliases[name], tensor, name)


def replace(arrays: Arrays, first: str, tensor: Any, name: str) -> None:
    """Replaces one tensor.

    Raises:
      ArgumentError: it has another shape.
    """
    own = arrays.state.tensors[first]
    if not isinstance(tensor, torch.Tensor) or tensor.shape != own.shape:
        raise ArgumentError(
            f"{name!r} cannot be loaded",
            actual=f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else described(tensor),
            required=f"{own.dtype} of shape {tuple(own.shape)}",
            fix="load the state dict of the same module",
        )
    array = array_of(tensor.to(own.dtype), f"{name!r}")
    arrays.load(first, array)
