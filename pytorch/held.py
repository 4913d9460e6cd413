"""Torch modules on a mesh: `Sharded` is called like a module, `TrainStep` trains one."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import call
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from spmd.api import Compiled, jit, path_name
from spmd.errors import ArgumentError, described
from spmd.mesh.spec import as_mesh
from spmd.options import Options
from spmd.torch import arrays, tracing
from spmd.torch.arrays import Inputs, Rules, array_of, specs_of, take_apart, tensor_of
from spmd.torch.optimizers import TorchOptimizer, optimizer_of
from spmd.torch.tracing import split

RANDOM = tracing.random_arguments(0, 0)


class ModuleProgram(NamedTuple):
    """A module's compiled program, and the names of the buffers that it changes (`changed`).

    `outputs(tensors)` makes the result of a forward pass of its tensors, None for a training step.
    `written` has `slot/parameter` of the torch optimizer's arrays that a training step writes.
    """

    compiled: Compiled
    changed: tuple[str, ...]
    outputs: Any = None
    written: frozenset[str] = frozenset()


class Held:
    """The base of `Sharded` and `TrainStep`: a module's tensors on a mesh and compiled programs."""

    _optimizer: Any = None  # of a `TrainStep`

    def __init__(
        self, module: Any, mesh: Any, rules: Rules | None, seed: int, options: Options | None
    ) -> None:
        self._state = state = arrays.state_of(module)
        # Each is a torch tensor until a program says how it lies, then an array on the mesh.
        self._held: dict[str, Any] = dict(state.tensors)
        # The type of each inside a program, with the sharding of those on the mesh.
        self._structs = {n: arrays.struct_of(t, f"{n!r}") for n, t in state.tensors.items()}
        as_mesh(mesh)
        self.module = module
        self.seed = seed
        self._mesh, self._rules, self._options = mesh, rules or {}, options
        self._signature: Callable[..., Any] = module.forward  # its parameters name the inputs
        self._programs: dict[Any, ModuleProgram] = {}
        self._last: ModuleProgram | None = None

    @property
    def compiled(self) -> Compiled:
        """The program used last, with `explain()` and so on; ArgumentError if there is none."""
        if self._last is None:
            raise ArgumentError(
                "nothing is compiled yet", fix="call it with inputs first, or .compile(...)"
            )
        return self._last.compiled

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Returns the program for inputs like these, not run; puts all tensors onto the mesh."""
        return self._program(take_apart(self._signature, args, kwargs)).compiled

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The parameters on the mesh by torch's names; tied ones once, by the first name.

        A step donates these arrays: read them again after it. ArgumentError before compilation.
        """
        return self._on_mesh(self._state.parameters)

    @property
    def buffers(self) -> dict[str, jax.Array]:
        """The buffers on the mesh, by torch's names; ArgumentError if nothing is compiled yet."""
        return self._on_mesh(self._state.buffers)

    def state_dict(self) -> dict[str, Any]:
        """Returns present tensors as `module.state_dict()` does; those from the mesh on the CPU."""
        aliases, own = self._state.aliases, self._state.tensors
        tensors = {
            name: held.detach().clone()
            if isinstance(held, torch.Tensor)
            else tensor_of(held, dtype=own[name].dtype)
            for name, held in self._held.items()
        }
        # Tied names share one. What a module adds by get_extra_state is its own.
        return {
            name: tensors[aliases[name]] if name in aliases else extra
            for name, extra in self.module.state_dict(keep_vars=True).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces parameters and buffers, all or none; their shardings stay as before.

        What a part of the module adds by `get_extra_state` goes to its `set_extra_state`.
        ArgumentError if a name is missing or unknown, or a tensor has another shape.
        """
        aliases, known = self._state.aliases, self.module.state_dict(keep_vars=True)
        unknown = [name for name in state_dict if name not in aliases and name not in known]
        missing = [name for name in known if name in aliases and name not in state_dict]
        if unknown or missing:
            raise ArgumentError(
                "the state dict has other names than the module",
                actual=f"unknown {', '.join(unknown) or 'none'}; "
                f"missing {', '.join(missing) or 'none'}",
                fix="load it into the module first if it may differ, with strict=False",
            )
        new = {}
        for name, given in state_dict.items():
            if name not in aliases:
                continue
            first = aliases[name]
            own, held = self._state.tensors[first], self._held[first]
            if not isinstance(given, torch.Tensor) or given.shape != own.shape:
                raise ArgumentError(
                    f"{name!r} cannot be loaded",
                    actual=described(given),
                    required=described(own),
                    fix="load the state dict of the same module",
                )
            tensor = given.detach().to(own.dtype)
            if isinstance(held, torch.Tensor):
                new[first] = tensor.clone()
            else:
                new[first] = jax.device_put(array_of(tensor, f"{name!r}"), held.sharding)
        self._held |= new
        for name in state_dict.keys() - aliases.keys():
            self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(state_dict[name])
            self._programs.clear()  # it may be a constant of them

    def _on_mesh(self, names: Iterable[str]) -> dict[str, jax.Array]:
        _ = self.compiled  # only a program says how they lie
        return {name: self._held[name] for name in names}

    def _place(self, shardings: Mapping[str, Any]) -> None:
        """Puts tensors onto the mesh that are not there yet, by `shardings`: name -> sharding."""
        for name, sharding in shardings.items():
            if isinstance(tensor := self._held[name], torch.Tensor):
                self._held[name] = jax.device_put(array_of(tensor, f"{name!r}"), sharding)
                self._structs[name] = self._structs[name].update(sharding=sharding)

    def _program(self, inputs: Inputs) -> ModuleProgram:
        """Returns the program for such inputs and the module's mode; compiles it at first use."""
        mode = tuple(part.training for part in self.module.modules())
        key = inputs.key, mode, self._optimizer and self._optimizer.key
        if key not in self._programs:
            specs = specs_of(self._rules, self._state, inputs.numbers, check=not self._programs)
            self._programs[key] = self._compile(inputs, *specs)
        self._last = self._programs[key]
        return self._last

    def _compile(self, inputs: Inputs, specs: Any, given: Any) -> ModuleProgram:
        raise NotImplementedError


# A module's forward pass.


def shard(
    module: Any,
    mesh: Any,
    rules: Rules | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    seed: int = 0,
    options: Options | None = None,
) -> "Sharded":
    """Returns a torch module on a mesh: its tensors are split, its forward pass is compiled.

    Args:
      module: a `torch.nn.Module`. It is traced as it is, in training or evaluation mode, and left
        unchanged; its tensors are copied onto the mesh.
      mesh: a mesh of spmd or jax.
      rules: torch's name of a parameter, buffer or input, or a glob of names (`*` also matches
        dots), or the number of a positional input -> its spec, as for `mark_sharding`. The first
        key that matches counts. The compiler decides what no key matches.
      example_inputs: positional inputs, or keyword inputs as a mapping; if given, the module is
        compiled for them at once, else at the first call.
      seed: the seed of random numbers, which differ from call to call.
      options: `spmd.Options`.

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
    sharded = Sharded(module, mesh, rules, seed, options)
    if isinstance(example_inputs, Mapping):
        sharded.compile(**example_inputs)
    elif len(example_inputs):
        sharded.compile(*example_inputs)
    return sharded


class Sharded(Held):
    """A torch module on a mesh: called with tensors or arrays, it returns tensors.

    A program is compiled for each structure, shape and dtype of inputs, each value of inputs that
    are no tensors (constants of the program), and each mode (`module.train()`, `module.eval()`).
    Buffers that a call changes are updated.

    Attributes:
      module: the module that was given. Its own tensors never change.
      seed: the seed of random numbers.
      calls: the number of calls so far; random numbers depend on it and on `seed`.
    """

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's result, tensors on the first given tensor's device (else CPU)."""
        inputs = take_apart(self._signature, args, kwargs)
        program = self._program(inputs)
        random = tracing.random_arguments(self.seed, self.calls)
        state = split(self._held, program.changed)
        leaves, changed = program.compiled(*state, inputs.arrays(), random)
        self._held |= changed
        self.calls += 1
        device = next((t.device for t in inputs.leaves if isinstance(t, torch.Tensor)), None)
        return program.outputs([tensor_of(leaf, device=device) for leaf in leaves])

    def _compile(self, inputs: Inputs, specs: Any, given: Any) -> ModuleProgram:
        noted: list[Any] = []

        def forward(state: Any, leaves: Any, random: Any) -> Any:
            ran = tracing.run(self.module, call, state, inputs, leaves, tracing.key_of(random))
            tensors, outputs = arrays.split_result(ran.result)
            noted[:] = [outputs]
            return tracing.as_arrays(tensors), ran.changed

        traced = tracing.trace(forward, self._structs, inputs.structs(), RANDOM)
        (outputs,) = noted
        changed = tuple(traced.results[1])

        def program(buffers: Any, state: Any, inputs: Any, random: Any) -> Any:
            return traced.call(buffers | state, inputs, random)

        program.__name__ = type(self.module).__name__
        jitted = jit(
            program,
            mesh=self._mesh,
            in_specs=(*split(specs, changed), given, None),
            donate_argnums=(0,),
            options=self._options,
        )
        compiled = jitted.compile(*split(self._structs, changed), inputs.structs(), RANDOM)
        for shardings in compiled.in_shardings[:2]:
            self._place(shardings)
        return ModuleProgram(compiled, changed, outputs)


# A training step.


def train_step(
    module: Any,
    loss: Callable[..., Any],
    optimizer: Any,
    mesh: Any,
    rules: Rules | None = None,
    *,
    seed: int = 0,
    options: Options | None = None,
) -> "TrainStep":
    """Returns a function of a batch that does one step of training a torch module on a mesh.

    Args:
      module: a `torch.nn.Module`, in training or evaluation mode; left unchanged. Parameters that
        do not require a gradient stay as they are.
      loss: `loss(module, *batch)` calls the module and returns a scalar tensor. A torch module
        instead, such as `torch.nn.CrossEntropyLoss()`, is called with the module's result and the
        last entry of the batch.
      optimizer: `torch.optim.SGD`, `Adam` or `AdamW` of the module's parameters, with parameter
        groups if need be; or an optimizer of optax.
      mesh: a mesh of spmd or jax.
      rules: as for `shard`; inputs have the names of the parameters of `loss`.
      seed: the seed of random numbers, which differ from step to step.
      options: `spmd.Options`.

    Returns:
      An object to call with a batch; see `TrainStep`.

    Raises:
      ArgumentError: an optimizer that is not known, or has parameters of another module.

    Example:
      >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
      >>> step = spmd.torch.train_step(model, loss, optimizer, mesh, {"*.weight": ("data",)})
      >>> print(float(step(x, y)))
      >>> model.load_state_dict(step.state_dict())
    """
    return TrainStep(module, loss, optimizer, mesh, rules, seed, options)


class TrainStep(Held):
    """One step of training, called with a batch; parameters and optimizer state are on a mesh.

    A program is compiled for each structure, shape and dtype of batches, and for each mode of the
    module. A step does not change the module's and the torch optimizer's own tensors. It reads the
    optimizer's groups, so a learning rate scheduler works on the optimizer as always.

    Attributes:
      module: the module that was given.
      steps: the number of steps so far; random numbers depend on it and on `seed`.
      seed: the seed of random numbers.
    """

    def __init__(self, module: Any, loss: Any, optimizer: Any, *more: Any) -> None:
        super().__init__(module, *more)
        self._loss, self._signature = _loss_function(module, loss)
        self._optimizer = optimizer_of(optimizer, self._state)
        self._initial, self.steps = self._optimizer.load(None)
        self._optimizer_state: Any = None

    def __call__(self, *batch: Any, **named: Any) -> jax.Array:
        """Updates parameters, buffers and optimizer state by one step on this batch.

        Returns the loss before the update, a jax scalar; nothing blocks until it is read.
        """
        inputs = take_apart(self._signature, batch, named)
        program = self._program(inputs)
        trained, rest = split(self._held, self._optimizer.trained)
        params, self._optimizer_state, buffers, loss = program.compiled(
            trained,
            self._optimizer_state,
            *split(rest, program.changed),
            inputs.arrays(),
            tracing.random_arguments(self.seed, self.steps),
            self._optimizer.scalars(self.steps),
        )
        self._held |= params | buffers
        self.steps += 1
        self._optimizer.filled |= program.written
        if isinstance(self._optimizer, TorchOptimizer):
            # What torch's schedulers look at, to warn of a step that was forgotten.
            self._optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]
        result: jax.Array = loss
        return result

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state on the mesh: {slot: {parameter: array}}, or optax's pytree.

        Slots are torch's: `exp_avg`, `momentum_buffer`, ... ArgumentError before compilation.
        """
        _ = self.compiled  # there is none before
        return self._optimizer_state

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state as tensors on the CPU.

        For torch it is like the optimizer's own `state_dict()`, and that can load it; for optax
        {"state": {path: tensor}}. Its entry `spmd` has the step's `seed` and number of `steps`.
        """
        _ = self.compiled  # there is none before
        own = self._optimizer.saved(self._optimizer_state, self.steps)
        return {**own, "spmd": {"seed": self.seed, "steps": self.steps}}

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `optimizer_state_dict` returned, or a torch optimizer's own `state_dict()`.

        A torch optimizer that was given itself loads it, too; `seed` and `steps` are set.
        ArgumentError if the state is of another optimizer.
        """
        try:
            self._initial, self.steps = self._optimizer.load(state_dict)
        except (KeyError, ValueError, AttributeError) as error:
            raise ArgumentError(
                "the optimizer's state dict does not fit",
                actual=str(error),
                fix="load what .optimizer_state_dict() gave for the same module and optimizer",
            ) from error
        ours = state_dict.get("spmd", {})
        self.seed, self.steps = ours.get("seed", self.seed), ours.get("steps", self.steps)
        if self._optimizer_state is not None:
            self._optimizer_state = self._first_state(self.compiled, self._initial)

    def _first_state(self, compiled: Compiled, known: Mapping[str, Any]) -> Any:
        """Returns the initial optimizer state, with `known` (path -> array) in place of its own."""

        def filled(path: Any, leaf: Any) -> Any:
            array = known.get(path_name(path))
            if array is None:
                return leaf
            if array.shape != leaf.shape:
                raise ArgumentError(
                    f"optimizer state {path_name(path)!r} cannot be loaded",
                    actual=described(array),
                    required=described(leaf),
                )
            return jax.device_put(array.astype(leaf.dtype), leaf.sharding)

        trained, _ = split(self._held, self._optimizer.trained)
        state = compiled.init(1, self._optimizer.init, trained)
        return jax.tree_util.tree_map_with_path(filled, state)

    def _compile(self, inputs: Inputs, specs: Any, given: Any) -> ModuleProgram:
        optimizer = self._optimizer

        def objective(params: Any, others: Any, leaves: Any, random: Any) -> Any:
            ran = tracing.run(
                self.module, self._loss, params | others, inputs, leaves, tracing.key_of(random)
            )
            value = ran.result.jax() if hasattr(ran.result, "jax") else None
            if value is None or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
                raise ArgumentError(
                    "the loss is no number to minimize",
                    actual=described(ran.result if value is None else value),
                    required="one float that the parameters decide",
                    fix="return a scalar tensor, as in torch.nn.functional.mse_loss(model(x), y)",
                )
            return value, ran.changed

        traced = tracing.trace(
            jax.value_and_grad(objective, has_aux=True),
            *split(self._structs, optimizer.trained),
            inputs.structs(),
            RANDOM,
        )
        changed, unused = tuple(traced.results[0][1]), traced.is_zero[1]
        if all(unused.values()):
            raise ArgumentError(
                "the loss depends on no parameter that the optimizer trains",
                actual=f"{len(optimizer.trained)} parameters require a gradient and are the "
                "optimizer's",
                fix="let the loss call the module that it is given, and not under torch.no_grad()",
            )

        def step(
            params: Any, opt_state: Any, buffers: Any, state: Any, batch: Any, random: Any, now: Any
        ) -> Any:
            (loss, new), grads = traced.call(params, buffers | state, batch, random)
            grads = {name: None if unused[name] else grad for name, grad in grads.items()}
            params, opt_state = optimizer.update(grads, opt_state, params, now)
            return params, opt_state, new, loss

        step.__name__ = f"{type(self.module).__name__} step"
        trained, rest = split(specs, optimizer.trained)
        jitted = jit(
            step,
            mesh=self._mesh,
            in_specs=(trained, None, *split(rest, changed), given, None, None),
            donate_argnums=(0, 1, 2),
            options=self._options,
        )
        params, rest = split(self._structs, optimizer.trained)
        opt_state, old = jax.eval_shape(optimizer.init, params), self._optimizer_state
        leaves = jax.tree_util.tree_leaves_with_path(old)
        known = self._initial if old is None else {path_name(p): leaf for p, leaf in leaves}
        same: Any = jax.tree.structure(old)
        if same == jax.tree.structure(opt_state):
            opt_state = old
        compiled = jitted.compile(
            params, opt_state, *split(rest, changed), inputs.structs(), RANDOM, optimizer.scalars(0)
        )
        params, _, buffers, state, *_ = compiled.in_shardings
        self._place(params | buffers | state)
        if opt_state is not old:  # there is none yet, or not of all that the groups ask for now
            self._optimizer_state = self._first_state(compiled, known)
        return ModuleProgram(compiled, changed, written=frozenset(optimizer.written))


def _loss_function(module: Any, loss: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns (loss as a function of (module, *batch), function whose parameters name batches)."""
    if not callable(loss):
        raise ArgumentError(
            f"the loss is a {type(loss).__name__}",
            actual=described(loss),
            required="a function loss(module, *batch), or a torch module such as a criterion",
        )
    if isinstance(loss, torch.nn.Module):

        def criterion(module: Any, *batch: Any, **named: Any) -> Any:
            *inputs, target = batch
            return loss(module(*inputs, **named), target)

        return criterion, module.forward

    return loss, functools.partial(loss, module)  # without its first parameter
