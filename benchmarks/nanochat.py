"""A training step of nanochat on one GPU: nanochat itself, and `examples/nanochat.py` in its place.

    peer   nanochat's model and optimizer in PyTorch, compiled by torch.compile as its trainer does
           it; attention is FlashAttention 3 where the package `kernels` is, else PyTorch's own
    jax    the example's step under `jax.jit`, with jax's own cuDNN attention
    spmd   the same step under `spmd.jit`

Embeddings are bfloat16, other parameters float32, and compute is bfloat16; tokens are random. Each
program runs in a process of its own, one after another, so that none holds memory of another.
`ms/step` is the median of steps that are waited for, as in nanochat's trainer; `GiB` the most that
was allocated, `XLA GiB` what XLA planned for.

Example:
    git clone https://github.com/karpathy/nanochat /tmp/nanochat
    benchmarks/run nanochat --peer /tmp/nanochat --kinds
    benchmarks/run nanochat --only jax,spmd --windows SSSL --top 12
"""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kinds import HEADER as KINDS
from benchmarks.kinds import Kernel, kinds_of, longest, of_first_device, of_torch
from benchmarks.tables import print_head, print_line, print_table
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.explain.memory import Memory
from spmd.measure.profile import PROFILED, run_steps

PROGRAMS = ("peer", "jax", "spmd")
HEADER = ("program", "windows", "tokens/s", "ms/step", "GiB", "XLA GiB", "compile s", "loss")
HEAD_DIM, OF_A_LAYER = 128, 64  # nanochat's: a head's width, and the model's per layer


def sizes_of(given: argparse.Namespace) -> dict[str, Any]:
    """Fields of `examples.nanochat.Config` for so many layers."""
    heads = -(-given.layers * OF_A_LAYER // HEAD_DIM)
    windows = "L" if given.window == "full" else given.window
    sizes = {"layers": given.layers, "heads": heads, "width": heads * HEAD_DIM}
    return {**sizes, "ids": given.ids, "tokens": given.tokens, "windows": windows}


def random_tokens(given: argparse.Namespace) -> Any:
    """Inputs and targets without meaning, (2, batch, tokens)."""
    shape = (2, given.batch, given.tokens)
    return np.random.RandomState(0).randint(0, given.ids, shape).astype(np.int32)


def run_ours(given: argparse.Namespace) -> dict[str, Any]:
    """Compiles and runs the example's step, under `jax.jit` or `spmd.jit`."""
    os.environ.setdefault("JAX_PLATFORMS", "")  # the example would take eight CPUs
    os.environ.setdefault("XLA_FLAGS", "")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax
    import jax.numpy as jnp

    import spmd

    example: Any = importlib.import_module("examples.nanochat")
    device, is_plain = jax.devices()[0], given.name == "jax"
    if is_plain and device.platform == "gpu":  # `jax.jit` would get the reference
        spmd.ops.attention = partial(spmd.ops.attention, implementation="cudnn")
    c = example.Config(**sizes_of(given))

    def step(params: Any, state: Any, ids: Any, targets: Any) -> Any:
        return example.train_step(params, state, ids, targets, c, dtype=jnp.bfloat16)

    @jax.jit
    def fresh(key: Any) -> Any:
        params = example.init(key, c, jnp.bfloat16)
        return params, example.start(params)

    batch, held = jax.device_put(random_tokens(given), device), [*fresh(jax.random.key(0))]
    parameters = sum(x.size for x in jax.tree.leaves(held[0]))
    mesh = spmd.make_mesh(data=1, devices=[device])
    jit: Any = jax.jit if is_plain else partial(spmd.jit, mesh=mesh)
    start = time.perf_counter()
    compiled = jit(step, donate_argnums=(0, 1)).lower(*held, *batch).compile()
    compiled_in = time.perf_counter() - start
    losses = []

    def run(_: None) -> None:
        *held[:], loss = jax.block_until_ready(compiled(*held, *batch))
        losses.append(float(loss))

    ran = run_steps(run, lambda: None, given.steps, given.profiled)
    steps = [of_first_device(step) for step in ran.steps]
    planned = Memory.of(compiled.memory_analysis()) if is_plain else compiled.memory
    sizes = ((device.memory_stats() or {}).get("peak_bytes_in_use", 0), planned.peak_bytes)
    about = f"jax {jax.__version__}, {device.device_kind}, {parameters / 1e6:.0f}M parameters"
    return told(given, f"{given.name}.jit", about, ran, sizes, compiled_in, losses, steps)


def run_peer(given: argparse.Namespace) -> dict[str, Any]:
    """Runs nanochat's step as its `scripts/base_train.py` does on one GPU."""
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    sys.path.insert(0, given.peer)
    import torch

    names = ("common", "flash_attention", "gpt")
    common, attention, gpt = (importlib.import_module(f"nanochat.{name}") for name in names)
    has_gpu, c = torch.cuda.is_available(), argparse.Namespace(**sizes_of(given))
    device = common.compute_init("cuda" if has_gpu else "cpu")[-1]
    with torch.device("meta"):
        fields = (c.tokens, c.ids, c.layers, c.heads, c.heads, c.width, c.windows)
        module = gpt.GPT(gpt.GPTConfig(*fields))
    module.to_empty(device=device)
    module.init_weights()
    optimizer, model = module.setup_optimizer(), torch.compile(module, dynamic=False)
    ids, targets = torch.from_numpy(random_tokens(given)).long().to(device)
    losses = []

    def run(_: None) -> None:
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if has_gpu:
            torch.cuda.synchronize()

    start = time.perf_counter()
    run(None)
    compiled_in = time.perf_counter() - start
    ran, steps = run_steps(run, lambda: None, given.steps, 0), []
    for _ in range(given.profiled * has_gpu):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(None)
        steps.append(of_torch(profile))
    used = "FlashAttention 3" if attention.USE_FA3 else "PyTorch's attention"
    parameters = sum(p.numel() for p in module.parameters())
    about = f"torch {torch.__version__}, {used}, {parameters / 1e6:.0f}M parameters"
    sizes = (torch.cuda.max_memory_allocated() if has_gpu else 0, 0)
    return told(given, "nanochat", about, ran, sizes, compiled_in, losses, steps)


def told(
    given: Any, program: str, about: str, run: Any, sizes: Any, seconds: float, losses: Any,
    steps: Sequence[Sequence[Kernel]],
) -> dict[str, Any]:  # fmt: skip
    """What a program's process tells: cells of the tables. Sizes that nothing counts are 0."""
    held = (f"{size / 2**30:.1f}" if size else "-" for size in sizes)
    times = (f"{given.batch * given.tokens / run.seconds:,.0f}", f"{run.seconds * 1e3:.1f}")
    cells = (*times, *held, f"{seconds:.1f}", f"{losses[-1]:.4f}")
    spent = kinds_of(steps).cells() if any(steps) else []
    found = {"names": (program, given.window), "about": about, "cells": cells}
    return {**found, "kinds": spent, "top": longest(steps, given.top)}


def measure(given: argparse.Namespace, window: str, name: str) -> dict[str, Any]:
    """What a program found in a process of its own; RuntimeError with what it said if it failed."""
    asked = {**vars(given), "window": window, "name": name}
    asked["profiled"] = PROFILED if given.kinds or given.top else 0
    command = [sys.executable, "-m", "benchmarks.nanochat", json.dumps(asked, default=str)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"names"')]
    if ran.returncode or not lines:
        raise RuntimeError(f"{name}, {window} failed:\n{(ran.stdout + ran.stderr)[-3000:]}")
    return dict(json.loads(lines[-1]))


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run nanochat", __doc__)
    add = parser.add_argument
    add("--peer", type=Path, help="a checkout of github.com/karpathy/nanochat")
    add("--only", type=words, default=",".join(PROGRAMS), help="programs to run")
    add("--windows", type=words, default="full,SSSL", help="full, or short and long ones")
    add("--layers", type=positive, default=20, help="the width follows from them")
    add("--batch", type=positive, default=32, help="sequences in a step")
    add("--tokens", type=positive, default=2048, help="tokens in a sequence")
    add("--ids", type=positive, default=32768, help="size of the vocabulary")
    add("--steps", type=positive, default=20, help="timed steps")
    add("--kinds", action=Switch, help="where the time went, by kind of kernel")
    add("--top", type=int, default=0, help="also so many kernels that took longest")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and below it where the time went; returns 1 if a program failed."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if unknown := set(given.only) - set(PROGRAMS):
        parser.error(f"--only: there is no {min(unknown)}, only {', '.join(PROGRAMS)}")
    if wrong := [text for text in given.windows if text != "full" and set(text) - set("SL")]:
        parser.error(f"--windows {wrong[0]}: it is full, or of S and L, as SSSL")
    if "peer" in given.only and not (given.peer and (given.peer / "nanochat/gpt.py").is_file()):
        problem = f"{given.peer} has no nanochat/gpt.py" if given.peer else "it is missing"
        fix = "or leave peer out of --only"
        parser.error(f"--peer takes a checkout of github.com/karpathy/nanochat: {problem}; {fix}")
    print(f"{given.layers} layers, {given.batch} x {given.tokens} tokens, bfloat16\n")
    print_head(HEADER)
    asked = list(itertools.product(given.windows, given.only))
    done: list[dict[str, Any]] = []
    for window, name in asked:
        print(f"{name}, {window} ...", file=sys.stderr, flush=True)
        try:
            done.append(measure(given, window, name))
            print_line([*done[-1]["names"], *done[-1]["cells"]])
        except RuntimeError as error:  # the others are worth having
            print(f"error: {error}", file=sys.stderr, flush=True)
    print("\n" + "\n".join(dict.fromkeys(each["about"] for each in done)) + "\n")
    if profiled := [each for each in done if each["kinds"]]:
        lines = ([*each["names"], *each["kinds"]] for each in profiled)
        print_table(("milliseconds", "windows", *KINDS), lines)
    for each in profiled if given.top else ():
        print()
        print_table((", ".join(each["names"]), "ms", "runs"), each["top"])
    return int(len(done) < len(asked))


if __name__ == "__main__":  # one program, in the process that `measure` started
    asked = argparse.Namespace(**json.loads(sys.argv[1]))
    print(json.dumps((run_peer if asked.name == "peer" else run_ours)(asked)), flush=True)
