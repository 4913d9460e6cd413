"""A Llama's training run: its compiled programs, and its state on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

import spmd
from models.llama import sharding
from models.llama.config import FLOP_CONVENTIONS, LlamaConfig
from models.llama.generate import generate, make_next_logits
from models.llama.model import init, init_keys, init_layer, init_outer, with_states
from models.llama.training import batch_loss
from models.training.data import source as data
from models.training.run.description import RunConfig
from models.training.run.loop import TrainState
from models.training.run.metrics import StepCost, peak_flops
from models.training.run.optimizer import initial_state, make_optimizer, make_schedule
from models.training.run.step import LossFn, batch_weight, make_train_step


class Dataset(Protocol):
    """Batches by step."""

    def __call__(self, step: int) -> Any:
        """The whole batch of a step, as numpy arrays."""

    def struct(self) -> Any:
        """Shapes and dtypes of a batch."""


class Trainer:
    """The compiled training step, with everything that belongs to it.

    Args:
        run: what was asked for; `run.model` is a `LlamaConfig`.
        mesh: where it runs.
        batch: structs of a batch.

    Attributes:
        step: the compiled training step: (params, opt_state, batch) -> (.., .., metrics).
    """

    def __init__(self, run: RunConfig, mesh: spmd.Mesh, batch: Any) -> None:
        self.run, self.mesh = run, mesh
        self.model: LlamaConfig = run.model
        self.optimizer = make_optimizer(run.optimizer)
        self._table = sharding.table_named(run.sharding)
        structs = _param_structs(self.model)
        self._params = sharding.mark_params(structs, mesh, self.model, self._table)
        self._batch = sharding.mark_batch(batch, mesh, self._table)
        step = make_train_step(
            self._loss(training=True),
            self.optimizer,
            microbatches=run.microbatches,
            on_nonfinite=run.on_nonfinite,
            schedule=make_schedule(run.optimizer),
        )
        self._init_optimizer = functools.partial(initial_state, self.optimizer)
        self._opt_state = jax.eval_shape(self._init_optimizer, self._params)
        jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1))
        self.step = jitted.compile(self._params, self._opt_state, self._batch)

    def _loss(self, *, training: bool) -> LossFn:
        """The loss; in training with what else is to become small."""
        marks = sharding.activation_marks(self.mesh, self.model, self._table)
        if training:
            return batch_loss(self.model, marks, self.run.z_loss)
        return batch_loss(dataclasses.replace(self.model, router_aux_loss_coef=0.0), marks)

    def fresh_state(self, params: Any = None, step: int = 0) -> TrainState:
        """Makes parameters and optimizer state shard by shard; none is ever whole on a device.

        Args:
            params: start from these parameters instead of fresh ones. They may lack states of 8-bit
                products; these are then added, and the arrays given up.
            step: number of steps that have been taken.
        """
        if params is None:
            key = jax.random.key(self.run.seed)
            params = init_params(self.model, key, self.step.in_formats[0])
        elif len(jax.tree.leaves(params)) < len(jax.tree.leaves(self._params)):
            add = functools.partial(with_states, config=self.model)
            make = jax.jit(add, out_shardings=self.step.in_formats[0], donate_argnums=0)
            params = make(params)
        return TrainState(params, self.step.init(1, self._init_optimizer, params), step)

    def targets(self) -> TrainState:
        """The state as structs with the shardings of the compiled step, to restore a checkpoint."""
        structs = (self._params, self._opt_state)
        shardings = self.step.in_shardings[:2]
        return TrainState(*jax.tree.map(_with_sharding, structs, tuple(shardings)))

    def place(self, batch: Any) -> Any:
        """Puts a batch of numpy arrays on the devices, in the shardings of the compiled step."""
        return data.place(batch, self.step.in_shardings[2])

    def cost(self) -> StepCost:
        """What a step processes, to turn seconds into rates."""
        run, device = self.run, self.mesh_device_kind()
        return StepCost(
            tokens=run.global_batch * run.seq_len,
            devices=self.mesh.size,
            flops_per_token={
                c: self.model.flops_per_token(run.seq_len, c) for c in FLOP_CONVENTIONS
            },
            peak_flops=peak_flops(device, self.model.dtype),
        )

    def mesh_device_kind(self) -> str:
        """The name of the devices' kind."""
        return str(jax.devices()[0].device_kind)

    def evaluation(self, dataset: Dataset, batches: int) -> Callable[[Any], float]:
        """Returns a function: parameters -> mean loss over the first `batches` of a data set.

        Its program is compiled at the first call.
        """

        @functools.cache
        def compiled() -> Any:
            loss = self._loss(training=False)

            def weighted(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
                return loss(params, batch), batch_weight(batch)

            # As the steps leave them: in other layouts they would be moved at each call.
            params = jax.tree.map(_with_sharding, self._params, self.step.in_formats[0])
            return spmd.jit(weighted, mesh=self.mesh).compile(params, self._batch)

        def evaluate(params: Any) -> float:
            shardings = compiled().in_shardings[1]
            results = [
                compiled()(params, data.place(dataset(step), shardings)) for step in range(batches)
            ]
            losses, weights = np.array(jax.device_get(results), np.float64).T
            return float(losses @ weights / weights.sum())

        return evaluate

    def sample_text(self, params: Any, prompt: str, tokens: int, tokenizer: data.Tokenizer) -> str:
        """The prompt with the model's continuation; characters that cannot be printed are replaced.

        Args:
            params: the model's parameters.
            prompt: the text to continue.
            tokens: how many tokens to add.
            tokenizer: of the model.
        """
        window = self.run.seq_len
        # Whole on every device, so that every process can read them.
        step = spmd.jit(make_next_logits(self.model), mesh=self.mesh, out_specs=(None,))
        next_logits = step.compile(params, np.zeros((1, window), np.int32), np.int32(0))
        ids = tokenizer.encode_batch([prompt])[0].tolist()
        added = generate(next_logits, params, ids, tokens=tokens, window=window, seed=self.run.seed)
        text = prompt + tokenizer.decode(added)
        return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def init_params(config: LlamaConfig, key: jax.Array, shardings: Any) -> Any:
    """Draws the parameters of `model.init`, each array shard by shard.

    Layers that are not stacked are made one after the other, so little more memory is needed than
    the parameters take. Layers with the same shardings share one small program.

    Args:
        config: the model.
        key: a `jax.random.key`.
        shardings: tree of the parameters' shardings, or formats.
    """
    if config.scan_layers:
        make = jax.jit(functools.partial(init, config=config), out_shardings=shardings)
        return make(key)
    outer_key, keys_L = init_keys(key, config)
    outer = {name: value for name, value in shardings.items() if name != "layers"}
    make_outer = functools.partial(init_outer, config=config)
    params = jax.jit(make_outer, out_shardings=outer)(outer_key)
    makers: dict[Any, Any] = {}
    params["layers"] = {}
    for index in range(config.num_hidden_layers):
        wanted = shardings["layers"][str(index)]
        # Compiling a program for each of, say, 126 equal layers would take minutes.
        alike = tuple(jax.tree.leaves(wanted))
        if alike not in makers:
            make_layer = functools.partial(init_layer, config=config)
            makers[alike] = jax.jit(make_layer, out_shardings=wanted)
        params["layers"][str(index)] = makers[alike](keys_L[index])
    return params


def _param_structs(config: LlamaConfig) -> Any:
    return jax.eval_shape(functools.partial(init, config=config), jax.random.key(0))


def _with_sharding(struct: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
