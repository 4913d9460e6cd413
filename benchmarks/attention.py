"""Milliseconds of attention on one device: each implementation, forward and with the gradient.

`kernel` is what `spmd.jit` puts onto each device (cuDNN's or the splash kernel), `xla` the
reference in plain jax, `cudnn` jax's own wrapper of cuDNN. Tensors are bfloat16, masks causal.
TFLOP/s count the mask as half.

Example:
    benchmarks/run attention --packed
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive
from spmd.measure.profile import run_steps
from spmd.ops import attention

HEADS, WIDTH = 32, 128
LENGTHS, TOKENS = (2048, 4096, 8192), 16384  # of a sequence, and of a batch
IMPLEMENTATIONS = ("kernel", "xla", "cudnn")
TIMES = ("forward, ms", "TFLOP/s", "with gradient, ms", "TFLOP/s")


def compiled(*fns: Callable[..., Any], ours: bool) -> list[Callable[..., Any]]:
    """Functions for one device, compiled on demand: by us, or by `jax.jit`."""
    if not ours:
        return [jax.jit(fn) for fn in fns]
    mesh = spmd.make_mesh(devices=jax.devices()[:1], x=1)
    return [spmd.jit(fn, mesh=mesh) for fn in fns]


def functions(name: str, segments: Any) -> list[Callable[..., Any]]:
    """Attention, and its loss with gradients, compiled on demand."""
    implementation: Any = "auto" if name == "kernel" else name

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, segment_ids=segments, implementation=implementation)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(forward(q, k, v).astype(jnp.float32))

    both = jax.value_and_grad(loss, (0, 1, 2))
    return compiled(forward, both, ours=name == "kernel")


TOGETHER = 4
"""Runs that are timed together: the host's part of one is no part of the device's time."""


def milliseconds(given: argparse.Namespace, run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Median time of a run, of several that are issued before the first one is done."""

    def several(_: Any) -> None:
        jax.block_until_ready([run(*args) for _ in range(TOGETHER)])

    return 1e3 * run_steps(several, lambda: None, given.steps, 0).seconds / TOGETHER


def timed_cells(
    given: argparse.Namespace, run: Callable[..., Any], args: Sequence[Any], flops: float
) -> list[str]:
    """Milliseconds and TFLOP/s, or why there are none."""
    try:
        took = milliseconds(given, run, args)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return [str(error).strip().splitlines()[0][:60], "-"]
    return [f"{took:.2f}", f"{flops / took / 1e9:.0f}"]


def row(given: argparse.Namespace, name: str, length: int) -> list[str]:
    """One line of the table."""
    batch = TOKENS // length
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, HEADS, WIDTH)
    args = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    segments = None
    if given.packed:
        ids = jnp.arange(length, dtype=jnp.int32) * 4 // length
        segments = jnp.broadcast_to(ids, (batch, length))
    product = batch * HEADS * length * length * WIDTH  # two FLOPs, of which half
    cells: list[str] = []
    for run, products in zip(functions(name, segments), (2, 7), strict=True):
        cells += timed_cells(given, run, args, products * product)
    return [name, f"{batch} x {length}", *cells]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = Parser("benchmarks/run attention", __doc__)
    parser.add_argument("--packed", action=Switch, help="four documents in each sequence")
    parser.add_argument("--steps", type=positive, default=10, help="timed runs, after two others")
    given = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}{', packed' if given.packed else ''}")
    print_head(("attention", "batch", *TIMES))
    for length in LENGTHS:
        for name in IMPLEMENTATIONS:
            if name != "cudnn" or device.platform == "gpu":
                print_line(row(given, name, length))
