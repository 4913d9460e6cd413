"""Milliseconds of attention on one device: each implementation, forward and with the gradient.

`kernel` is what `spmd.jit` puts onto each device (cuDNN's or the splash kernel), `xla` the
reference in plain jax, `cudnn` jax's own wrapper of cuDNN. TFLOP/s count a causal mask as half.

Example:
    benchmarks/run attention --lengths 2048,4096,8192 --heads 32 --key_heads 8
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.measure.profile import run_steps
from spmd.ops import attention

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
    batch = max(1, given.tokens // length)
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.random.normal(key, (batch, length, heads, given.width), given.dtype)
        for key, heads in zip(keys, (given.heads, *(given.key_heads,) * 2), strict=True)
    ]
    segments = None
    if given.packed:
        ids = jnp.arange(length, dtype=jnp.int32) * 4 // length
        segments = jnp.broadcast_to(ids, (batch, length))
    product = batch * given.heads * length * length * given.width  # two FLOPs, of which half
    cells: list[str] = []
    for run, products in zip(functions(name, segments), (2, 7), strict=True):
        cells += timed_cells(given, run, args, products * product)
    return [name, f"{batch} x {length}", *cells]


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run attention", __doc__)
    add = parser.add_argument
    add("--lengths", type=words, default="2048,4096,8192", help="tokens in a sequence")
    add("--tokens", type=positive, default=16384, help="tokens of a batch: sequences times length")
    add("--heads", type=positive, default=32, help="query heads")
    add("--key_heads", type=positive, default=32, help="key heads")
    add("--width", type=positive, default=128, help="width of a head")
    add(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of tensors"
    )
    add("--packed", action=Switch, help="four documents in each sequence")
    add("--steps", type=positive, default=10, help="timed runs, after two others")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    if given.heads % given.key_heads:
        raise SystemExit(
            f"error: --heads {given.heads} is no multiple of --key_heads {given.key_heads}"
        )
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}; {given.heads} heads of {given.width}, "
          f"{given.key_heads} key heads, {given.dtype}, causal"
          f"{', packed' if given.packed else ''}")  # fmt: skip
    print_head(("attention", "batch", *TIMES))
    for length in map(int, given.lengths):
        for name in IMPLEMENTATIONS:
            if name != "cudnn" or device.platform == "gpu":
                print_line(row(given, name, length))
