"""The compiled programs of a training run, of any model, and its state on the mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

import spmd
from spmd.launch import Watch
from spmd.models.training.data.batches import Dataset
from spmd.models.training.data.loader import place
from spmd.models.training.run.loop import TrainState
from spmd.models.training.run.metrics import StepCost
from spmd.models.training.run.optimizer import (
    OptimizerConfig,
    initial_state,
    make_optimizer,
    make_schedule,
)
from spmd.models.training.run.stateful import check_trained, loss_alone
from spmd.models.training.run.step import LossFn, OnNonfinite, batch_weight, make_train_step

Marks = Mapping[str, Any] | Callable[[Any], Any]
"""Glob patterns over the paths of leaves -> specs, as `spmd.mark_tree` takes them; or a function:
tree of structs -> the same tree, marked."""


class TrainingProgram:
    """The compiled training step of a model, with everything that belongs to it.

    Args:
        init: key -> parameters, any tree, or a `Stateful`; traced, so that each device makes only
            its part.
        loss: (params, batch) -> mean loss, weighted by `batch["weights"]` if the batch has them; of
            a `Stateful` (mean loss, the next state).
        marks: of the parameters.
        batch: structs of a batch.
        batch_marks: of a batch.
        mesh: where it runs; its axes have any names.
        optimizer: which one, or one of optax.
        microbatches: number of parts that a batch is processed in, one after the other.
        on_nonfinite: what a loss, gradient or update that is not finite does.
        eval_loss: what an evaluation computes; `loss` if left out. A state that it returns is
            dropped.
        cost: what a step processes; its rows, if left out.

    Attributes:
        step: the compiled training step: (params, opt_state, batch) -> (.., .., metrics).
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
    ) -> None:
        self.mesh, self._init, self._eval_loss = mesh, init, eval_loss or loss
        structs = jax.eval_shape(init, jax.random.key(0))
        check_trained(structs)
        self._params = marked(structs, mesh, marks)
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
        )
        self._init_optimizer = functools.partial(initial_state, optimizer)
        self._opt_state = jax.eval_shape(self._init_optimizer, self._params)
        jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1))
        self.step = jitted.compile(self._params, self._opt_state, self._batch)
        rows = max(leaf.shape[0] for leaf in jax.tree.leaves(batch))
        self.cost = cost or StepCost(tokens=rows, devices=mesh.size, unit="rows")

    def make_params(self, key: jax.Array) -> Any:
        """Draws parameters, each array shard by shard."""
        return jax.jit(self._init, out_shardings=self.step.in_formats[0])(key)

    def fresh_state(self, params: Any = None, step: int = 0, *, seed: int = 0) -> TrainState:
        """Makes parameters and optimizer state shard by shard; none is ever whole on a device.

        Args:
            params: start from these parameters instead of fresh ones.
            seed: of fresh ones.
        """
        if params is None:
            params = self.make_params(jax.random.key(seed))
        return TrainState(params, self.step.init(1, self._init_optimizer, params), step)

    def targets(self) -> TrainState:
        """The state as structs with the shardings of the compiled step, to restore a checkpoint."""
        structs = (self._params, self._opt_state)
        shardings = self.step.in_shardings[:2]
        return TrainState(*jax.tree.map(_with_sharding, structs, tuple(shardings)))

    def place(self, batch: Any) -> Any:
        """Puts a batch of numpy arrays on the devices, in the shardings of the compiled step."""
        return place(batch, self.step.in_shardings[2])

    def evaluation(
        self, dataset: Dataset, batches: int, watch: Watch | None = None
    ) -> Callable[[Any], float]:
        """Returns a function: parameters -> mean loss over the first `batches` of a data set.

        Its program is compiled at the first call. `watch` gets a beat for each batch.
        """

        @functools.cache
        def compiled() -> Any:
            def weighted(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
                return loss_alone(self._eval_loss(params, batch)), batch_weight(batch)

            # As the steps leave them: in other layouts they would be moved at each call.
            params = jax.tree.map(_with_sharding, self._params, self.step.in_formats[0])
            return spmd.jit(weighted, mesh=self.mesh).compile(params, self._batch)

        def evaluate(params: Any) -> float:
            shardings = compiled().in_shardings[1]
            results = []
            for step in range(batches):
                results.append(compiled()(params, place(dataset(step), shardings)))
                if step:  # read one batch late: the devices have their next one by then
                    results[-2] = jax.device_get(results[-2])
                if watch is not None:
                    watch.beat(what=f"held-out batch {step}")
            losses, weights = np.array(jax.device_get(results), np.float64).T
            return float(losses @ weights / weights.sum())

        return evaluate


def marked(structs: Any, mesh: spmd.Mesh, marks: Marks) -> Any:
    """Structs with their marks."""
    return marks(structs) if callable(marks) else spmd.mark_tree(structs, mesh, marks)


def _with_sharding(struct: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
