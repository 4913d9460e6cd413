"""Losses of a Llama whose projections are multiplied in 8-bit floats, beside those in `--dtype`.

Both runs have the same parameters to start from, the same batches and the same optimizer, that of
`scripts/train_llama.py`. Without `--data` they read the Python standard library; the tokenizer is
`bytes`. The default model has 113 million parameters.

Example:
    benchmarks/run fp8 --mesh data=1 --steps 2000
    benchmarks/run fp8 --mesh data=2 --data '/usr/lib/python3/**/*.py' --global_batch 32
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

import spmd
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.cli.specs import mesh_axes
from spmd.models.llama.config import DTYPES, MATMULS, LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.llama.program import LlamaProgram
from spmd.models.training.data import source as data
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OptimizerConfig, default_learning_rate

HEAD = """\
| step | {} | fp8 | difference |
| --- | --- | --- | --- |"""

LAST = 100
"""The final losses are means over so many steps."""


def config_of(given: argparse.Namespace) -> LlamaConfig:
    """The model, but for what its products are in."""
    model = named_config("quickstart")
    return dataclasses.replace(
        model,
        hidden_size=given.hidden_size,
        intermediate_size=4 * given.hidden_size,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.hidden_size // 64),
        num_key_value_heads=None,
        initializer_range=0.02,
        scan_layers=given.scan,
        dtype=given.dtype,
    )


def losses(given: argparse.Namespace, matmul: str) -> tuple[list[float], float]:
    """The loss of every step, and the median seconds of one."""
    model = dataclasses.replace(config_of(given), matmul=matmul)
    rate = given.learning_rate or default_learning_rate("adamw", model.parameter_count())
    run = RunConfig(
        model=model,
        optimizer=OptimizerConfig(name="adamw", learning_rate=rate),
        options=TrainerOptions(steps=given.steps),
        mesh=given.mesh,
        seq_len=given.seq_len,
        global_batch=given.global_batch,
        data=given.data,
    )
    text, _ = data.load_datasets(
        data.DataConfig(run.data, run.tokenizer, run.packing),
        seq_len=run.seq_len,
        batch_size=run.global_batch,
        vocab_size=model.vocab_size,
    )
    trainer = LlamaProgram(run, spmd.make_mesh(**given.mesh), text.struct())
    state = trainer.fresh_state()
    params, opt_state = state.params, state.opt_state
    arrays, seconds = [], []
    for step in range(given.steps):
        batch = trainer.place(text(step))
        start = time.perf_counter()
        params, opt_state, metrics = trainer.step(params, opt_state, batch)
        arrays.append(metrics["loss"])
        jax.block_until_ready(metrics["loss"])
        seconds.append(time.perf_counter() - start)
    return [float(loss) for loss in jax.device_get(arrays)], statistics.median(seconds)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run fp8", __doc__)
    add = parser.add_argument
    add("--mesh", type=mesh_axes, default="data=1", help="mesh axes and their sizes")
    add("--hidden_size", type=positive, default=768, help="width; a head has 64 of it")
    add("--layers", type=positive, default=12, help="decoder layers")
    add("--scan", action=Switch, default=False, help="run the layers in a scan")
    add("--dtype", choices=DTYPES, default="bfloat16", help="what both compute in")
    add("--data", type=words, default=(), help="files, directories or glob patterns of text")
    add("--seq_len", type=positive, default=512, help="tokens of a sequence")
    add("--global_batch", type=positive, default=16, help="sequences of a step")
    add("--steps", type=positive, default=2000, help="steps of each run")
    add("--every", type=positive, default=100, help="steps between two lines")
    add("--learning_rate", type=float, help="at its peak (default: by model size)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains twice, and prints a table."""
    given = make_parser().parse_args(arguments)
    print(f"{config_of(given).parameter_count():,} parameters on {jax.devices()[0].device_kind}")
    found = {matmul: losses(given, matmul) for matmul in MATMULS}
    (want, plain), (got, fast) = (found[matmul] for matmul in MATMULS)
    print(HEAD.format(given.dtype))
    for step in range(0, given.steps, given.every):
        print(row(str(step + 1), want[step], got[step]))
    print(row(f"mean of the last {min(LAST, given.steps)}", *map(final, (want, got))))
    print(f"{given.dtype} {plain * 1e3:.1f} ms a step, fp8 {fast * 1e3:.1f} ms")


def final(run: Sequence[float]) -> float:
    """The mean of a run's last losses."""
    return float(np.mean(run[-LAST:]))


def row(name: str, want: float, got: float) -> str:
    """A line of the table."""
    return f"| {name} | {want:.4f} | {got:.4f} | {got / want - 1:+.2%} |"


if __name__ == "__main__":
    main()
