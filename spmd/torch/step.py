"""`train_step`: one optimizer step of a torch module as one program on a mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from spmd.api import jit, path_name
from spmd.errors import ArgumentError, described
from spmd.options import Options
from spmd.torch.held import Held, ModuleProgram
from spmd.torch.inputs import Inputs, take_apart
from spmd.torch.optimizers import TorchOptimizer, optimizer_of
from spmd.torch.state import Rules, specs_of
from spmd.torch.tracing import NO_RANDOM, RANDOM, Random, key_of, loss_of, run, split, trace


def train_step(
    module: Any,
    loss: Callable[..., Any],
    optimizer: Any,
    mesh: Any,
    rules: Rules | None = None,
    *,
    seed: int = 0,
    options: Options | None = None,
) -> TrainStep:
    """Makes a training step of a torch module, a loss and an optimizer.

    Args:
      module: a `torch.nn.Module`, in training or evaluation mode; left unchanged. Parameters that
        do not require a gradient stay as they are.
      loss: `loss(module, *batch)` calls the module and returns a scalar tensor. A torch module
        instead, such as `torch.nn.CrossEntropyLoss()`, is called with the module's result and the
        last entry of the batch.
      optimizer: `torch.optim.SGD`, `Adam` or `AdamW` of the module's parameters, with parameter
        groups if need be; or an optimizer of optax.
      mesh: the mesh.
      rules: as for `shard`; inputs are called like the parameters of `loss`.
      seed: of random numbers, which differ from step to step.
      options: compile options.

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
    return TrainStep(module, loss, optimizer, mesh, rules or {}, seed, options)


class TrainStep(Held):
    """A training step that holds parameters, buffers and optimizer state on a mesh.

    It is compiled once for each structure, shape and dtype of batches, and for each mode of the
    module. The module's and the torch optimizer's own tensors stay as they are; the groups of the
    optimizer are read before each step, so a learning rate scheduler works on it as always.

    Attributes:
      module: as it was given.
      steps: how many steps were taken; random numbers depend on it and on `seed`.
      seed: of random numbers.
    """

    def __init__(
        self,
        module: Any,
        loss: Callable[..., Any],
        optimizer: Any,
        mesh: Any,
        rules: Rules,
        seed: int = 0,
        options: Options | None = None,
    ) -> None:
        super().__init__(module, mesh, rules, options)
        self.seed = seed
        self._loss, self._signature = _loss_function(module, loss)
        self._optimizer = optimizer_of(optimizer, self._arrays.state)
        self._initial, self.steps = self._optimizer.loaded()
        self._optimizer_state: Any = None

    def __call__(self, *batch: Any, **named: Any) -> jax.Array:
        """Takes a step.

        Returns:
          The loss before it: a scalar of jax, which is not waited for until `float(loss)`.
        """
        inputs = take_apart(self._signature, batch, named)
        program = self._program(inputs)
        trained, rest = split(self._arrays.placed, self._optimizer.trained)
        random = Random(self.seed, self.steps).arguments() if program.draws else ()
        params, self._optimizer_state, buffers, loss = program.compiled(
            trained,
            self._optimizer_state,
            *split(rest, program.changed),
            inputs.arrays(),
            random,
            self._optimizer.scalars(self.steps),
        )
        self._arrays.placed.update(params | buffers)
        self.steps += 1
        if isinstance(self._optimizer, TorchOptimizer):
            # What torch's schedulers look at, to warn of a step that was forgotten.
            self._optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]
        result: jax.Array = loss
        return result

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state on the mesh: {slot: {name: array}} of torch's, a pytree of optax's.

        Slots are torch's: `exp_avg`, `exp_avg_sq`, `momentum_buffer`.
        """
        _ = self.compiled  # there is none before
        return self._optimizer_state

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state as tensors of the CPU.

        Of a torch optimizer it is what its own `state_dict()` would be, and it can load it. What
        belongs to the step itself, its number and the seed, is under `spmd`.
        """
        _ = self.compiled  # there is none before
        own = self._optimizer.saved(self._optimizer_state, self.steps)
        return {**own, "spmd": {"seed": self.seed, "steps": self.steps}}

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `optimizer_state_dict` gave, or what a torch optimizer's `state_dict()` is.

        Raises:
          ArgumentError: it belongs to another optimizer.
        """
        try:
            self._optimizer.load(state_dict)
        except (KeyError, ValueError, AttributeError) as error:
            raise ArgumentError(
                "the optimizer's state dict does not fit",
                actual=str(error),
                fix="load what optimizer_state_dict() gave for the same module and optimizer",
            ) from error
        self._initial, self.steps = self._optimizer.loaded()
        ours = state_dict.get("spmd", {})
        self.seed, self.steps = ours.get("seed", self.seed), ours.get("steps", self.steps)
        if self._optimizer_state is not None:
            self._optimizer_state = _filled(self._optimizer_state, self._initial)

    def _more_key(self) -> Any:
        return self._optimizer.key

    def _compile(self, inputs: Inputs) -> ModuleProgram:
        optimizer = self._optimizer
        specs = specs_of(self._rules, self._arrays.state, inputs.inputs, not self._programs)
        draws: list[bool] = []

        def objective(params: Any, others: Any, leaves: Any, random: Any) -> Any:
            ran = run(self.module, self._loss, params | others, inputs, leaves, key_of(random))
            draws[:] = [ran.draws]
            return loss_of(ran.result), ran.changed

        traced = trace(
            jax.value_and_grad(objective, has_aux=True),
            *split(self._arrays.structs(), optimizer.trained),
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
            (loss, new), grads = traced.call(params, buffers | state, batch, random or NO_RANDOM)
            grads = {name: None if unused[name] else grad for name, grad in grads.items()}
            params, opt_state = optimizer.update(grads, opt_state, params, now)
            return params, opt_state, new, loss

        step.__name__ = f"{type(self.module).__name__} step"
        trained, rest = split(specs.tensors, optimizer.trained)
        jitted = jit(
            step,
            mesh=self._mesh,
            in_specs=(trained, None, *split(rest, changed), specs.inputs, None, None),
            donate_argnums=(0, 1, 2),
            options=self._options,
        )
        params, rest = split(self._arrays.known(), optimizer.trained)
        opt_state = self._optimizer_state
        if opt_state is None:
            opt_state = jax.eval_shape(optimizer.init, params)
        compiled = jitted.compile(
            params,
            opt_state,
            *split(rest, changed),
            inputs.structs(),
            RANDOM if draws[0] else (),
            optimizer.scalars(0),
        )
        params, _, buffers, state, *_ = compiled.in_shardings
        self._arrays.place(params | buffers | state)
        if self._optimizer_state is None:
            trained, _ = split(self._arrays.placed, optimizer.trained)
            own = compiled.init(1, optimizer.init, trained)
            self._optimizer_state = _filled(own, self._initial)
        return ModuleProgram(compiled, changed, draws[0])


def _filled(state: Any, arrays: Mapping[str, Any]) -> Any:
    """A pytree on the mesh with some leaves, given by path, replaced."""

    def new(path: Any, leaf: Any) -> Any:
        array = arrays.get(path_name(path))
        if array is None:
            return leaf
        if array.shape != leaf.shape:
            raise ArgumentError(
                f"optimizer state {path_name(path)!r} cannot be loaded",
                actual=described(array),
                required=described(leaf),
            )
        return jax.device_put(array.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(new, state)


def _loss_function(module: Any, loss: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A loss as a function of the module and a batch, and one with the batch's parameters alone."""
    if not callable(loss):
        raise ArgumentError(
            f"the loss is a {type(loss).__name__}",
            actual=described(loss),
            required="a function loss(module, *batch), or a torch module such as a criterion",
        )
    if not isinstance(loss, torch.nn.Module):
        return loss, _without_first(loss)

    def criterion(module: Any, *batch: Any, **named: Any) -> Any:
        *inputs, target = batch
        return loss(module(*inputs, **named), target)

    return criterion, module.forward


def _without_first(loss: Callable[..., Any]) -> Callable[..., Any]:
    def batch(*args: Any, **kwargs: Any) -> None: ...

    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return batch
    batch.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    return batch
