"""A module's tensors by name, and the rules that say how they and the inputs are split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spmd.api import caller
from spmd.errors import ArgumentError, SpecError, described
from spmd.mesh.spec import first_match, match_patterns
from spmd.torch.arrays import array_of

Rules = Mapping[Any, Any]
"""Torch's names of parameters and buffers, names of inputs, or patterns of either -> specs; numbers
of positional inputs -> specs. The first that matches counts."""


class State(NamedTuple):
    """The tensors that a module holds, each once, under the first name of tied ones.

    `aliases` has the first name for every name.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return self.parameters | self.buffers

    def names_of(self, first: str) -> list[str]:
        """All names of a tensor."""
        return [name for name, known in self.aliases.items() if known == first]


def state_of(module: Any) -> State:
    """The tensors of a module, which has to be one of torch."""
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
    """Tensors by name as arrays of their own memory."""
    return {name: array_of(tensor, f"{name!r}") for name, tensor in tensors.items()}


class Input(NamedTuple):
    """One tensor among the inputs: its name, and the number of the argument it is in, if any."""

    name: str
    number: int | None


class Specs(NamedTuple):
    """What the rules say, () for not split and None for open: of tensors by name, and of inputs."""

    tensors: dict[str, Any]
    inputs: dict[str, Any]


def specs_of(rules: Rules, state: State, inputs: Sequence[Input], check: bool = True) -> Specs:
    """Applies rules; to `check`, each has to match something: later calls may lack an input."""
    patterns = [rule for rule in rules if isinstance(rule, str)]
    if check:
        _check_rules(rules, patterns, [*state.aliases, *(name for name, _ in inputs)], inputs)
    first = {name: _tied(rules, patterns, state.names_of(name)) for name in state.tensors}
    return Specs(
        {name: _spec(rules, key) for name, key in first.items()},
        {
            name: _spec(rules, number if number in rules else first_match(name, patterns))
            for name, number in inputs
        },
    )


def _check_rules(
    rules: Rules, patterns: Sequence[str], names: Sequence[str], inputs: Iterable[Input]
) -> None:
    match_patterns(patterns, names, what="parameter, buffer or input", source=caller())
    numbers = {number for _, number in inputs}
    for rule in rules:
        if not isinstance(rule, str) and rule not in numbers:
            raise SpecError(
                f"{described(rule)} is the number of no positional input that is a tensor",
                source=caller(),
                actual=f"inputs {', '.join(name for name, _ in inputs)}",
                fix="name the input, or count positional arguments from 0",
            )


def _tied(rules: Rules, patterns: Sequence[str], names: Sequence[str]) -> str | None:
    """The rule of one tensor that has several names."""
    found = {name: first_match(name, patterns) for name in names}
    ruled = {name: key for name, key in found.items() if key is not None}
    if len({repr(_spec(rules, key)) for key in ruled.values()}) > 1:
        raise SpecError(
            f"{' and '.join(ruled)} are one tensor, and rules split it in different ways",
            source=caller(),
            actual=", ".join(f"{key!r}: {rules[key]}" for key in ruled.values()),
            fix="give them the same spec, or name one of them only",
        )
    return next(iter(ruled.values()), None)


def _spec(rules: Rules, key: str | int | None) -> Any:
    if key is None:
        return None
    return () if rules[key] is None else rules[key]
