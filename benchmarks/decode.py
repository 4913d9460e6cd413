"""Milliseconds of a decode step, beside what reading weights and cache takes at least.

A Llama with random weights, tensor parallel over `--model_axis` devices; every slot holds
`--context` tokens. The floor is weight bytes (all but the embedding table) and cached bytes of one
device over `--bandwidth`. A call makes `--steps_per_call` tokens in a loop on the device, as
serving does between two looks for ends of sequences; `--ahead` more are under way when the host
reads the tokens of one.

Example:
    benchmarks/run decode --model llama2-7b --batches 1,64,256 --quantize none,int8
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from models.function import Function
from models.llama import decode
from models.llama.config import LlamaConfig, named_config
from models.llama.quantize import QUANTIZATIONS, quantized_types
from serving.bundle.bundle import Bundle
from serving.bundle.memory import compile_bundle
from serving.llama_backend import info
from spmd.cli.flags import Parser, Switch, positive, words

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

    count = len(jax.tree.leaves(types))
    keys = iter(jax.random.split(jax.random.key(0), count))
    return jax.tree.map(
        lambda x, place: make(next(keys), x.shape, x.dtype, place), types, shardings
    )


def floor_seconds(given: argparse.Namespace, bundle: Bundle) -> float:
    """Seconds of reading what a step reads once."""
    facts = info(bundle)
    return float(facts["read_weight_bytes"] + facts["cache_bytes"]) / float(given.bandwidth)


def timed(given: argparse.Namespace, run: Any, calls: int) -> float:
    """Median seconds from one call's tokens on the host to the next one's."""
    under_way = collections.deque(run() for _ in range(given.ahead))
    times = []
    for _ in range(calls + WARM_UP - given.ahead):
        under_way.append(run())
        np.asarray(under_way.popleft())
        times.append(time.perf_counter())
    return statistics.median(np.diff(times[WARM_UP - 1 :]))


def bench(given: argparse.Namespace, config: LlamaConfig, quantize: str, batch: int) -> list[str]:
    """Rows of the table: one for each number of tokens of a call."""
    per_call = [int(n) for n in given.steps_per_call]
    length = given.context
    shape = decode.ServingShape(
        batch, length, (16,), (length,), max(per_call), cache_dtype=given.cache_dtype
    )
    types = quantized_types(config, quantize)
    functions, state, specs, primary = decode.functions(config, shape, types)
    only = [function for function in functions if function.name == primary]
    mesh = spmd.make_mesh(data=1, model=given.model_axis, devices=jax.devices()[: given.model_axis])
    start = time.perf_counter()
    bundle = compile_bundle(
        only,
        mesh,
        weights=types,
        make_weights=functools.partial(random_weights, types, config=config),
        specs=specs,
        state=state,
        primary=primary,
        options=spmd.Options(compiler_options=dict(option.split("=", 1) for option in given.xla)),
    )
    compile_seconds = time.perf_counter() - start
    least = floor_seconds(given, bundle)
    rows = []
    for steps in per_call:
        calls = max(3, given.tokens // steps)
        begin = np.full(batch, length - (calls + WARM_UP) * steps, np.int32)
        if begin[0] < 0:
            sys.exit(f"error: --tokens {given.tokens} do not fit into --context {length}")
        bundle.put_state({"state/lengths": begin})
        control = {
            "active": np.ones(batch, np.bool_),
            "alternatives": np.bool_(False),
            "steps": np.int32(steps),
        }

        def run(control: Any = control) -> Any:
            return bundle.run(primary, control).ids

        seconds = timed(given, run, calls) / steps
        rows.append(
            f"| {quantize} | {given.cache_dtype} | {batch} | {given.model_axis} | {steps} | "
            f"{seconds * 1e3:.2f} | {least * 1e3:.2f} | {seconds / least:.2f} | "
            f"{least / seconds:.0%} | {batch / seconds:,.0f} | {compile_seconds:.0f} |"
        )
    if given.peer and given.model_axis == 1:
        rows.append(_peer(given, bundle, only[0], control, per_call[-1], least, quantize, batch))
    return rows


def _peer(
    given: argparse.Namespace,
    bundle: Bundle,
    function: Function,
    control: Any,
    steps: int,
    least: float,
    quantize: str,
    batch: int,
) -> str:
    plain = jax.jit(function.fn, donate_argnums=1)
    weights, state = (
        jax.tree.unflatten(jax.tree.structure(struct), list(arrays.values()))
        for struct, arrays in zip(function.args, (bundle.weights, bundle.state), strict=False)
    )
    calls = max(3, given.tokens // steps)
    begin = np.full(batch, given.context - (calls + WARM_UP) * steps, np.int32)
    state = {**state, "lengths": jnp.asarray(begin)}

    def run() -> Any:
        nonlocal state
        state, made = plain(weights, state, control)
        return made.ids

    seconds = timed(given, run, calls) / steps
    return (
        f"| {quantize}, jax.jit | {given.cache_dtype} | {batch} | 1 | {steps} | "
        f"{seconds * 1e3:.2f} | {least * 1e3:.2f} | {seconds / least:.2f} | "
        f"{least / seconds:.0%} | {batch / seconds:,.0f} | |"
    )


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run decode", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    add("--model_axis", type=positive, default=1, help="devices that share a layer")
    add("--batches", type=words, default="1", help="slots, all of them in use")
    add("--context", type=positive, default=1024, help="positions that are read")
    add("--quantize", type=words, default="none", help="of " + ", ".join(QUANTIZATIONS))
    add("--cache_dtype", default="bfloat16", help="of keys and values")
    add("--dtype", default="bfloat16", help="of activations, and weights not quantized")
    add("--steps_per_call", type=words, default="1,10", help="tokens of a call")
    add("--ahead", type=int, default=1, help="calls that are issued before the last one is read")
    add("--tokens", type=positive, default=60, help="timed tokens")
    add(
        "--bandwidth",
        type=float,
        default=4.3e12,
        help="bytes a second that a device copies",
    )
    add("--xla", type=words, default=(), help="XLA's options for our programs, as in name=value")
    add("--peer", action=Switch, help="also plain jax.jit of the same function, on one device")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    dtype = jnp.dtype(given.dtype).name
    config = dataclasses.replace(
        named_config(given.model), scan_layers=False, dtype=dtype, param_dtype=dtype
    )
    if given.layers:
        config = dataclasses.replace(config, num_hidden_layers=given.layers)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {given.model_axis} x {device.device_kind}; {given.model}, "
          f"context {given.context}, greedy")  # fmt: skip
    print("| weights | cache | batch | devices | tokens a call | ms/token | floor, ms | x floor | "
          "roofline | tokens/s | compile s |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for quantize in given.quantize:
        for batch in given.batches:
            for row in bench(given, config, quantize, int(batch)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
