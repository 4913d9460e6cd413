"""Microseconds of attention over a cache in pages, on one device.

Every slot has `--context` positions. `pages` is `paged_attention` of one row of each slot, `pages,
chunk` has a chunk of one more slot beside them. Calls follow each other in one program. Bytes are
those of the keys and values that rows see, once for each slot. `--prompts` measures whole prompts
instead, one in each call, beside cuDNN's causal attention of as many tokens (GPUs only).

Example:
    benchmarks/run paged --slots 64 --context 512 --key_heads 8 --groups 4
    benchmarks/run paged --slots 64 --context 512 --chunk 448 --dtype int8
    benchmarks/run paged --prompts 512,2048,8192,32768 --calls 4
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.attention import milliseconds
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.cli.flags import numbers as numbers_of
from spmd.ops import paged_attention


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Random numbers of a dtype, made on the device."""
    if dtype == "int8":
        return jax.random.randint(jax.random.key(seed), shape, -127, 128, jnp.int8)
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def paged_case(given: argparse.Namespace, chunk: int) -> tuple[Any, list[Any]]:
    """Queries, and the other operands of `paged_attention`; pages lie in random order."""
    slots = given.slots + (chunk > 0)
    rows, most = given.slots + chunk, -(-max(given.context, chunk) // given.page)
    order = np.random.default_rng(0).permutation(slots * most).astype(np.int32)
    counts = np.asarray([1] * given.slots + [chunk] * (chunk > 0))
    last = np.full(given.slots, given.context - 1)
    end = max(given.context, chunk)
    positions = np.concatenate([last, np.arange(end - chunk, end)]).astype(np.int32)
    shape = (1, slots * most, given.page, given.key_heads, 2, given.width)
    q = numbers((1, rows, given.key_heads, given.groups, given.width), given.compute)
    operands = [
        numbers(shape, given.dtype, 1),
        jnp.asarray(order.reshape(1, slots, most)),
        jnp.asarray(np.repeat(np.arange(slots), counts)[None].astype(np.int32)),
        jnp.asarray(positions[None]),
        jnp.asarray(np.cumsum([0, *counts])[None].astype(np.int32)),
    ]
    scales = [jnp.full(shape[:-1], 0.01)] if given.dtype == "int8" else []
    return q, operands + scales


def microseconds(given: argparse.Namespace, call: Callable[..., Any], case: Any) -> float:
    """Median time of a call, in a program of several that wait for each other."""
    q, operands = case

    def calls(q: Any, *operands: Any) -> Any:
        for _ in range(given.calls):  # as a model's layers, which share the tables
            q = call(q, *operands)
        return q

    mesh = spmd.make_mesh(devices=jax.devices()[:1], x=1)
    run = jax.jit(calls) if call is cudnn else spmd.jit(calls, mesh=mesh).compile(q, *operands)
    return 1e3 * milliseconds(given, run, [q, *operands]) / int(given.calls)


def paged(q: Any, pool: Any, *rest: Any) -> Any:
    """`paged_attention`, with scales behind the tables."""
    return paged_attention(q, pool, *rest[:4], scales=rest[4] if rest[4:] else None)


def prompt(given: argparse.Namespace, length: int) -> tuple[Any, list[Any]]:
    """As `paged_case`: one slot with all rows of a prompt."""
    own = argparse.Namespace(**{**vars(given), "slots": 0, "context": length})
    return paged_case(own, length)


def cudnn(q: Any, key: Any, value: Any) -> Any:
    """Returns cuDNN's causal attention (1, R, K, G, D) of keys and values (1, R, K, D)."""
    heads = jax.nn.dot_product_attention(
        q.reshape(*q.shape[:2], -1, q.shape[-1]), key, value, is_causal=True, implementation="cudnn"
    )
    return heads.reshape(q.shape)


def print_prompts(given: argparse.Namespace) -> None:
    """Prints milliseconds and TFLOP/s by length, ours and cuDNN's."""
    print_head(("tokens", "ms", "TFLOP/s", "cuDNN, ms", "TFLOP/s"))
    for length in given.prompts:
        q, operands = prompt(given, length)
        kv = [numbers((1, length, given.key_heads, given.width), given.compute, i) for i in (2, 3)]
        cells = [str(length)]
        for call, case in ((paged, (q, operands)), (cudnn, (q, kv))):
            took = microseconds(given, call, case) / 1e3
            # Two products of each token with all before it: half of the square.
            flops = 2.0 * length**2 * given.key_heads * given.groups * given.width
            cells += [f"{took:.3f}", f"{flops / took / 1e9:.0f}"]
        print_line(cells)


def row(given: argparse.Namespace, name: str, took: float, positions: int) -> list[str]:
    """One line of the table."""
    item = 1 + 4 / given.width if given.dtype == "int8" else jnp.dtype(given.dtype).itemsize
    read = positions * given.key_heads * 2 * given.width * item
    return [name, f"{took:.1f}", f"{read / 1e6:.1f}", f"{read / took / 1e3:.0f}"]


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run paged", __doc__)
    add = parser.add_argument
    add("--slots", type=positive, default=64, help="slots that decode")
    add("--context", type=positive, default=512, help="positions of each")
    add("--chunk", type=int, default=0, help="rows of one more slot's prompt, beside them")
    add("--prompts", type=numbers_of, help="lengths of whole prompts, instead of all that")
    add("--key_heads", type=positive, default=8, help="key heads")
    add("--groups", type=positive, default=4, help="query heads of a key head")
    add("--width", type=positive, default=128, help="width of a head")
    add("--page", type=positive, default=64, help="positions of a page")
    add("--dtype", choices=["bfloat16", "float32", "int8"], default="bfloat16", help="of the cache")
    add("--compute", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of queries")
    add("--calls", type=positive, default=16, help="calls of one program")
    add("--steps", type=positive, default=10, help="timed programs, after two others")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {given.slots} slots of "
          f"{given.context}, {given.key_heads} x {given.groups} heads of {given.width}, "
          f"pages of {given.page}, {given.dtype}")  # fmt: skip
    if given.prompts:
        print_prompts(given)
        return
    print_head(("cache", "us a call", "MB", "GB/s"))
    positions = given.slots * given.context
    took = microseconds(given, paged, paged_case(given, 0))
    print_line(row(given, "pages", took, positions))
    if given.chunk:
        took = microseconds(given, paged, paged_case(given, given.chunk))
        print_line(row(given, "pages, chunk", took, positions + max(given.context, given.chunk)))


if __name__ == "__main__":
    main()
