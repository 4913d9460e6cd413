"""One training run three times: ours on a mesh, plain jax.jit on one device, PyTorch.

All start from the same weights and see the same batches, in float32. Ours is partitioned over the
mesh; jax.jit runs the same step on one device; PyTorch runs `transformers`' Llama with its own
AdamW (it needs the `peers` extra, and is left out without it). Prints the losses and how far apart
they are at most.

Examples:
    tools/run compare_training --model quickstart --steps 200 --mesh data=4,model=2
    tools/run compare_training --model quickstart-experts --steps 100 --mesh data=2,expert=4
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import spmd
from benchmarks.llama_step import train_step
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.cli.specs import mesh_axes
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.weights.save import save
from spmd.models.training.data import source as data

LEARNING_RATE, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.95), 1e-8

Batches = Callable[[int], dict[str, Any]]


def optimizer() -> optax.GradientTransformation:
    """What all three update with."""
    return optax.adamw(LEARNING_RATE, *BETAS, eps=EPSILON, weight_decay=DECAY)


def jax_steps(step: Any, params: Any, batches: Batches, steps: int) -> Iterator[float]:
    """Of a compiled step of ours, or of jax."""
    state = optimizer().init(params)
    for number in range(steps):
        params, state, loss = step(params, state, batches(number))
        yield float(loss)


def torch_steps(net: Any, batches: Batches, steps: int) -> Iterator[float]:
    """Of a model of `transformers` and PyTorch's AdamW, on one CPU; it is trained in place."""
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
    params, marks = fresh.init(jax.random.key(0), config), sharding.activation_marks(mesh, config)
    marked = sharding.mark_params(params, mesh, config)
    ours, plain = train_step(config, optimizer(), marks), train_step(config, optimizer())
    runs = {
        "spmd": jax_steps(
            spmd.jit(ours, mesh=mesh), marked,
            lambda number: sharding.mark_batch(batches(number), mesh), steps,
        ),
        "jax": jax_steps(jax.jit(plain), params, batches, steps),
    }  # fmt: skip
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        runs["torch"] = torch_steps(torch_model(config, params), batches, steps)
    return {name: list(run) for name, run in runs.items()}


def apart(found: dict[str, list[float]], other: str) -> float:
    """The largest difference between our losses and another's."""
    return max(abs(a - b) for a, b in zip(found["spmd"], found[other], strict=True))


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run compare_training", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(CONFIGS), default="quickstart", help="which Llama")
    add("--mesh", type=mesh_axes, default="data=4,model=2", help="mesh of the partitioned run")
    add("--steps", type=positive, default=50, help="steps")
    add("--batch", type=positive, default=8, help="sequences of a step")
    add("--seq_len", type=positive, default=64, help="tokens of a sequence")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the losses of the three."""
    given = make_parser().parse_args(arguments)
    config = named_config(given.model)
    mesh = spmd.make_mesh(**given.mesh)
    batches, _ = data.load_datasets(
        data.DataConfig(), seq_len=given.seq_len, batch_size=given.batch
    )
    found = losses(config, batches, given.steps, mesh)
    print(f"{given.model}, {given.batch} x {given.seq_len}, {mesh}\n")
    print_head(("step", *found))
    for number in (*range(0, given.steps - 1, max(1, given.steps // 10)), given.steps - 1):
        print_line([str(number + 1), *(f"{run[number]:.6f}" for run in found.values())])
    print()
    for other in list(found)[1:]:
        print(f"spmd and {other}: at most {apart(found, other):.2e} apart in {given.steps} steps")
