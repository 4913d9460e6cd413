"""What a call is given: tensors are arguments of the program, all else is a constant of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs

from spmd.errors import ArgumentError, described
from spmd.torch.arrays import array_of, struct_of
from spmd.torch.state import Input

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of what a result may hold beside tensors."""


class Inputs(NamedTuple):
    """The arguments of a call, taken apart: the tensors' names and numbers, and themselves.

    `rest` has (position, value) of every other leaf; `tree` is the structure of (args, kwargs).
    """

    inputs: tuple[Input, ...]
    leaves: tuple[Any, ...]
    rest: tuple[tuple[int, Any], ...]
    tree: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each tensor."""
        return tuple(name for name, _ in self.inputs)

    @property
    def key(self) -> Any:
        """What decides whether a compiled program serves the call."""
        types = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in self.leaves)
        return types, self.rest, str(self.tree)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The types of the tensors inside the program, by name."""
        return {
            name: struct_of(leaf, f"input {name!r}")
            if isinstance(leaf, torch.Tensor)
            else jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in zip(self.names, self.leaves, strict=True)
        }

    def arrays(self) -> dict[str, Any]:
        """The tensors as arrays, by name; arrays as they are."""
        return {
            name: array_of(leaf, f"input {name!r}") if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(self.names, self.leaves, strict=True)
        }

    def rebuild(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in place of these."""
        leaves = [values[name] for name in self.names]
        args, kwargs = torch_tree.tree_unflatten(_merged(self.rest, leaves), self.tree)
        return tuple(args), dict(kwargs)


def take_apart(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """Takes the arguments of a call apart: pytrees of tensors and plain values, named as `fn`'s."""
    found, tree = torch_tree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    heads = _positional_names(fn, len(args))
    inputs, leaves, rest = [], [], []
    for position, (path, leaf) in enumerate(found):
        name = _name_of(path, heads)
        if isinstance(leaf, torch.Tensor | np.ndarray | jax.Array):
            inputs.append(Input(name, path[1].idx if path[0].idx == 0 else None))
            leaves.append(leaf)
        else:
            _check_plain(name, leaf)
            rest.append((position, leaf))
    return Inputs(tuple(inputs), tuple(leaves), tuple(rest), tree)


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "input")
    return names[:count] + [f"{rest}.{i}" for i in range(count - len(names))]


def _name_of(path: Sequence[Any], heads: Sequence[str]) -> str:
    """`batch.labels`: the parameter's name, then the path within the argument."""
    keys = [
        getattr(step, "key", getattr(step, "idx", getattr(step, "name", step))) for step in path
    ]
    head = heads[keys[1]] if keys[0] == 0 else str(keys[1])
    return ".".join([head, *map(str, keys[2:])])


def _check_plain(name: str, leaf: Any) -> None:
    try:
        hash(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"input {name!r} of type {type(leaf).__name__} is neither a tensor nor a plain value",
            actual=described(leaf),
            fix="pass a tensor, or a number, a text or None, which become constants of the program",
        ) from error


class Outputs(NamedTuple):
    """How a result is put together from arrays: its structure, and what is no tensor."""

    tree: Any
    rest: tuple[tuple[int, Any], ...]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The result with these tensors."""
        return torch_tree.tree_unflatten(_merged(self.rest, leaves), self.tree)


def _merged(rest: Sequence[tuple[int, Any]], leaves: Sequence[Any]) -> list[Any]:
    """Leaves in their order: `rest` says which is where, `leaves` are the others."""
    fixed, others = dict(rest), iter(leaves)
    return [fixed[i] if i in fixed else next(others) for i in range(len(fixed) + len(leaves))]


def split_result(result: Any) -> tuple[list[Any], Outputs]:
    """The tensors of a module's result, and what is needed to put it together again."""
    leaves, tree = torch_tree.tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rest = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
    for _, leaf in rest:
        if not isinstance(leaf, PLAIN):
            raise ArgumentError(
                f"the module returns a {type(leaf).__name__}, which is no tensor",
                required="tensors in tuples, lists, dicts and what else PyTorch's pytrees know",
                fix="switch it off, as in model(..., use_cache=False), or return its tensors",
            )
    return tensors, Outputs(tree, tuple(rest))
