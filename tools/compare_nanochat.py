"""examples/nanochat.py beside nanochat itself in PyTorch: the same weights and batches, the losses.

`--nanochat` is a checkout of karpathy/nanochat (of July 2026). Both train on one CPU device in
float32, on text that comes with Python, from the weights that the example makes, but without
matrices of zeros: with them the first gradients of scalars are rounding errors, of which AdamW
makes whole steps. In the second half learning rates fall to 0. Printed are losses of training steps
and of held-out batches. Status 1 if the last held-out losses differ by 1%.

Example:
    tools/run compare_nanochat --nanochat ~/nanochat --steps 500
"""

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pydoc_data import topics
from typing import Any

import jax
import numpy as np

from benchmarks.tables import print_head, print_line
from examples import nanochat as example
from spmd.cli.flags import Parser, positive

APART = 0.01

nanochat: Any = example  # an example has no types


def theirs(folder: str, params: Any, c: example.Config) -> tuple[Any, Any]:
    """Nanochat's model with our parameters, and its optimizer."""
    sys.path.insert(0, folder)
    os.environ.update(TORCHDYNAMO_DISABLE="1", NANOCHAT_DTYPE="float32")
    import torch

    gpt: Any = importlib.import_module("nanochat.gpt")
    config = gpt.GPTConfig(c.tokens, c.ids, c.layers, c.heads, c.heads, c.width, c.windows)
    with torch.device("cpu"):
        model = gpt.GPT(config)
        model.init_weights()
    names = {"q": "attn.c_q", "k": "attn.c_k", "v": "attn.c_v", "o": "attn.c_proj",
             "gate": "attn.ve_gate", "up": "mlp.c_fc", "down": "mlp.c_proj"}  # fmt: skip
    ours = {
        "transformer.wte.weight": params["embed"],
        "lm_head.weight": params["head"],
        "resid_lambdas": params["scale"],
        "x0_lambdas": params["first"],
        "smear_gate.weight": params["smear_gate"],
        "smear_lambda": params["smear"],
        "backout_lambda": params["backout"],
        **{f"value_embeds.{n}.weight": x for n, x in params["values"].items()},
        **{f"transformer.h.{n}.{names[name]}.weight": x
           for n, layer in enumerate(params["layers"]) for name, x in layer.items()},
    }  # fmt: skip
    model.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in ours.items()})
    return model, model.setup_optimizer()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains both, and prints a row for some steps."""
    parser = Parser("tools/run compare_nanochat", __doc__)
    parser.add_argument("--nanochat", required=True, help="a checkout of karpathy/nanochat")
    parser.add_argument("--steps", type=positive, default=500, help="of training")
    given = parser.parse_args(arguments)
    import torch

    c = nanochat.Config()
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    learned, held_out = np.split(text, [len(text) * 9 // 10])
    params = nanochat.init(jax.random.key(0), c)
    rng = np.random.default_rng(0)
    for layer in params["layers"]:
        layer |= {
            name: layer[name] + rng.normal(0, 0.02, layer[name].shape) for name in ("o", "down")
        }
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    model, optimizer = theirs(given.nanochat, params, c)
    step = jax.jit(functools.partial(nanochat.train_step, c=c), donate_argnums=(0, 1))
    loss_of = jax.jit(functools.partial(nanochat.loss_of, c=c))
    state = nanochat.start(params)

    def torch_loss(ids: Any, targets: Any) -> Any:
        return model(torch.tensor(ids).long(), torch.tensor(targets).long())

    print_head(("step", "ours", "nanochat", "held out: ours", "nanochat"))
    for number in range(given.steps):
        batch = nanochat.batch(number, learned, c)
        share = min(1.0, 2 * (1 - number / given.steps))  # down to 0 in the second half
        params, state, loss = step(params, state, *batch, share=share)
        for group in optimizer.param_groups:
            group["lr"] = share * group["initial_lr"]
        their_loss = torch_loss(*batch)
        optimizer.zero_grad()
        their_loss.backward()
        optimizer.step()
        if number + 1 in (1, 2, 5, 10, 20, 50) or (number + 1) % 100 == 0:
            batches = [nanochat.batch(1 << 20 | i, held_out, c) for i in range(4)]
            mine = float(np.mean([loss_of(params, *some) for some in batches]))
            with torch.no_grad():
                their = float(np.mean([torch_loss(*some).item() for some in batches]))
            cells = (float(loss), their_loss.item(), mine, their)
            print_line((str(number + 1), *(f"{x:.5f}" for x in cells)))
    sys.exit(abs(mine / their - 1) > APART)
