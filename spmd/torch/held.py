"""`Held`: what a compiled module and a training step share: tensors on a mesh, programs by key.

`shard` makes the first of them: a torch module that is called as before, and computes on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import call
from typing import Any, NamedTuple

import jax
import torch

from spmd.api import Compiled, jit
from spmd.errors import ArgumentError, described
from spmd.mesh.spec import as_mesh
from spmd.options import Options
from spmd.torch.arrays import array_of, struct_of, tensor_of
from spmd.torch.inputs import Inputs, split_result, take_apart
from spmd.torch.state import Rules, State, specs_of, state_of
from spmd.torch.tracing import NO_RANDOM, RANDOM, Random, as_arrays, key_of, run, split, trace


class Arrays:
    """A module's tensors by name: torch's until a program says how they lie, then on the mesh."""

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


class ModuleProgram(NamedTuple):
    """One program of a module: the buffers that it changes, and whether it draws random numbers.

    `outputs` says of a forward pass how its result is put together.
    """

    compiled: Compiled
    changed: tuple[str, ...]
    draws: bool
    outputs: Any = None


class Held:
    """A module's tensors on a mesh, and the programs that were compiled for it."""

    def __init__(self, module: Any, mesh: Any, rules: Rules, options: Options | None) -> None:
        self._arrays = Arrays(state_of(module))
        as_mesh(mesh)
        self.module = module
        self._mesh, self._rules, self._options = mesh, rules, options
        self._signature: Callable[..., Any] = module.forward  # its parameters name the inputs
        self._programs: dict[Any, ModuleProgram] = {}
        self._last: ModuleProgram | None = None

    @property
    def compiled(self) -> Compiled:
        """The program that was used last: `explain()`, `report()`, `summary()` and so on.

        Raises:
          ArgumentError: there is none yet.
        """
        if self._last is None:
            raise ArgumentError(
                "nothing is compiled yet", fix="call it, or its compile(), with inputs first"
            )
        return self._last.compiled

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles for inputs without running, and puts all tensors onto the mesh."""
        return self._program(take_apart(self._signature, args, kwargs)).compiled

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
        tensors: dict[str, torch.Tensor] = {}  # tied names share one
        found = {}
        for name, own in self.module.state_dict(keep_vars=True).items():
            first = self._arrays.state.aliases.get(name)
            if first is None:
                found[name] = own  # what a module adds by get_extra_state
                continue
            if first not in tensors:
                array = self._arrays.value(first)
                tensors[first] = (
                    own.detach().clone() if array is None else tensor_of(array, dtype=own.dtype)
                )
            found[name] = tensors[first]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces parameters and buffers; they lie on the mesh as before.

        Raises:
          ArgumentError: a name is missing or unknown, or a tensor has another shape.
        """
        state = self._arrays.state
        known = [n for n in self.module.state_dict(keep_vars=True) if n in state.aliases]
        unknown = [name for name in state_dict if name not in state.aliases]
        missing = [name for name in known if name not in state_dict]
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
        for name, tensor in state_dict.items():
            first = state.aliases[name]
            own = state.tensors[first]
            is_tensor = isinstance(tensor, torch.Tensor)
            if not is_tensor or tensor.shape != own.shape:
                shape = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if is_tensor else ""
                raise ArgumentError(
                    f"{name!r} cannot be loaded",
                    actual=shape or described(tensor),
                    required=f"{own.dtype} of shape {tuple(own.shape)}",
                    fix="load the state dict of the same module",
                )
            self._arrays.load(first, array_of(tensor.to(own.dtype), f"{name!r}"))

    def _placed(self, names: Iterable[str]) -> dict[str, jax.Array]:
        _ = self.compiled  # only a program says how they lie
        return {name: self._arrays.placed[name] for name in names}

    def _program(self, inputs: Inputs) -> ModuleProgram:
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

    def _compile(self, inputs: Inputs) -> ModuleProgram:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------
# A module's forward pass.


def shard(
    module: Any,
    mesh: Any,
    rules: Rules | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    seed: int = 0,
    options: Options | None = None,
) -> Sharded:
    """Compiles a torch module's forward pass for a mesh.

    Args:
      module: a `torch.nn.Module`. It is traced as it is, in training or evaluation mode, and left
        unchanged; its tensors are copied onto the mesh.
      mesh: the mesh.
      rules: torch's names of parameters, buffers and inputs, or patterns of them (`*` also crosses
        dots), or numbers of positional inputs -> specs as for `mark_sharding`. The first that
        matches counts. What none matches is up to the compiler.
      example_inputs: positional inputs, or keyword inputs as a mapping; with them it is compiled at
        once, else at the first call.
      seed: of random numbers, which differ from call to call.
      options: compile options.

    Returns:
      An object to call like the module; see `Sharded`.

    Raises:
      SpecError: a rule that matches nothing, or a spec that does not fit.
      UnsupportedOpError: a torch op that torchax cannot compute.
      FrontendError: Python that depends on a tensor's values.
      ArgumentError: something that is no module, or float64 where jax has none.

    Example:
      >>> rules = {"*.q_proj.weight": ("model", None), "input_ids": ("data", None)}
      >>> sharded = spmd.torch.shard(model.eval(), mesh, rules)
      >>> logits = sharded(input_ids=tokens, use_cache=False).logits
    """
    sharded = Sharded(module, mesh, rules or {}, seed, options)
    if isinstance(example_inputs, Mapping):
        sharded.compile(**example_inputs)
    elif len(example_inputs):
        sharded.compile(*example_inputs)
    return sharded


class Sharded(Held):
    """A module on a mesh: call it with tensors, and it gives tensors.

    It is compiled once for each structure, shape and dtype of inputs, and for each mode of the
    module (`module.train()`, `module.eval()`). Inputs that are no tensors are constants of the
    program. Buffers that a call changes are updated.

    Attributes:
      module: as it was given. Its own tensors stay as they are.
      calls: how many calls there were; random numbers depend on it and on `seed`.
    """

    def __init__(
        self, module: Any, mesh: Any, rules: Rules, seed: int = 0, options: Options | None = None
    ) -> None:
        super().__init__(module, mesh, rules, options)
        self.calls = 0
        self._seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's result."""
        inputs = take_apart(self._signature, args, kwargs)
        program = self._program(inputs)
        random = Random(self._seed, self.calls).arguments() if program.draws else ()
        state = split(self._arrays.placed, program.changed)
        leaves, changed = program.compiled(*state, inputs.arrays(), random)
        self._arrays.placed.update(changed)
        self.calls += 1
        device = next((t.device for t in inputs.leaves if isinstance(t, torch.Tensor)), None)
        return program.outputs.rebuild([tensor_of(leaf, device=device) for leaf in leaves])

    def _compile(self, inputs: Inputs) -> ModuleProgram:
        specs = specs_of(self._rules, self._arrays.state, inputs.inputs, not self._programs)
        noted: list[Any] = []

        def forward(state: Any, leaves: Any, random: Any) -> Any:
            ran = run(self.module, call, state, inputs, leaves, key_of(random))
            tensors, outputs = split_result(ran.result)
            noted[:] = [outputs, ran.draws]
            return as_arrays(tensors), ran.changed

        traced = trace(forward, self._arrays.structs(), inputs.structs(), RANDOM)
        outputs, draws = noted
        changed = tuple(traced.results[1])

        def program(buffers: Any, state: Any, inputs: Any, random: Any) -> Any:
            return traced.call(buffers | state, inputs, random or NO_RANDOM)

        program.__name__ = type(self.module).__name__
        jitted = jit(
            program,
            mesh=self._mesh,
            in_specs=(*split(specs.tensors, changed), specs.inputs, None),
            donate_argnums=(0,),
            options=self._options,
        )
        compiled = jitted.compile(
            *split(self._arrays.known(), changed), inputs.structs(), RANDOM if draws else ()
        )
        for shardings in compiled.in_shardings[:2]:
            self._arrays.place(shardings)
        return ModuleProgram(compiled, changed, draws, outputs)
