"""Tokens per second of a Llama training step: `spmd.jit` beside plain `jax.jit`, in one process.

Both get the same program but for attention, which composites leave to the compiler: the peer gets
the kernel that plain jax has (`--peer_attention`). Both get the same marks, parameters and
optimizer-state shardings; the peer's partitioner is XLA's own. Times are medians over `--steps`
steps after two warm-up steps, measured to the arrival of the loss.

Example:
    benchmarks/run train --model llama2-7b --meshes data=8,data=4:model=2 --seq_len 1024
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import spmd
from models.llama import model, sharding
from models.llama.config import ATTENTIONS, LlamaConfig, named_config
from models.llama.training import Step, argument_types, train_step
from models.training.run.metrics import peak_flops

_MODEL = flags.DEFINE_string("model", "quickstart", "named config")
_MESHES = flags.DEFINE_list("meshes", ["data=8"], "meshes, e.g. 'data=8' (axes joined by ':')")
_LAYERS = flags.DEFINE_integer("layers", 0, "overrides the number of layers; 0 keeps it")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "tokens in a sequence")
_BATCH = flags.DEFINE_integer("global_batch", 16, "sequences in a step")
_STEPS = flags.DEFINE_integer("steps", 8, "timed steps")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "compute dtype")
_SCAN = flags.DEFINE_bool("scan", True, "scan over layers, or unroll them")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adamw", ["adamw", "adafactor"], "of optax")
_PARAM_DTYPE = flags.DEFINE_string("param_dtype", "float32", "what parameters are stored in")
_REMAT = flags.DEFINE_string("remat", "none", "activations to keep, as in scripts/train_llama.py")
_PEER = flags.DEFINE_bool("peer", True, "also run plain jax.jit")
_ATTENTION = flags.DEFINE_enum("attention", "auto", ATTENTIONS, "attention of our program")
_PEER_ATTENTION = flags.DEFINE_enum(
    "peer_attention", None, ATTENTIONS,
    "attention of jax.jit's program; cudnn on GPUs with 16-bit floats when left out, else einsum",
)  # fmt: skip


def parse_mesh(text: str) -> spmd.Mesh:
    """`data=4:model=2` as a mesh."""
    axes = {name: int(size) for name, size in (p.split("=") for p in text.split(":"))}
    return spmd.make_mesh(**{"data": 1, "model": 1, **axes})


def time_steps(step: Any, params: Any, state: Any, batch: Any) -> tuple[float, float]:
    """Median seconds of a step, and the last loss."""
    times = []
    loss = 0.0
    for number in range(_STEPS.value + 2):
        start = time.perf_counter()
        params, state, value = step(params, state, batch)
        loss = float(value)
        if number >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times), loss


def peer_step(
    config: LlamaConfig, optimizer: optax.GradientTransformation, mesh: spmd.Mesh
) -> Step:
    """The step for plain `jax.jit`, with the attention that is best there."""
    fused = jax.devices()[0].platform == "gpu" and config.dtype in ("bfloat16", "float16")
    attention = _PEER_ATTENTION.value or ("cudnn" if fused else "einsum")
    config = dataclasses.replace(config, attention=attention)
    return train_step(config, optimizer, sharding.activation_marks(mesh, config))


def bench(text: str) -> list[str]:
    """Rows of the table for one mesh."""
    mesh = parse_mesh(text)
    config = dataclasses.replace(
        named_config(_MODEL.value),
        dtype=jnp.dtype(_DTYPE.value).name,
        scan_layers=_SCAN.value,
        attention=_ATTENTION.value,
        param_dtype=_PARAM_DTYPE.value,
        remat=_REMAT.value,
    )
    if _LAYERS.value:
        config = dataclasses.replace(config, num_hidden_layers=_LAYERS.value)
    optimizer = getattr(optax, _OPTIMIZER.value)(1e-4)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    shape = (_BATCH.value, _SEQ_LEN.value)
    types = argument_types(config, optimizer, mesh, shape)
    start = time.perf_counter()
    compiled = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1)).compile(*types)
    rows: list[tuple[str, Any, float]] = [("spmd.jit", compiled, time.perf_counter() - start)]
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, shape).astype(np.int32)
    batch = jax.device_put({"inputs": tokens, "targets": tokens}, compiled.in_shardings[2])

    def fresh() -> tuple[Any, Any]:
        params = compiled.init(0, lambda key: model.init(key, config), jax.random.key(0))
        return params, compiled.init(1, optimizer.init, params)

    if _PEER.value:
        start = time.perf_counter()
        plain = jax.jit(
            peer_step(config, optimizer, mesh),
            donate_argnums=(0, 1),
            in_shardings=compiled.in_shardings,
            out_shardings=(*compiled.in_shardings[:2], None),
        )
        params, state = fresh()
        peer = plain.lower(params, state, batch).compile()
        rows.append(("jax.jit", peer, time.perf_counter() - start))
        del params, state
    lines = []
    for name, program, compile_seconds in rows:
        params, state = fresh()
        seconds, loss = time_steps(program, params, state, batch)
        del params, state
        rate = shape[0] * shape[1] / seconds / mesh.size
        peak = peak_flops(jax.devices()[0].device_kind, config.dtype)
        mfu = config.flops_per_token(_SEQ_LEN.value) * rate / peak if peak else float("nan")
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


def main(argv: Sequence[str]) -> None:
    """Prints one table."""
    del argv
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {len(jax.devices())} x {device.device_kind}")
    print(f"{_MODEL.value}, batch {_BATCH.value} x {_SEQ_LEN.value}, {_DTYPE.value} on "
          f"{_PARAM_DTYPE.value}, {_OPTIMIZER.value}, {'scanned' if _SCAN.value else 'unrolled'}, "
          f"recomputed: {_REMAT.value}")  # fmt: skip
    print("| program | mesh | ms/step | tokens/s/device | MFU | peak GiB | compile s | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for text in _MESHES.value:
        for line in bench(text):
            print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
