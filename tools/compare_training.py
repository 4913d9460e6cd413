"""One training run three times: ours on a mesh, plain jax.jit on one device, PyTorch.

All start from the same weights and see the same batches, in float32. Ours is partitioned over the
mesh; jax.jit runs the same step on one device; PyTorch runs `transformers`' Llama with its own
AdamW (it needs the `peers` extra, and is left out without it). Prints the losses and how far apart
they are at most.

Examples:
    tools/run compare_training --model quickstart --steps 200 --mesh data=4,model=2
    tools/run compare_training --model quickstart-experts --steps 100 --mesh data=2,expert=4
"""

import os
from collections.abc import Sequence

import spmd
from spmd.cli.flags import Parser, positive
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.training.data import source as data
from tools.training_peers import apart, losses


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run compare_training", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(CONFIGS), default="quickstart", help="which Llama")
    add("--mesh", default="data=4,model=2", help="mesh of the partitioned run")
    add("--steps", type=positive, default=50, help="steps")
    add("--batch", type=positive, default=8, help="sequences of a step")
    add("--seq_len", type=positive, default=64, help="tokens of a sequence")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the losses of the three."""
    given = make_parser().parse_args(arguments)
    config = named_config(given.model)
    axes = {name: int(size) for name, size in (p.split("=") for p in given.mesh.split(","))}
    batches, _ = data.load_datasets(
        data.DataConfig(), seq_len=given.seq_len, batch_size=given.batch
    )
    found = losses(config, batches, given.steps, spmd.make_mesh(**axes))
    print(f"{given.model}, {given.batch} x {given.seq_len}, {given.mesh}\n")
    print(f"| step | {' | '.join(found)} |")
    print("| --- " * (len(found) + 1) + "|")
    for number in range(0, given.steps, max(1, given.steps // 10)):
        print(f"| {number + 1} | {' | '.join(f'{run[number]:.6f}' for run in found.values())} |")
    print(f"| {given.steps} | {' | '.join(f'{run[-1]:.6f}' for run in found.values())} |\n")
    for other in list(found)[1:]:
        print(f"spmd and {other}: at most {apart(found, other):.2e} apart in {given.steps} steps")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
