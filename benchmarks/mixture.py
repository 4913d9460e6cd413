"""Milliseconds of a mixture of experts on one device: each implementation, forward and gradient.

`kernel` is what `spmd.jit` puts onto each device, `xla` the same function under `jax.jit`, whose
`ragged_dot` is XLA's. `dense` is an MLP of one expert's weights for as many rows as there are
choices: the same arithmetic, and nothing sorted. Routers are random, so that experts are chosen
about alike.

Example:
    benchmarks/run mixture --tokens 1024
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.attention import TIMES, compiled, timed_cells
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.ops import experts

IMPLEMENTATIONS = ("kernel", "xla", "dense")


class Sizes(NamedTuple):
    """Of a layer's mixture: width of a row, width inside an expert, experts, choices of a row."""

    hidden: int
    inner: int
    experts: int
    choices: int


MODELS = {"mixtral-8x7b": Sizes(4096, 14336, 8, 2), "qwen3-30b-a3b": Sizes(2048, 768, 128, 8)}


def functions(name: str) -> list[Callable[..., Any]]:
    """The mixture, and a loss of it with gradients, compiled on demand."""

    def forward(x: Any, gates: Any, chosen: Any, gate: Any, up: Any, down: Any) -> Any:
        if name != "dense":
            return experts(x, gates, chosen, gate, up, down)
        rows = jnp.repeat(x[0], gates.shape[-1], axis=0)
        hidden = jax.nn.silu(rows @ gate[0].T) * (rows @ up[0].T)
        return hidden @ down[0].T

    def loss(*args: Any) -> Any:
        return jnp.sum(forward(*args).astype(jnp.float32) ** 2)

    both = jax.value_and_grad(loss, (0, 1, 3, 4, 5))
    return compiled(forward, both, ours=name == "kernel")


def operands(sizes: Sizes, tokens: int) -> list[Any]:
    """Rows, gates, choices and weights."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    logits = jax.random.normal(next(keys), (1, tokens, sizes.experts))
    gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), sizes.choices)
    wide, narrow = (sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    shapes = ((1, tokens, sizes.hidden), *((sizes.experts, *s) for s in (wide, wide, narrow)))
    x, *weights = (jax.random.normal(next(keys), s, jnp.bfloat16) / s[-1] ** 0.5 for s in shapes)
    return [x, gates, chosen, *weights]


def row(given: argparse.Namespace, model: str, name: str) -> list[str]:
    """One line of the table."""
    sizes = MODELS[model]
    args = operands(sizes, given.tokens)
    product = 2 * given.tokens * sizes.choices * sizes.hidden * sizes.inner
    cells: list[str] = []
    # The backward pass has two products for each of the forward's; what it computes again, the
    # three of the forward pass, is its own affair.
    for run, products in zip(functions(name), (3, 9), strict=True):
        cells += timed_cells(given, run, args, products * product)
    return [model, str(given.tokens), name, *cells]


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run mixture", __doc__)
    add = parser.add_argument
    add("--tokens", type=positive, default=8192, help="of a batch")
    add("--steps", type=positive, default=10, help="timed runs, after two others")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, bfloat16")
    print_head(("layer", "tokens", "experts", *TIMES))
    for model in MODELS:
        for name in IMPLEMENTATIONS:
            print_line(row(given, model, name))
