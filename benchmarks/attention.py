"""Milliseconds of attention on one device: each implementation, forward and with the gradient.

`kernel` is what `spmd.jit` puts onto each device (cuDNN's or the splash kernel), `xla` the
reference in plain jax, `cudnn` jax's own wrapper of cuDNN. TFLOP/s count a causal mask as half.

Example:
    benchmarks/run attention --lengths 2048,4096,8192 --heads 32 --key_heads 8
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import spmd
from spmd.ops import attention

_LENGTHS = flags.DEFINE_list("lengths", ["2048", "4096", "8192"], "tokens in a sequence")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "tokens of a batch: sequences times length")
_HEADS = flags.DEFINE_integer("heads", 32, "query heads", lower_bound=1)
_KEY_HEADS = flags.DEFINE_integer("key_heads", 32, "key heads", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 128, "width of a head", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "of tensors")
_PACKED = flags.DEFINE_bool("packed", False, "four documents in each sequence")
_STEPS = flags.DEFINE_integer("steps", 10, "timed runs, after two others", lower_bound=1)

IMPLEMENTATIONS = ("kernel", "xla", "cudnn")


def functions(name: str, segments: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Attention, and its loss with gradients, compiled on demand."""
    implementation: Any = "auto" if name == "kernel" else name

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, segment_ids=segments, implementation=implementation)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(forward(q, k, v).astype(jnp.float32))

    both = jax.value_and_grad(loss, (0, 1, 2))
    if name != "kernel":
        return jax.jit(forward), jax.jit(both)
    mesh = spmd.make_mesh(devices=jax.devices()[:1], x=1)
    return spmd.jit(forward, mesh=mesh), spmd.jit(both, mesh=mesh)


def milliseconds(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Median time of a run."""
    times = []
    for number in range(_STEPS.value + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        if number >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def row(name: str, length: int) -> str:
    """One line of the table."""
    batch = max(1, _TOKENS.value // length)
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.random.normal(key, (batch, length, heads, _WIDTH.value), _DTYPE.value)
        for key, heads in zip(keys, (_HEADS.value, *(_KEY_HEADS.value,) * 2), strict=True)
    ]
    segments = None
    if _PACKED.value:
        ids = jnp.arange(length, dtype=jnp.int32) * 4 // length
        segments = jnp.broadcast_to(ids, (batch, length))
    product = batch * _HEADS.value * length * length * _WIDTH.value  # two FLOPs, of which half
    cells = []
    for run, products in zip(functions(name, segments), (2, 7), strict=True):
        try:
            took = milliseconds(run, args)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            cells += [str(error).strip().splitlines()[0][:60], "-"]
        else:
            cells += [f"{took:.2f}", f"{products * product / took / 1e9:.0f}"]
    return f"| {name} | {batch} x {length} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> None:
    """Prints one table."""
    del argv
    if _HEADS.value % _KEY_HEADS.value:
        raise SystemExit(
            f"error: --heads {_HEADS.value} is no multiple of --key_heads {_KEY_HEADS.value}"
        )
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}; {_HEADS.value} heads of {_WIDTH.value}, "
          f"{_KEY_HEADS.value} key heads, {_DTYPE.value}, causal"
          f"{', packed' if _PACKED.value else ''}")  # fmt: skip
    print("| attention | batch | forward, ms | TFLOP/s | with gradient, ms | TFLOP/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in map(int, _LENGTHS.value):
        for name in IMPLEMENTATIONS:
            if name != "cudnn" or device.platform == "gpu":
                print(row(name, length), flush=True)


if __name__ == "__main__":
    app.run(main)
