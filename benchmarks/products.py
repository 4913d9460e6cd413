"""Microseconds of a layer's products with weights of several kinds, by the number of rows.

A layer is `--width` wide: queries, keys and values; the attention's output; gate and up; down.
`ours` is `spmd.ops.linears` under `spmd.jit`; the peer has plain bfloat16 weights under `jax.jit`,
which is cuBLAS on GPUs. The floor is the longer of two: reading the weights once, and the
arithmetic at the chip's measured speed in bfloat16 (of fp8 weights in fp8, where rows are many).

Example:
    benchmarks/run products --width 4096 --inner 11008 --rows 1,16,64,256,1024,4096
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.attention import milliseconds
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, numbers, positive, words
from spmd.mesh.topology import Topology
from spmd.models.llama.quantize import quantize_weight
from spmd.ops import linears
from spmd.ops.linear import EIGHT_BIT_ROWS

KINDS = ("bfloat16", "int8", "fp8", "int4")


def layer(x_BI: Any, weights: Sequence[Any]) -> Any:
    """The products of one layer, each from the results of the one before."""
    qkv, out, gate_up, down = weights
    heads = sum(linears(x_BI, qkv)) * 3**-0.5  # XLA would not compute what nothing uses
    gate, up = linears(linears(heads, out)[0], gate_up)
    return linears(gate * up, down)[0]


def make_weights(given: argparse.Namespace, kind: str) -> list[Any]:
    """Random weights of `--calls` layers, as `linears` takes them; no two in the same memory.

    So no product finds its weights in a cache of the chip.
    """
    rng = np.random.default_rng(0)

    def make(outputs: int, inputs: int) -> Any:
        plain = rng.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)
        made = plain if kind == "bfloat16" else quantize_weight(plain, kind)
        dtype = jnp.bfloat16 if kind == "bfloat16" else None
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), made)

    width, inner = given.width, given.inner
    one, wide = make(width, width), make(inner, width)
    whole = [[one, one, one], [one], [wide, wide], [make(width, inner)]]
    return [jax.tree.map(jnp.copy, whole) for _ in range(given.calls)]


def microseconds(given: argparse.Namespace, jit: Any, x_BI: Any, layers: Any) -> float:
    """Median time of a layer, in a program of several that wait for each other."""

    def calls(x: Any, layers: Any) -> Any:
        for weights in layers:
            x = layer(x, weights)
        return x

    return 1e3 * milliseconds(given, jit(calls), [x_BI, layers]) / int(given.calls)


def floor(given: argparse.Namespace, topology: Topology, kind: str, rows: int, size: int) -> float:
    """Microseconds that a layer takes at least: see above. `size` is of its weights, in bytes."""
    products = 4 * given.width**2 + 3 * given.width * given.inner
    eight = kind == "fp8" and rows >= EIGHT_BIT_ROWS
    busy = topology.arithmetic_seconds(2.0 * rows * products, "f8E4M3FN" if eight else "bf16")
    return 1e6 * max(size / topology.hbm_bandwidth, busy)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run products", __doc__)
    add = parser.add_argument
    add("--width", type=positive, default=4096, help="of a layer")
    add("--inner", type=positive, default=11008, help="of its MLP")
    add("--rows", type=numbers, default="1,16,64,256,1024,2048,8192", help="tokens of a step")
    add("--kinds", type=words, default=",".join(KINDS), help="of weights")
    add("--calls", type=positive, default=8, help="layers of one program")
    add("--steps", type=positive, default=10, help="timed programs, after two others")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    device = jax.devices()[0]
    topology = Topology.for_devices([device])
    mesh = spmd.make_mesh(devices=[device], x=1)
    print(f"jax {jax.__version__}, {device.device_kind}; {given.width} wide, {given.inner} inside")
    print_head(("weights", "rows", "ours, us", "floor, us", "bfloat16 under jax.jit, us", "ratio"))
    plain = make_weights(given, "bfloat16")
    rows_of = {
        n: jax.random.normal(jax.random.key(0), (n, given.width), jnp.bfloat16) for n in given.rows
    }
    peers = {rows: microseconds(given, jax.jit, x_BI, plain) for rows, x_BI in rows_of.items()}
    for kind in given.kinds:
        layers = plain if kind == "bfloat16" else make_weights(given, kind)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers[0]))
        for rows, x_BI in rows_of.items():
            ours = microseconds(given, lambda f: spmd.jit(f, mesh=mesh), x_BI, layers)
            least = floor(given, topology, kind, rows, size)
            peer = peers[rows]
            cells = (f"{ours:.0f}", f"{least:.0f}", f"{peer:.0f}", f"{ours / peer:.2f}")
            print_line([kind, str(rows), *cells])


if __name__ == "__main__":
    main()
