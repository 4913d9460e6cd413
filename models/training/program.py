"""The compiled programs of a training run, of any model, and its state on the mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.launch import Watch
from spmd.models.training.checkpoints import tables
from spmd.models.training.data.loader import Dataset, place, structs_of
from spmd.models.training.errors import DataError
from spmd.models.training.run.audit import step_elsewhere
from spmd.models.training.run.balance import OFF, Balance
from spmd.models.training.run.frozen import Frozen
from spmd.models.training.run.loop import TrainState
from spmd.models.training.run.metrics import StepCost
from spmd.models.training.run.optimizer import (
    OptimizerConfig,
    initial_state,
    make_optimizer,
    make_schedule,
    weights_of,
    with_weights,
)
from spmd.models.training.run.stateful import check_trained, parts_of_loss
from spmd.models.training.run.step import (
    LossFn,
    OnNonfinite,
    TrainStep,
    batch_weight,
    make_train_step,
)

Marks = Mapping[str, Any] | Callable[[Any], Any]
"""Glob patterns over the paths of leaves -> specs, as `spmd.mark_tree` takes them; or a function:
tree of structs -> the same tree, marked."""


class TrainingProgram:
    """The compiled training step of a model, with everything that belongs to it.

    Args:
        init: key -> parameters, any tree, or a `Stateful`; traced, so that each device makes only
            its part.
        loss: a `LossFn`.
        marks: of the parameters.
        batch: structs of a batch; for others `at` compiles the step again.
        batch_marks: of a batch.
        mesh: where it runs; its axes have any names.
        optimizer: which one, or one of optax.
        microbatches: number of parts that a batch is processed in, one after the other.
        on_nonfinite: what a loss, gradient or update that is not finite does.
        eval_loss: what an evaluation computes; `loss` if left out. A state that it returns is
            dropped.
        cost: what a step processes; its rows, if left out.
        frozen: patterns over the paths of parameters that are not trained.
        offload_optimizer: whether the optimizer's state lies in the host's memory; each part of it
            is on the devices while it is updated.
        balance: as for `make_train_step`.

    Attributes:
        frozen: tells what is trained.
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        loss: LossFn,
        marks: Marks,
        batch: Any,
        batch_marks: Marks,
        *,
        mesh: spmd.Mesh,
        optimizer: OptimizerConfig | optax.GradientTransformation,
        microbatches: int = 1,
        on_nonfinite: OnNonfinite = "stop",
        eval_loss: LossFn | None = None,
        cost: StepCost | None = None,
        frozen: Sequence[str] = (),
        offload_optimizer: bool = False,
        balance: Balance = OFF,
    ) -> None:
        self.mesh, self._init, self._eval_loss = mesh, init, eval_loss or loss
        structs = jax.eval_shape(init, jax.random.key(0))
        self.frozen = Frozen(frozen, structs)
        check_trained(self.frozen.split(structs)[0])
        self._params = marked(structs, mesh, marks)
        self._batch_marks = batch_marks
        self._batch = marked(batch, mesh, batch_marks)
        schedule = None
        if isinstance(optimizer, OptimizerConfig):
            schedule, optimizer = make_schedule(optimizer), make_optimizer(optimizer)
        step = make_train_step(
            loss,
            optimizer,
            microbatches=microbatches,
            on_nonfinite=on_nonfinite,
            schedule=schedule,
            frozen=self.frozen,
            balance=balance,
        )
        self._balance = balance
        self._init_optimizer = lambda params: initial_state(
            optimizer, balance.split(self.frozen.split(params)[0])[0]
        )
        self._opt_state = jax.eval_shape(self._init_optimizer, self._params)
        if offload_optimizer:
            self._opt_state = jax.tree.map(functools.partial(in_host, mesh), self._opt_state)
        self._step = step
        self._jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1))
        self._steps: dict[Any, spmd.Compiled] = {}
        rows = max(_rows(batch))
        cost = cost or StepCost(tokens=rows, devices=mesh.size, unit="rows")
        self.cost = dataclasses.replace(cost, rows=rows)

    @functools.cached_property
    def step(self) -> spmd.Compiled:
        """The training step; compiled when it is asked for, as `task` plans without the devices."""
        return self._jitted.compile(self._params, self._opt_state, self._batch)

    def elsewhere(self) -> TrainStep:
        """The step once more, for devices in each other's places (see `audit.step_elsewhere`)."""
        return step_elsewhere(self._step, self.step)

    def task(self, dtype: str = "bf16", settings: Mapping[str, Any] | None = None) -> spmd.Task:
        """The step as `spmd.plan` takes it.

        Args:
            dtype, settings: as of `spmd.Task`.
        """
        args, cost = (self._params, self._opt_state, self._batch), self.cost
        flops = next(iter(cost.flops_per_token.values()), 0.0) * cost.tokens
        return spmd.Task(self._jitted, args, (), cost.tokens, flops, dtype, settings or {})

    def at(self, batch: Any, compiling: Callable[[int], Any] = contextlib.nullcontext) -> Any:
        """The step for such a batch, whose rows may be more or fewer than those of the first one.

        For each number of rows it is compiled once; the state lies as in `step`.

        Args:
            batch: arrays or structs.
            compiling: entered, with the number of rows, for as long as it is compiled.

        Raises:
            DataError: the batch differs from the first one in more than its rows.
        """
        rows = _rows(batch)
        if rows == _rows(self._batch):
            return self.step
        if rows not in self._steps:
            first, found = (
                {path: f"{x.dtype} {list(x.shape[1:])}" for path, x in tables.by_path(tree).items()}
                for tree in (self._batch, batch)
            )
            if found != first:
                raise DataError(
                    f"a later batch has rows of {found}, and the first one of {first}: batches may "
                    "differ in how many there are alone"
                )
            state = (self._params, self._opt_state)
            # As `step` leaves them: no step moves what another one has made.
            held = jax.tree.map(_with_sharding, state, tuple(self.step.in_formats[:2]))
            structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
            structs = marked(structs, self.mesh, self._batch_marks)
            with compiling(max(rows)):
                self._steps[rows] = self._jitted.compile(*held, structs)
        return self._steps[rows]

    def make_params(self, key: jax.Array) -> Any:
        """Draws parameters, each array shard by shard."""
        return jax.jit(self._init, out_shardings=self.step.in_formats[0])(key)

    def fresh_params(self, params: Any = None, *, seed: int = 0) -> Any:
        """Parameters to start from: those that are given, or drawn ones."""
        return self.make_params(jax.random.key(seed)) if params is None else params

    def fresh_state(self, params: Any = None, step: int = 0, *, seed: int = 0) -> TrainState:
        """Makes parameters and optimizer state shard by shard; none is ever whole on a device.

        Args:
            params: start from these parameters instead of fresh ones.
            seed: of fresh ones.
        """
        params = self.fresh_params(params, seed=seed)
        return TrainState(params, self.step.init(1, self._init_optimizer, params), step)

    def targets(self) -> TrainState:
        """The state as structs with the shardings of the compiled step, to restore a checkpoint.

        What is frozen is left out.
        """
        structs = (self._params, self._opt_state)
        shardings = self.step.in_shardings[:2]
        params, opt_state = jax.tree.map(_with_sharding, structs, tuple(shardings))
        return TrainState(self.trained(params), opt_state)

    def trained(self, params: Any) -> Any:
        """The parameters with None for those that are frozen: what checkpoints hold."""
        return self.frozen.split(params)[0]

    def eval_params(self, rule: Callable[[Any, Any], Any] | None) -> Callable[[TrainState], Any]:
        """Returns a function: a state -> its parameters, those that are trained as a rule has them.

        Args:
            rule: (what is trained, optimizer state) -> the same tree; None stands for what is not.
                Without a rule, all are as they are.
        """
        if rule is None:
            return lambda state: state.params
        balance, trained = self._balance, self.trained(self.step.in_formats[0])
        formats = weights_of(balance.split(trained)[0])
        compiled = jax.jit(rule, out_shardings=formats)

        def found(state: TrainState) -> Any:
            trained, kept = self.frozen.split(state.params)
            opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
            rest, biases = balance.split(trained)
            weights = compiled(weights_of(rest), opt_state)
            return self.frozen.merge(balance.merge(with_weights(rest, weights), biases), kept)

        return found

    def place(self, batch: Any) -> Any:
        """Puts a batch of numpy arrays on the devices, in the shardings of the compiled step."""
        return place(batch, self.step.in_shardings[2])

    def evaluation(
        self, dataset: Dataset, batches: int, watch: Watch | None = None
    ) -> Callable[[Any], dict[str, float]]:
        """Returns a function: parameters -> means over the first `batches` of a data set.

        They are the `loss`, and metrics that it returns beside it.

        Its program is compiled at the first call. `watch` gets a beat for each batch.
        """

        @functools.cache
        def compiled() -> Any:
            def weighted(params: Any, batch: Any) -> tuple[Any, jax.Array]:
                loss, _, metrics = parts_of_loss(self._eval_loss(params, batch), params)
                return {"loss": loss, **metrics}, batch_weight(batch)

            # As the steps leave them: in other layouts they would be moved at each call.
            params = jax.tree.map(_with_sharding, self._params, self.step.in_formats[0])
            batch = marked(structs_of(dataset), self.mesh, self._batch_marks)
            return spmd.jit(weighted, mesh=self.mesh).compile(params, batch)

        def evaluate(params: Any) -> dict[str, float]:
            shardings = compiled().in_shardings[1]
            results = []
            for step in range(batches):
                results.append(compiled()(params, place(dataset(step), shardings)))
                if step:  # read one batch late: the devices have their next one by then
                    results[-2] = jax.device_get(results[-2])
                if watch is not None:
                    watch.beat(what=f"held-out batch {step}")
            means, weights = zip(*jax.device_get(results), strict=True)
            shares = np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)
            return {name: float(shares @ [mean[name] for mean in means]) for name in means[0]}

        return evaluate


def marked(structs: Any, mesh: spmd.Mesh, marks: Marks) -> Any:
    """Structs with their marks."""
    return marks(structs) if callable(marks) else spmd.mark_tree(structs, mesh, marks)


def _rows(batch: Any) -> tuple[int, ...]:
    return tuple(leaf.shape[0] for leaf in jax.tree.leaves(batch))


def in_host(mesh: spmd.Mesh, struct: Any) -> jax.ShapeDtypeStruct:
    """The struct, in the host's memory, however it is split; numbers stay on the devices."""
    if not struct.shape:
        return struct  # type: ignore[no-any-return]
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(struct.shape))
    return _with_sharding(struct, NamedSharding(mesh, spec, memory_kind="pinned_host"))


def _with_sharding(struct: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
