"""Torch tensors as jax arrays and back: a module's tensors, and those among a call's arguments.

`Rules` say how they are split. Other arguments of a call are constants of its program.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs
from torchax.ops import mappings

from spmd.api import caller
from spmd.errors import ArgumentError, SpecError, described
from spmd.mesh.spec import first_match, match_patterns


def array_of(tensor: torch.Tensor, what: str) -> Any:
    """Returns a copy of a tensor: a numpy array, or for a tensor on a GPU a jax array there.

    Its dtype is `narrow_dtype`'s. ArgumentError, which calls the tensor `what`, if it has no values
    (device meta), or without x64 is float64 or has integers that do not fit into 32 bits.
    """
    wide, dtype = tensor.detach(), narrow_dtype(tensor.dtype, what)
    if wide.is_meta:
        raise ArgumentError(
            f"{what} is on the meta device and has no values",
            fix="give it values by .load_state_dict(state), here or of the module",
        )
    tensor = wide.to(dtype)
    if dtype != wide.dtype and not torch.equal(tensor.to(wide.dtype), wide):
        raise ArgumentError(
            f"{what} has integers that do not fit into 32 bits",
            actual=f"{wide.dtype}, from {wide.min()} to {wide.max()}",
            fix="keep them smaller, or call jax.config.update('jax_enable_x64', True) first",
        )
    if not tensor.is_cpu:
        return jax.dlpack.from_dlpack(tensor.clone(memory_format=torch.contiguous_format))
    data = tensor.reshape(-1).view(torch.uint8).numpy()  # numpy alone knows no bfloat16
    return np.array(data.view(mappings.t2j_dtype(dtype)).reshape(tensor.shape))


def struct_of(tensor: Any, what: str) -> jax.ShapeDtypeStruct:
    """Returns shape and jax's dtype of an array, or of what `array_of(tensor, what)` returns."""
    if isinstance(tensor, torch.Tensor):
        dtype = mappings.t2j_dtype(narrow_dtype(tensor.dtype, what))
    else:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


def narrow_dtype(dtype: torch.dtype, what: str) -> torch.dtype:
    """Returns `dtype`; without x64, returns int32 for int64, raises ArgumentError for float64."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return dtype
    if dtype in (torch.float64, torch.complex128):
        raise ArgumentError(
            f"{what} is {dtype}, and jax computes in 32 bits",
            required="float32 or narrower",
            fix="convert it, as in module.float(), or call "
            "jax.config.update('jax_enable_x64', True) first",
        )
    return {torch.int64: torch.int32, torch.uint64: torch.uint32}.get(dtype, dtype)


def tensor_of(array: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Returns a jax array, gathered, as a tensor of `dtype` (or its own) on `device` (or CPU)."""
    if device is not None and torch.device(device).type != "cpu":
        first = min(array.sharding.device_set, key=lambda d: d.id)
        tensor = torch.from_dlpack(jax.device_put(array, first)).to(device)
    else:
        found = np.array(array)
        data = torch.from_numpy(found.reshape(-1).view(np.uint8))
        tensor = data.view(mappings.j2t_dtype(found.dtype)).reshape(found.shape)
    return tensor if dtype is None else tensor.to(dtype)


# The tensors of a module.

Rules = Mapping[Any, Any]
"""How tensors are split: the name of a parameter, buffer or input, a glob of such names, or the
number of a positional input -> its spec. The first key that matches a tensor counts."""


class State(NamedTuple):
    """The tensors of a module by name; one with several names (tied) is there once, by the first.

    `aliases` maps every name to that first one: `{"head.weight": "embed.weight", ...}`.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers in one dict, by name."""
        return self.parameters | self.buffers


def state_of(module: Any) -> State:
    """Returns the parameters and buffers of a module; ArgumentError if it is no torch module."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"a {type(module).__name__} is no torch module",
            actual=described(module),
            required="a torch.nn.Module",
            fix="for functions of jax use spmd.jit",
        )
    parameters = dict(module.named_parameters())
    buffers = {name: b for name, b in module.named_buffers() if name not in parameters}
    first = {id(tensor): name for name, tensor in (buffers | parameters).items()}
    every = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return State(parameters, buffers, {name: first[id(tensor)] for name, tensor in every})


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a copy of each tensor as an array (`array_of`), by the same names."""
    return {name: array_of(tensor, f"{name!r}") for name, tensor in tensors.items()}


def specs_of(
    rules: Rules, state: State, inputs: Mapping[str, int | None], check: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the specs of a module's tensors and of a call's inputs, two dicts by name.

    A spec is None (the compiler decides) where no rule matches, and () (not split) for a rule's
    None. `inputs` is `Inputs.numbers`. SpecError if names of one tensor get different specs
    or, if `check`, a rule matches nothing.
    """
    patterns = [rule for rule in rules if isinstance(rule, str)]
    if check:
        names = [*state.aliases, *inputs]
        match_patterns(patterns, names, what="parameter, buffer or input", source=caller())
        for rule in rules:
            if not isinstance(rule, str) and rule not in inputs.values():
                raise SpecError(
                    f"{described(rule)} is the number of no positional input that is a tensor",
                    source=caller(),
                    actual=f"inputs {', '.join(inputs)}",
                    fix="name the input, or count positional arguments from 0",
                )

    def spec(rule: Any) -> Any:
        return () if rules[rule] is None else rules[rule]

    own: dict[str, Any] = {}
    for name, first in state.aliases.items():
        if (rule := first_match(name, patterns)) is None:
            continue
        if repr(own.setdefault(first, spec(rule))) != repr(spec(rule)):
            raise SpecError(
                f"{first} and {name} are one tensor, and rules split it in different ways",
                source=caller(),
                actual=f"{own[first]} and {spec(rule)}",
                fix="give them the same spec, or name one of them only",
            )
    given = {
        name: number if number in rules else first_match(name, patterns)
        for name, number in inputs.items()
    }
    return {name: own.get(name) for name in state.tensors}, {
        name: None if rule is None else spec(rule) for name, rule in given.items()
    }


# What a call is given.

TENSOR = object()

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""The types of values that a module's result may have beside tensors."""


class Inputs(NamedTuple):
    """The arguments of a call: its tensors and arrays, by name, apart from all other values.

    `numbers`: name of each of `leaves`, in order -> number of its positional argument, else None.
    """

    # name of each tensor -> number of the positional argument that it is in, None for others
    numbers: dict[str, int | None]
    leaves: tuple[Any, ...]  # the tensors
    every: tuple[Any, ...]  # all leaves, with `TENSOR` in place of tensors
    tree: Any  # the structure of (args, kwargs)

    @property
    def key(self) -> Any:
        """(Tensors' shapes and dtypes, other values, structure): what a program depends on."""
        types = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in self.leaves)
        # Equal constants may differ, as 1, 1.0 and True, or 0.0 and -0.0, and NaN equals nothing.
        every = tuple(
            (type(leaf), repr(leaf) if isinstance(leaf, float | complex | np.inexact) else leaf)
            for leaf in self.every
        )
        return types, every, str(self.tree)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each tensor inside the program, by name."""
        named = zip(self.numbers, self.leaves, strict=True)
        return {name: struct_of(leaf, f"input {name!r}") for name, leaf in named}

    def arrays(self) -> dict[str, Any]:
        """Returns a copy of each tensor as an array, by name; arrays are returned as they are."""
        named = zip(self.numbers, self.leaves, strict=True)
        return {
            name: array_of(leaf, f"input {name!r}") if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in named
        }

    def rebuild(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call's (args, kwargs) with `values[name]` in place of each tensor `name`."""
        leaves = [values[name] for name in self.numbers]
        args, kwargs = torch_tree.tree_unflatten(_filled(self.every, leaves), self.tree)
        return tuple(args), dict(kwargs)


def take_apart(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """Returns a call's `Inputs`, named as in `fn` (`x`, `x.y`); ArgumentError if not hashable."""
    found, tree = torch_tree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    heads = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "input")
    heads = heads[: len(args)] + [f"{others}.{i}" for i in range(len(args) - len(heads))]
    numbers: dict[str, int | None] = {}
    leaves, every = [], []
    for path, leaf in found:
        keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
        head, number = (heads[keys[1]], keys[1]) if keys[0] == 0 else (keys[1], None)
        name = ".".join(map(str, (head, *keys[2:])))  # `batch.labels`, which is in argument `batch`
        if isinstance(leaf, torch.Tensor | np.ndarray | jax.Array):
            numbers[name] = number
            leaves.append(leaf)
            every.append(TENSOR)
            continue
        every.append(leaf)
        try:
            hash(leaf)
        except TypeError as error:
            kind = type(leaf).__name__
            raise ArgumentError(
                f"input {name!r} of type {kind} is neither a tensor nor a plain value",
                actual=described(leaf),
                fix="pass a tensor, or a number, a text or None, which become constants of the "
                "program",
            ) from error
    return Inputs(numbers, tuple(leaves), tuple(every), tree)


def _filled(every: Sequence[Any], tensors: Iterable[Any]) -> list[Any]:
    following = iter(tensors)
    return [next(following) if leaf is TENSOR else leaf for leaf in every]


def split_result(result: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns (a result's tensors, a function of others that makes such a result).

    ArgumentError if the result has leaves that are neither tensors nor of a type in `PLAIN`.
    """
    leaves, tree = torch_tree.tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    every = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for leaf in every:
        if leaf is not TENSOR and not isinstance(leaf, PLAIN):
            raise ArgumentError(
                f"the module returns a {type(leaf).__name__}, which is no tensor",
                required="tensors in tuples, lists, dicts and what else PyTorch's pytrees know",
                fix="switch it off, as in model(..., use_cache=False), or return its tensors",
            )
    return tensors, lambda tensors: torch_tree.tree_unflatten(_filled(every, tensors), tree)
