"""A training step of nanochat on one GPU: nanochat itself, and `examples/nanochat.py` in its place.

    peer   nanochat's model and optimizer in PyTorch, compiled by torch.compile as its trainer does
           it; attention is FlashAttention 3 where the package `kernels` is, else PyTorch's own
    jax    the example's step under `jax.jit`, with jax's own cuDNN attention
    spmd   the same step under `spmd.jit`

Matrices are float32 and computed with in bfloat16; tokens are random, the same for all. Each
program runs in a process of its own, one after another, so that none holds memory of another.
`ms/step` is the median of steps that are waited for, as in nanochat's trainer; `GiB` the most that
was allocated, `XLA GiB` what XLA planned for.

Example:
    git clone https://github.com/karpathy/nanochat /tmp/nanochat
    benchmarks/run nanochat --peer /tmp/nanochat --kinds
    benchmarks/run nanochat --only jax,spmd --windows SSSL --top 12
"""

import argparse
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

from benchmarks import kinds
from benchmarks.tables import print_head, print_line, print_table
from spmd.cli.flags import Parser, Switch, positive, words

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
    import numpy as np

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
    from examples import nanochat
    from spmd.explain.memory import Memory
    from spmd.measure.profile import run_steps

    device, is_plain = jax.devices()[0], given.name == "jax"
    if is_plain and device.platform == "gpu":  # `jax.jit` would get the reference
        spmd.ops.attention = partial(spmd.ops.attention, implementation="cudnn")
    c, dtype = nanochat.Config(**sizes_of(given)), jnp.dtype(given.dtype)

    def step(params: Any, state: Any, ids: Any, targets: Any) -> Any:
        return nanochat.train_step(params, state, ids, targets, c, dtype=dtype)

    @jax.jit
    def fresh(key: Any) -> Any:
        params = nanochat.init(key, c)
        return params, nanochat.start(params)

    batch, held = jax.device_put(random_tokens(given), device), [*fresh(jax.random.key(0))]
    parameters = sum(x.size for x in jax.tree.leaves(held[0]))
    jit = jax.jit if is_plain else partial(spmd.jit, mesh=spmd.make_mesh(data=1, devices=[device]))
    start = time.perf_counter()
    compiled = jit(step, donate_argnums=(0, 1)).lower(*held, *batch).compile()
    compile_seconds = time.perf_counter() - start
    losses = []

    def run(_: None) -> None:
        *held[:], loss = jax.block_until_ready(compiled(*held, *batch))
        losses.append(float(loss))

    ran = run_steps(run, lambda: None, given.steps, given.profiled)
    steps = [kinds.of_first_device(step) for step in ran.steps]
    planned = Memory.of(compiled.memory_analysis()) if is_plain else compiled.memory
    return {
        "program": f"{given.name}.jit",
        "about": f"jax {jax.__version__}, {device.device_kind}, {parameters / 1e6:.0f}M parameters",
        "seconds": ran.seconds,
        "bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "planned": planned.peak_bytes,
        "compile_seconds": compile_seconds,
        "loss": losses[-1],
        **where(given, steps),
    }


def run_peer(given: argparse.Namespace) -> dict[str, Any]:
    """Runs nanochat's step as its `scripts/base_train.py` does on one GPU."""
    os.environ["NANOCHAT_DTYPE"] = given.dtype
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if given.eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, given.peer)
    import torch
    from nanochat.common import compute_init
    from nanochat.flash_attention import USE_FA3
    from nanochat.gpt import GPT, GPTConfig

    from spmd.measure.profile import run_steps

    has_gpu, c = torch.cuda.is_available(), argparse.Namespace(**sizes_of(given))
    device = compute_init("cuda" if has_gpu else "cpu")[-1]
    with torch.device("meta"):
        sizes = (c.tokens, c.ids, c.layers, c.heads, c.heads, c.width, c.windows)
        module = GPT(GPTConfig(*sizes))
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
    compile_seconds = time.perf_counter() - start
    ran, steps = run_steps(run, lambda: None, given.steps, 0), []
    for _ in range(given.profiled * has_gpu):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(None)
        steps.append(kinds.of_torch(profile))
    attention = "FlashAttention 3" if USE_FA3 else "PyTorch's attention"
    parameters = sum(p.numel() for p in module.parameters())
    return {
        "program": "nanochat",
        "about": f"torch {torch.__version__}, {attention}, {parameters / 1e6:.0f}M parameters",
        "seconds": ran.seconds,
        "bytes": torch.cuda.max_memory_allocated() if has_gpu else 0,
        "planned": 0,
        "compile_seconds": compile_seconds,
        "loss": losses[-1],
        **where(given, steps),
    }


def where(given: argparse.Namespace, steps: Sequence[Sequence[kinds.Kernel]]) -> dict[str, Any]:
    """Where the time of profiled steps went, as the tables have it."""
    cells = kinds.kinds_of(steps).cells() if any(steps) else []
    return {"kinds": cells, "top": kinds.longest(steps, given.top)}


def measure(given: argparse.Namespace, window: str, name: str) -> dict[str, Any]:
    """What a program found in a process of its own; RuntimeError with what it said if it failed."""
    asked = {**vars(given), "window": window, "name": name, "profiled": 2 * given.is_profiled}
    command = [sys.executable, "-m", "benchmarks.nanochat", json.dumps(asked, default=str)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"program"')]
    if ran.returncode or not lines:
        raise RuntimeError(f"{name}, {window} failed:\n{(ran.stdout + ran.stderr)[-3000:]}")
    return {**json.loads(lines[-1]), "window": window}


def cells_of(given: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """As `HEADER` has them."""
    times = (given.batch * given.tokens / found["seconds"], found["seconds"] * 1e3)
    sizes = [f"{found[name] / 2**30:.1f}" if found[name] else "-" for name in ("bytes", "planned")]
    last = (f"{found['compile_seconds']:.1f}", f"{found['loss']:.4f}")
    return [found["program"], found["window"], f"{times[0]:,.0f}", f"{times[1]:.1f}", *sizes, *last]


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
    add("--dtype", default="bfloat16", help="compute dtype")
    add("--eager", action=Switch, help="nanochat without torch.compile")
    add("--kinds", action=Switch, help="where the time went, by kind of kernel")
    add("--top", type=int, default=0, help="also so many kernels that took longest")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and below it where the time went; returns 1 if a program failed."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    given.is_profiled = bool(given.kinds or given.top)
    if unknown := set(given.only) - set(PROGRAMS):
        parser.error(f"--only: there is no {min(unknown)}, only {', '.join(PROGRAMS)}")
    if wrong := [text for text in given.windows if text != "full" and set(text) - set("SL")]:
        parser.error(f"--windows {wrong[0]}: it is full, or of S and L, as SSSL")
    if "peer" in given.only and not (given.peer and (given.peer / "nanochat/gpt.py").is_file()):
        problem = f"{given.peer} has no nanochat/gpt.py" if given.peer else "it is missing"
        fix = "or leave peer out of --only"
        parser.error(f"--peer takes a checkout of github.com/karpathy/nanochat: {problem}; {fix}")
    print(f"{given.layers} layers, {given.batch} x {given.tokens} tokens, {given.dtype}\n")
    print_head(HEADER)
    done: list[dict[str, Any]] = []
    asked = list(itertools.product(given.windows, given.only))
    for window, name in asked:
        print(f"{name}, {window} ...", file=sys.stderr, flush=True)
        try:
            done.append(measure(given, window, name))
            print_line(cells_of(given, done[-1]))
        except RuntimeError as error:  # the others are worth having
            print(f"error: {error}", file=sys.stderr, flush=True)
    print("\n" + "\n".join(dict.fromkeys(found["about"] for found in done)))
    profiled = [found for found in done if found["kinds"]]
    if profiled:
        lines = ([found["program"], found["window"], *found["kinds"]] for found in profiled)
        print()
        print_table(("milliseconds", "windows", *kinds.HEADER), lines)
    for found in profiled if given.top else ():
        print()
        print_table((f"{found['program']}, {found['window']}", "ms", "runs"), found["top"])
    return int(len(done) < len(asked))


if __name__ == "__main__":  # one program, in the process that `measure` started
    asked = argparse.Namespace(**json.loads(sys.argv[1]))
    print(json.dumps((run_peer if asked.name == "peer" else run_ours)(asked)), flush=True)
