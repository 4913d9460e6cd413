"""A Llama's compiled training step, its first parameters, and what it writes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import spmd
from models.llama import sharding
from models.llama.config import LlamaConfig
from models.llama.flops import FLOP_CONVENTIONS, flops_per_token
from models.llama.fresh import init, init_keys, init_layer, init_outer
from models.llama.generate import generate, make_next_logits
from models.llama.parameters import with_states
from models.llama.training import batch_loss
from models.training.data import source as data
from models.training.program import Program
from models.training.run.description import RunConfig
from models.training.run.loop import TrainState
from models.training.run.metrics import StepCost, peak_flops


class LlamaProgram(Program):
    """The compiled training step of a Llama.

    Args:
        run: what was asked for; `run.model` is a `LlamaConfig`.
        mesh: where it runs.
        batch: structs of a batch.
    """

    def __init__(self, run: RunConfig, mesh: spmd.Mesh, batch: Any) -> None:
        self.run = run
        self.model: LlamaConfig = run.model
        table = sharding.table_named(run.sharding)
        points = sharding.activation_marks(mesh, self.model, table)
        # Held-out losses are of texts alone.
        evaluated = dataclasses.replace(self.model, router_aux_loss_coef=0.0)
        super().__init__(
            functools.partial(init, config=self.model),
            batch_loss(self.model, points, run.z_loss),
            lambda structs: sharding.mark_params(structs, mesh, self.model, table),
            batch,
            lambda structs: sharding.mark_batch(structs, mesh, table),
            mesh=mesh,
            optimizer=run.optimizer.ending_at(run.options.steps),
            microbatches=run.options.microbatches,
            on_nonfinite=run.options.on_nonfinite,
            eval_loss=batch_loss(evaluated, points),
            cost=step_cost(run, mesh),
        )

    def make_params(self, key: jax.Array) -> Any:
        """Draws parameters, each array shard by shard and layer by layer."""
        return init_params(self.model, key, self.step.in_formats[0])

    def fresh_state(self, params: Any = None, step: int = 0, *, seed: int = 0) -> TrainState:
        """As `Program.fresh_state`.

        Parameters that are given may lack states of 8-bit products; these are then added, and the
        arrays given up.
        """
        if params is not None and len(jax.tree.leaves(params)) < len(jax.tree.leaves(self._params)):
            add = functools.partial(with_states, config=self.model)
            make = jax.jit(add, out_shardings=self.step.in_formats[0], donate_argnums=0)
            params = make(params)
        return super().fresh_state(params, step, seed=seed)


def sample_text(
    run: RunConfig,
    mesh: spmd.Mesh,
    params: Any,
    prompt: str,
    tokens: int,
    tokenizer: data.Tokenizer,
) -> str:
    """The prompt with the model's continuation; characters that cannot be printed are replaced.

    Args:
        run: says which model, how long a window it has, and the seed.
        mesh: where the parameters are.
        params: the model's parameters.
        prompt: the text to continue.
        tokens: how many tokens to add.
        tokenizer: of the model.
    """
    window = run.seq_len
    # Whole on every device, so that every process can read them.
    step = spmd.jit(make_next_logits(run.model), mesh=mesh, out_specs=(None,))
    next_logits = step.compile(params, np.zeros((1, window), np.int32), np.int32(0))
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    added = generate(next_logits, params, ids, tokens=tokens, window=window, seed=run.options.seed)
    text = prompt + tokenizer.decode(added)
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def init_params(config: LlamaConfig, key: jax.Array, shardings: Any) -> Any:
    """Draws the parameters of `fresh.init`, each array shard by shard.

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


def step_cost(run: RunConfig, mesh: spmd.Mesh) -> StepCost:
    """What a step processes, to turn seconds into rates."""
    model: LlamaConfig = run.model
    flops: dict[str, float] = {c: flops_per_token(model, run.seq_len, c) for c in FLOP_CONVENTIONS}
    return StepCost(
        tokens=run.global_batch * run.seq_len,
        devices=mesh.size,
        flops_per_token=flops,
        peak_flops=peak_flops(str(jax.devices()[0].device_kind), model.dtype),
    )
