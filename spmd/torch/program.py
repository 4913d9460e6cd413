"""From a traced function to a compiled program whose arguments stay on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from spmd.torch.arrays import array_of, struct_of
from spmd.torch.state import State


class Traced(NamedTuple):
    """A function of pytrees that was traced once.

    Attributes:
      call: computes it, from pytrees of the same structure.
      results: structs of what it returns.
      is_zero: in place of each leaf, whether it is zero by construction, as the gradient of a
        parameter that the loss never reaches is.
    """

    call: Callable[..., Any]
    results: Any
    is_zero: Any


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces a function at structs; running the result does not run `fn` again."""
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat, tree = jaxpr_as_fun(closed), jax.tree.structure(results)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(tree, flat(*jax.tree.leaves(args)))

    return Traced(call, results, jax.tree.unflatten(tree, list(_is_zero(closed.jaxpr))))


def _is_zero(jaxpr: Any) -> Iterator[bool]:
    """For each result whether it is the zero that jax puts where nothing flows to."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for atom in jaxpr.outvars:
        while not isinstance(atom, Literal) and atom in makers:
            eqn = makers[atom]
            if eqn.primitive.name != "broadcast_in_dim":
                break
            atom = eqn.invars[0]
        yield isinstance(atom, Literal) and not np.any(atom.val)


class Arrays:
    """A module's tensors: torch's until a program says how they lie, then on the mesh.

    Attributes:
      state: the module's tensors by name.
      placed: name -> array on the mesh, once there.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.placed: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._structs = {name: struct_of(t, f"{name!r}") for name, t in state.tensors.items()}

    def structs(self) -> dict[str, Any]:
        """The type of each tensor inside a program."""
        return dict(self._structs)

    def known(self) -> dict[str, Any]:
        """What a program is compiled for: arrays that lie on the mesh already, types of others."""
        return self._structs | self.placed

    def place(self, shardings: Mapping[str, Any]) -> None:
        """Puts onto the mesh what is not there yet."""
        for name, sharding in shardings.items():
            if name not in self.placed:
                array = self._loaded.pop(name, None)
                if array is None:
                    array = array_of(self.state.tensors[name], f"{name!r}")
                self.placed[name] = jax.device_put(array, sharding)

    def value(self, name: str) -> Any:
        """A tensor's array, on the mesh or on its way there; None if it is still the module's."""
        return self.placed.get(name, self._loaded.get(name))

    def load(self, name: str, array: Any) -> None:
        """Replaces a tensor, where it lies or will lie."""
        if name in self.placed:
            self.placed[name] = jax.device_put(array, self.placed[name].sharding)
        else:
            self._loaded[name] = array


class Random(NamedTuple):
    """Which random numbers a call draws: those of its number, under a seed."""

    seed: int
    call: int

    def arguments(self) -> tuple[Any, Any]:
        """As arguments of a program."""
        return np.uint32(self.seed % 2**32), np.uint32(self.call % 2**32)


RANDOM = (jax.ShapeDtypeStruct((), np.uint32), jax.ShapeDtypeStruct((), np.uint32))
"""Types of `Random.arguments`."""

NO_RANDOM = (np.uint32(0), np.uint32(0))
"""In place of them where no random numbers are drawn."""


def key_of(random: Any) -> Any:
    """The key of a call, inside a program."""
    seed, call = random
    return jax.random.fold_in(jax.random.key(seed), call)


def split(tree: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of these names, and the others."""
    return {n: tree[n] for n in names}, {n: v for n, v in tree.items() if n not in names}
