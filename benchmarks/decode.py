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

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import spmd
from models.function import Function
from models.llama import decode
from models.llama.config import LlamaConfig, named_config
from models.llama.quantize import QUANTIZATIONS, quantized_types
from serving.bundle.bundle import Bundle
from serving.bundle.memory import compile_bundle
from serving.llama_backend import info

_MODEL = flags.DEFINE_string("model", "quickstart", "named config")
_LAYERS = flags.DEFINE_integer("layers", 0, "overrides the number of layers; 0 keeps it")
_AXIS = flags.DEFINE_integer("model_axis", 1, "devices that share a layer")
_BATCHES = flags.DEFINE_list("batches", ["1"], "slots, all of them in use")
_CONTEXT = flags.DEFINE_integer("context", 1024, "positions that are read")
_QUANTIZE = flags.DEFINE_list("quantize", ["none"], "of " + ", ".join(QUANTIZATIONS))
_CACHE = flags.DEFINE_string("cache_dtype", "bfloat16", "of keys and values")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "of activations, and weights not quantized")
_PER_CALL = flags.DEFINE_list("steps_per_call", ["1", "10"], "tokens of a call")
_AHEAD = flags.DEFINE_integer("ahead", 1, "calls that are issued before the last one is read")
_TOKENS = flags.DEFINE_integer("tokens", 60, "timed tokens")
_BANDWIDTH = flags.DEFINE_float("bandwidth", 4.3e12, "bytes a second that a device copies")
_XLA = flags.DEFINE_list("xla", [], "XLA's options for our programs, as in name=value")
_PEER = flags.DEFINE_bool("peer", False, "also plain jax.jit of the same function, on one device")


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


def floor_seconds(bundle: Bundle) -> float:
    """Seconds of reading what a step reads once."""
    facts = info(bundle)
    return float(facts["read_weight_bytes"] + facts["cache_bytes"]) / float(_BANDWIDTH.value)


def timed(run: Any, calls: int) -> float:
    """Median seconds from one call's tokens on the host to the next one's."""
    under_way = collections.deque(run() for _ in range(_AHEAD.value))
    times = []
    for _ in range(calls + WARM_UP - _AHEAD.value):
        under_way.append(run())
        np.asarray(under_way.popleft())
        times.append(time.perf_counter())
    return statistics.median(np.diff(times[WARM_UP - 1 :]))


def bench(config: LlamaConfig, quantize: str, batch: int) -> list[str]:
    """Rows of the table: one for each number of tokens of a call."""
    per_call = [int(n) for n in _PER_CALL.value]
    length = _CONTEXT.value
    shape = decode.ServingShape(
        batch, length, (16,), (length,), max(per_call), cache_dtype=_CACHE.value
    )
    types = quantized_types(config, quantize)
    functions, state, specs, primary = decode.functions(config, shape, types)
    only = [function for function in functions if function.name == primary]
    mesh = spmd.make_mesh(data=1, model=_AXIS.value, devices=jax.devices()[: _AXIS.value])
    start = time.perf_counter()
    bundle = compile_bundle(
        only,
        mesh,
        weights=types,
        make_weights=functools.partial(random_weights, types, config=config),
        specs=specs,
        state=state,
        primary=primary,
        options=spmd.Options(compiler_options=dict(option.split("=", 1) for option in _XLA.value)),
    )
    compile_seconds = time.perf_counter() - start
    least = floor_seconds(bundle)
    rows = []
    for steps in per_call:
        calls = max(3, _TOKENS.value // steps)
        begin = np.full(batch, length - (calls + WARM_UP) * steps, np.int32)
        if begin[0] < 0:
            raise app.UsageError(f"--tokens {_TOKENS.value} do not fit into --context {length}")
        bundle.put_state({"state/lengths": begin})
        control = {
            "active": np.ones(batch, np.bool_),
            "alternatives": np.bool_(False),
            "steps": np.int32(steps),
        }

        def run(control: Any = control) -> Any:
            return bundle.run(primary, control).ids

        seconds = timed(run, calls) / steps
        rows.append(
            f"| {quantize} | {_CACHE.value} | {batch} | {_AXIS.value} | {steps} | "
            f"{seconds * 1e3:.2f} | {least * 1e3:.2f} | {seconds / least:.2f} | "
            f"{least / seconds:.0%} | {batch / seconds:,.0f} | {compile_seconds:.0f} |"
        )
    if _PEER.value and _AXIS.value == 1:
        rows.append(_peer(bundle, only[0], control, per_call[-1], least, quantize, batch))
    return rows


def _peer(
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
    calls = max(3, _TOKENS.value // steps)
    begin = np.full(batch, _CONTEXT.value - (calls + WARM_UP) * steps, np.int32)
    state = {**state, "lengths": jnp.asarray(begin)}

    def run() -> Any:
        nonlocal state
        state, made = plain(weights, state, control)
        return made.ids

    seconds = timed(run, calls) / steps
    return (
        f"| {quantize}, jax.jit | {_CACHE.value} | {batch} | 1 | {steps} | {seconds * 1e3:.2f} | "
        f"{least * 1e3:.2f} | {seconds / least:.2f} | {least / seconds:.0%} | "
        f"{batch / seconds:,.0f} | |"
    )


def main(argv: Sequence[str]) -> None:
    """Prints one table."""
    del argv
    dtype = jnp.dtype(_DTYPE.value).name
    config = dataclasses.replace(
        named_config(_MODEL.value), scan_layers=False, dtype=dtype, param_dtype=dtype
    )
    if _LAYERS.value:
        config = dataclasses.replace(config, num_hidden_layers=_LAYERS.value)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {_AXIS.value} x {device.device_kind}; {_MODEL.value}, "
          f"context {_CONTEXT.value}, greedy")  # fmt: skip
    print("| weights | cache | batch | devices | tokens a call | ms/token | floor, ms | x floor | "
          "roofline | tokens/s | compile s |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for quantize in _QUANTIZE.value:
        for batch in _BATCHES.value:
            for row in bench(config, quantize, int(batch)):
                print(row, flush=True)


if __name__ == "__main__":
    app.run(main)
