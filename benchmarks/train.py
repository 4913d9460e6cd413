"""Tokens per second of a Llama training step: `spmd.jit` beside plain `jax.jit`, in one process.

Both get the same program but for attention, which composites leave to the compiler: the peer gets
the kernel that plain jax has (`--peer_attention`). Both get the same marks, parameters and
optimizer-state shardings; the peer's partitioner is XLA's own. Times are medians over `--steps`
steps after two warm-up steps, measured to the arrival of the loss.

Example:
    benchmarks/run train --model llama2-7b --meshes data=8,data=4:model=2 --seq_len 1024
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from models.llama import model, sharding
from models.llama.config import ATTENTIONS, LlamaConfig, named_config
from models.llama.training import Step, argument_types, train_step
from models.training.run.metrics import peak_flops
from spmd.cli.flags import Parser, Switch, positive, words


def parse_axes(text: str) -> dict[str, int]:
    """`data=4:model=2` as sizes of axes, 1 for an axis that is not there."""
    axes = {name: int(size) for name, size in (p.split("=") for p in text.split(":"))}
    return {"data": 1, "model": 1, **axes}


def parse_mesh(text: str) -> spmd.Mesh:
    """`data=4:model=2` as a mesh of the devices that are here."""
    return spmd.make_mesh(**parse_axes(text))


def time_steps(
    given: argparse.Namespace, step: Any, params: Any, state: Any, batch: Any
) -> tuple[float, float]:
    """Median seconds of a step, and the last loss."""
    times = []
    loss = 0.0
    for number in range(given.steps + 2):
        start = time.perf_counter()
        params, state, value = step(params, state, batch)
        loss = float(value)
        if number >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times), loss


def peer_step(
    given: argparse.Namespace,
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    mesh: spmd.Mesh,
) -> Step:
    """The step for plain `jax.jit`, with the attention that is best there."""
    fused = jax.devices()[0].platform == "gpu" and config.dtype in ("bfloat16", "float16")
    attention = given.peer_attention or ("cudnn" if fused else "einsum")
    config = dataclasses.replace(config, attention=attention)
    return train_step(config, optimizer, sharding.activation_marks(mesh, config))


def bench(given: argparse.Namespace, text: str) -> list[str]:
    """Rows of the table for one mesh."""
    mesh = parse_mesh(text)
    config = dataclasses.replace(
        named_config(given.model),
        dtype=jnp.dtype(given.dtype).name,
        scan_layers=given.scan,
        attention=given.attention,
        param_dtype=given.param_dtype,
        remat=given.remat,
    )
    if given.layers:
        config = dataclasses.replace(config, num_hidden_layers=given.layers)
    optimizer = getattr(optax, given.optimizer)(1e-4)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    shape = (given.global_batch, given.seq_len)
    types = argument_types(config, optimizer, mesh, shape)
    start = time.perf_counter()
    options = spmd.Options(unroll=given.unroll)
    compiled = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1), options=options).compile(*types)
    seconds = time.perf_counter() - start
    rows: list[tuple[str, Any, Any, float]] = [("spmd.jit", compiled, compiled.in_formats, seconds)]
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, shape).astype(np.int32)
    batch = jax.device_put({"inputs": tokens, "targets": tokens}, compiled.in_shardings[2])

    def fresh(placed: Any) -> tuple[Any, Any]:
        init = jax.jit(lambda key: model.init(key, config), out_shardings=placed[0])
        params = init(jax.random.key(0))
        return params, jax.jit(optimizer.init, out_shardings=placed[1])(params)

    if given.peer:
        start = time.perf_counter()
        plain = jax.jit(
            peer_step(given, config, optimizer, mesh),
            donate_argnums=(0, 1),
            in_shardings=compiled.in_shardings,
            out_shardings=(*compiled.in_shardings[:2], None),
        )
        params, state = fresh(compiled.in_shardings)
        peer = plain.lower(params, state, batch).compile()
        rows.append(("jax.jit", peer, compiled.in_shardings, time.perf_counter() - start))
        del params, state
    lines = []
    for name, program, placed, compile_seconds in rows:
        params, state = fresh(placed)
        seconds, loss = time_steps(given, program, params, state, batch)
        del params, state
        rate = shape[0] * shape[1] / seconds / mesh.size
        peak = peak_flops(jax.devices()[0].device_kind, config.dtype)
        mfu = config.flops_per_token(given.seq_len) * rate / peak if peak else float("nan")
        temp = program.memory_analysis() if hasattr(program, "memory_analysis") else None
        peak_bytes = (
            program.memory.peak_bytes
            if temp is None
            else temp.argument_size_in_bytes + temp.temp_size_in_bytes
        )
        lines.append(
            f"| {name} | {text} | {seconds * 1e3:.1f} | {rate:,.0f} | {mfu:.1%} | "
            f"{peak_bytes / 2**30:.1f} | {compile_seconds:.1f} | {loss:.4f} |"
        )
    return lines


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run train", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add(
        "--meshes",
        type=words,
        default="data=8",
        help="meshes, e.g. 'data=8' (axes joined by ':')",
    )
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    add("--seq_len", type=positive, default=1024, help="tokens in a sequence")
    add("--global_batch", type=positive, default=16, help="sequences in a step")
    add("--steps", type=positive, default=8, help="timed steps")
    add("--dtype", default="bfloat16", help="compute dtype")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--unroll", type=int, default=0, help="our compiler writes out loops of at most so many")
    add("--optimizer", choices=["adamw", "adafactor"], default="adamw", help="of optax")
    add("--param_dtype", default="float32", help="what parameters are stored in")
    add("--remat", default="none", help="activations to keep, as in scripts/train_llama.py")
    add("--peer", action=Switch, default=True, help="also run plain jax.jit")
    add("--attention", choices=ATTENTIONS, default="auto", help="attention of our program")
    add(
        "--peer_attention",
        choices=ATTENTIONS,
        help="of jax.jit's program (default: cudnn on GPUs with 16-bit floats, else einsum)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {len(jax.devices())} x {device.device_kind}")
    print(f"{given.model}, batch {given.global_batch} x {given.seq_len}, {given.dtype} on "
          f"{given.param_dtype}, {given.optimizer}, {'scanned' if given.scan else 'unrolled'}, "
          f"recomputed: {given.remat}")  # fmt: skip
    print("| program | mesh | ms/step | tokens/s/device | MFU | peak GiB | compile s | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for text in given.meshes:
        for line in bench(given, text):
            print(line, flush=True)


if __name__ == "__main__":
    main()
