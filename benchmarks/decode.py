"""Milliseconds of a step in which all slots decode, beside what reading weights and cache takes.

A Llama with random weights, tensor parallel over `--model_axis` devices; every slot holds
`--context` tokens, in pages anywhere. With `--chunk` so many tokens of one more prompt are run
beside them. The floor is weight bytes (all but the embedding table; of experts what so many rows
choose by chance) and cached bytes of one device over `--bandwidth`. A call makes one token of each
slot; `--ahead` more are under way when the host reads the tokens of one, as in the engine. With
`--adapters 0,8` steps without room for low-rank adapters stand beside those in which each slot has
one of eight.

Example:
    benchmarks/run decode --model llama2-7b --batches 1,64,256 --quantize none,int8
    benchmarks/run decode --model llama2-7b --batches 64 --context 512 --chunk 192
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.compiled_ahead import model_of
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, positive, words
from spmd.models import decode
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.quantize import QUANTIZATIONS, quantized_types
from spmd.serving.bundle.memory import compile_bundle
from spmd.serving.engine.backend import Limits, SlotPart
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.language_backend import info
from spmd.serving.language_bundle import contract

WARM_UP = 2
"""Calls that are not timed."""


def random_weights(types: Any, shardings: Any, config: LlamaConfig) -> Any:
    """Weights without meaning, made where they lie; zeros would be read as fast."""

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def make(key: Any, shape: Any, dtype: Any, sharding: Any) -> Any:
        bits = jax.random.bits(key, shape, jnp.uint8)
        if jnp.issubdtype(dtype, jnp.integer):
            made = bits.astype(dtype)
        else:
            made = (bits.astype(jnp.float32) / 128 - 1).astype(dtype) * config.initializer_range
            made = made.astype(dtype)
        return jax.lax.with_sharding_constraint(made, sharding)

    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(types))))
    return jax.tree.map(
        lambda x, place: make(next(keys), x.shape, x.dtype, place), types, shardings
    )


def timed(given: argparse.Namespace, backend: ModelBackend, batch: int) -> float:
    """Median seconds from one step's tokens on the host to the next one's."""
    limits = backend.limits
    order = np.random.default_rng(0).permutation(limits.pages).reshape(limits.slots, -1).tolist()
    pages = [tuple(of_slot) for of_slot in order]
    beside = []
    if given.chunk:
        chunk = tuple(i % limits.vocab_size for i in range(given.chunk))
        beside = [SlotPart(batch, given.context - given.chunk, chunk, pages[batch], True)]
    count = limits.adapters
    under_way: collections.deque[Any] = collections.deque()
    times = []
    calls = given.tokens + WARM_UP
    first = given.context - calls - given.ahead
    for position in range(first, given.context):
        # Texts that begin with other tokens go on with others, and take other experts.
        begins = [(n % limits.vocab_size,) if position == first else None for n in range(batch)]
        decoding = [
            SlotPart(slot, position, tokens, pages[slot], True)
            for slot, tokens in enumerate(begins)
        ]
        parts = [*decoding, *beside]
        if count:
            parts = [part._replace(adapter=part.slot % count) for part in parts]
        under_way.append(backend.step(parts, alternatives=False))
        if len(under_way) > given.ahead:
            under_way.popleft()()
            times.append(time.perf_counter())
    return statistics.median(np.diff(times[WARM_UP - 1 :]))


def row(
    given: argparse.Namespace, config: LlamaConfig, quantize: str, adapters: int, batch: int
) -> list[str]:
    """A row of the table."""
    slots, rows = batch + (given.chunk > 0), batch + given.chunk
    shape = decode.ServingShape(
        slots, given.context, (rows,), (given.context,), given.page, cache_dtype=given.cache_dtype,
        adapters=adapters,
    )  # fmt: skip
    pages = slots * shape.pages_of_slot
    types = quantized_types(config, quantize)
    functions, state, specs, primary = decode.functions(LlamaRows(config), shape, types)
    (function,) = (function for function in functions if function.name == primary)
    mesh = spmd.make_mesh(data=1, model=given.model_axis, devices=jax.devices()[: given.model_axis])
    start = time.perf_counter()
    bundle = compile_bundle(
        [function],
        mesh,
        weights=types,
        make_weights=functools.partial(random_weights, types, config=config),
        specs=specs,
        state=state,
        primary=primary,
        symbols={decode.PAGES: pages},
        contract=contract(LlamaRows(config), shape, dataclasses.asdict(config)),
    )
    compile_seconds = time.perf_counter() - start
    facts = info(bundle)
    read = facts["read_weight_bytes"] + facts["token_bytes"] * slots * given.context
    if config.num_experts:
        unread = (1 - config.num_experts_per_tok / config.num_experts) ** rows
        experts = (x.nbytes for path, x in bundle.weights.items() if "/experts/" in path)
        read -= unread * sum(experts) / given.model_axis
    limits = Limits(
        slots, given.context, (rows,), 1, given.page, pages, shape.top_logprobs, config.vocab_size,
        adapters=adapters,
    )  # fmt: skip

    seconds, least = timed(given, ModelBackend(bundle, limits), batch), read / given.bandwidth
    cells = [
        quantize,
        given.cache_dtype,
        f"{adapters}",
        f"{batch}",
        f"{given.chunk}",
        f"{given.model_axis}",
    ]
    cells += [f"{seconds * 1e3:.2f}", f"{least * 1e3:.2f}", f"{seconds / least:.2f}"]
    return [*cells, f"{least / seconds:.0%}", f"{batch / seconds:,.0f}", f"{compile_seconds:.0f}"]


HEADER = (
    "weights", "cache", "adapters", "batch", "chunk", "devices", "ms/step", "floor, ms", "x floor",
    "roofline", "tokens/s", "compile s",
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run decode", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    add("--model_axis", type=positive, default=1, help="devices that share a layer")
    add("--batches", type=words, default="1", help="slots, all of them in use")
    add("--context", type=positive, default=1024, help="tokens that each slot holds in the end")
    add("--page", type=positive, default=64, help="tokens of a page")
    add("--chunk", type=int, default=0, help="tokens of a prompt that are run beside all slots")
    add("--quantize", type=words, default="none", help="of " + ", ".join(QUANTIZATIONS))
    add("--adapters", type=words, default="0", help="places for low-rank ones of rank 16; 0: none")
    add("--cache_dtype", default="bfloat16", help="of keys and values")
    add("--dtype", default="bfloat16", help="of activations, and weights not quantized")
    add("--ahead", type=int, default=1, help="calls that are issued before the last one is read")
    add("--tokens", type=positive, default=60, help="timed steps")
    add("--bandwidth", type=float, default=4.3e12, help="bytes a second that a device copies")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    if given.context % given.page:
        sys.exit(f"error: --context {given.context} is no multiple of --page {given.page}")
    if max(given.tokens + WARM_UP + given.ahead, given.chunk) > given.context:
        sys.exit(f"error: --tokens and --chunk have to fit into --context {given.context}")
    dtype = jnp.dtype(given.dtype).name
    config = model_of(given.model, given.layers, scan_layers=False, dtype=dtype, param_dtype=dtype)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {given.model_axis} x {device.device_kind}; {given.model}, "
          f"context {given.context}, greedy")  # fmt: skip
    cases = itertools.product(
        given.quantize, *(map(int, x) for x in (given.adapters, given.batches))
    )
    print_table(HEADER, (row(given, config, *case) for case in cases))
