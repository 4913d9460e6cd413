"""The same training run by three: ours on a mesh, plain jax.jit on one device, PyTorch."""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import spmd
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.step import train_step
from spmd.models.llama.weights.save import save

LEARNING_RATE, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.95), 1e-8

Batches = Callable[[int], dict[str, Any]]


def optimizer() -> optax.GradientTransformation:
    """What all three update with."""
    return optax.adamw(LEARNING_RATE, *BETAS, eps=EPSILON, weight_decay=DECAY)


def jax_losses(config: LlamaConfig, params: Any, batches: Batches, steps: int) -> Iterator[float]:
    """Of plain jax.jit on one device."""
    rule = optimizer()
    step = jax.jit(train_step(config, rule))
    state = rule.init(params)
    for number in range(steps):
        params, state, loss = step(params, state, batches(number))
        yield float(loss)


def spmd_losses(
    config: LlamaConfig, params: Any, batches: Batches, steps: int, mesh: spmd.Mesh
) -> Iterator[float]:
    """Of the same step, partitioned."""
    rule = optimizer()
    step = spmd.jit(train_step(config, rule, sharding.activation_marks(mesh, config)), mesh=mesh)
    params, state = sharding.mark_params(params, mesh, config), rule.init(params)
    for number in range(steps):
        batch = sharding.mark_batch(batches(number), mesh)
        params, state, loss = step(params, state, batch)
        yield float(loss)


def torch_losses(config: LlamaConfig, params: Any, batches: Batches, steps: int) -> Iterator[float]:
    """Of `transformers`' model and PyTorch's AdamW, on one CPU."""
    return torch_steps(torch_model(config, params), batches, steps)


def torch_steps(net: Any, batches: Batches, steps: int) -> Iterator[float]:
    """The losses of a model of `transformers`, which is trained in place."""
    import torch

    more = {"output_router_logits": True} if hasattr(net, "router_aux_loss_coef") else {}
    rule = torch.optim.AdamW(
        net.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY
    )
    for number in range(steps):
        batch = {name: torch.tensor(np.asarray(x)).long() for name, x in batches(number).items()}
        found = net(input_ids=batch["inputs"], **more)
        logits = found.logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten())
        if more:
            loss = loss + net.router_aux_loss_coef * found.aux_loss
        rule.zero_grad()
        loss.backward()
        rule.step()
        yield loss.item()


def torch_model(config: LlamaConfig, params: Any) -> Any:
    """`transformers`' model with our weights, as it reads them from what we write."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "hf"
        save(params, config, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def losses(
    config: LlamaConfig, batches: Batches, steps: int, mesh: spmd.Mesh
) -> dict[str, list[float]]:
    """Loss of every step, by who ran it."""
    params = fresh.init(jax.random.key(0), config)
    runs = {
        "spmd": spmd_losses(config, params, batches, steps, mesh),
        "jax": jax_losses(config, params, batches, steps),
    }
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        runs["torch"] = torch_losses(config, params, batches, steps)
    return {name: list(run) for name, run in runs.items()}


def apart(found: dict[str, list[float]], other: str) -> float:
    """The largest difference between our losses and another's."""
    return max(abs(a - b) for a, b in zip(found["spmd"], found[other], strict=True))
