"""`Held`: what a compiled module and a training step share: tensors on a mesh, programs by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import jax
import torch

from spmd.api import Compiled
from spmd.errors import ArgumentError, described
from spmd.mesh.spec import as_mesh
from spmd.options import Options
from spmd.torch import saved
from spmd.torch.inputs import Inputs
from spmd.torch.program import Arrays
from spmd.torch.state import Rules, state_of


class _HasCompiled(Protocol):
    @property
    def compiled(self) -> Compiled: ...


Program = TypeVar("Program", bound=_HasCompiled)


class Held(Generic[Program]):
    """A module's tensors on a mesh, and the programs that were compiled for it."""

    def __init__(self, module: Any, mesh: Any, rules: Rules, options: Options | None) -> None:
        check_module(module)
        as_mesh(mesh)
        self.module = module
        self._mesh, self._rules, self._options = mesh, rules, options
        self._arrays = Arrays(state_of(module))
        self._programs: dict[Any, Program] = {}
        self._last: Program | None = None

    @property
    def compiled(self) -> Compiled:
        """The program that was used last: `explain()`, `report()`, `summary()` and so on.

        Raises:
          ArgumentError: there is none yet.
        """
        if self._last is None:
            raise ArgumentError(
                "nothing is compiled yet",
                fix="call it, or its compile(), with inputs first",
            )
        return self._last.compiled

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """Each parameter by torch's name, as it lies on the mesh; of tied ones the first name.

        A training step takes their memory for the new ones: ask again after it.
        """
        return self._placed(self._arrays.state.parameters)

    @property
    def buffers(self) -> dict[str, jax.Array]:
        """The same of buffers."""
        return self._placed(self._arrays.state.buffers)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers named as in `module.state_dict()`, as tensors of the CPU."""
        return saved.state_dict(self.module, self._arrays)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces parameters and buffers; they lie on the mesh as before.

        Raises:
          ArgumentError: a name is missing or unknown, or a tensor has another shape.
        """
        saved.load_state_dict(self.module, self._arrays, state_dict)

    def _placed(self, names: Iterable[str]) -> dict[str, jax.Array]:
        _ = self.compiled  # only a program says how they lie
        return {name: self._arrays.placed[name] for name in names}

    def _program(self, inputs: Inputs) -> Program:
        """The program for inputs like these, in the module's mode; compiled if it is new."""
        mode = tuple(part.training for part in self.module.modules())
        key = inputs.key, mode, self._more_key()
        if key not in self._programs:
            self._programs[key] = self._compile(inputs)
        self._last = self._programs[key]
        return self._last

    def _more_key(self) -> Any:
        """What a program depends on besides inputs and the module's mode."""
        return None

    def _compile(self, inputs: Inputs) -> Program:
        raise NotImplementedError


def check_module(module: Any) -> None:
    """Holds that something is a torch module.

    Raises:
      ArgumentError: it is not.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"a {type(module).__name__} is no torch module",
            actual=described(module),
            required="a torch.nn.Module",
            fix="for functions of jax use spmd.jit",
        )
