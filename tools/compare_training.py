"""One training run three times: ours on a mesh, plain jax.jit on one device, PyTorch.

All start from the same weights and see the same batches, in float32. Ours is partitioned over the
mesh; jax.jit runs the same step on one device; PyTorch runs `transformers`' Llama with its own
AdamW (it needs the `peers` extra, and is left out without it). Prints the losses and how far apart
they are at most.

Example:
    tools/run compare_training --model quickstart --steps 200 --mesh data=4,model=2
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import app, flags

import spmd
from models.llama.config import CONFIGS, named_config
from models.training.data import source as data
from tools.training_peers import apart, losses

_MODEL = flags.DEFINE_enum("model", "quickstart", sorted(CONFIGS), "which Llama")
_MESH = flags.DEFINE_string("mesh", "data=4,model=2", "mesh of the partitioned run")
_STEPS = flags.DEFINE_integer("steps", 50, "steps")
_BATCH = flags.DEFINE_integer("batch", 8, "sequences of a step")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 64, "tokens of a sequence")


def main(argv: Sequence[str]) -> None:
    """Prints the losses of the three."""
    del argv
    config = named_config(_MODEL.value)
    axes = {name: int(size) for name, size in (p.split("=") for p in _MESH.value.split(","))}
    batches, _ = data.load_datasets(
        data.DataConfig(), seq_len=_SEQ_LEN.value, batch_size=_BATCH.value
    )
    found = losses(config, batches, _STEPS.value, spmd.make_mesh(**axes))
    print(f"{_MODEL.value}, {_BATCH.value} x {_SEQ_LEN.value}, {_MESH.value}\n")
    print(f"| step | {' | '.join(found)} |")
    print("| --- " * (len(found) + 1) + "|")
    for number in range(0, _STEPS.value, max(1, _STEPS.value // 10)):
        print(f"| {number + 1} | {' | '.join(f'{run[number]:.6f}' for run in found.values())} |")
    print(f"| {_STEPS.value} | {' | '.join(f'{run[-1]:.6f}' for run in found.values())} |\n")
    for other in list(found)[1:]:
        print(f"spmd and {other}: at most {apart(found, other):.2e} apart in {_STEPS.value} steps")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    app.run(main)
