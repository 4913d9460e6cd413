"""Runs one scenario with a checkout's code and prints what it enters, as JSON; see `tools/hops.py`.

Nothing is imported from this repository but what is on the path, so that a checkout may be as old
as the name `TrainerOptions`: public names of `spmd` and its models, and its tests' fake engine.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd

ROOT = Path(spmd.__file__).parent

OPEN = contextlib.ExitStack()
"""What stays open until the process ends."""

Ready = Callable[[], object]
"""A scenario whose preparations are done."""


def jit_step() -> Ready:
    """`lower()` of a step of AdamW with two products, four marks."""
    mesh = spmd.make_mesh(data=4, model=2)
    optimizer = optax.adamw(1e-3)
    mark = spmd.mark_sharding
    params = {
        "a": mark(jnp.ones((64, 256)), mesh, (None, "model")),
        "b": mark(jnp.ones((256, 64)), mesh, ("model", None)),
    }
    x = mark(jnp.ones((32, 64)), mesh, ("data", None))
    state = optimizer.init(params)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ params["a"]) @ params["b"] - x) ** 2)

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return lambda: spmd.jit(step, mesh=mesh).lower(params, state, x)


def memory_limit() -> Ready:
    """`lower()` of a chain of products under a limit that gathered weights would exceed."""
    mesh = spmd.make_mesh(data=8)
    ws = [spmd.mark_sharding(jnp.ones((512, 512)), mesh, ("data", None)) for _ in range(4)]
    x = spmd.mark_sharding(jnp.ones((4096, 512)), mesh, ("data", None))

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    step = jax.grad(loss)
    free = spmd.jit(step, mesh=mesh).lower(ws, x).predicted_memory
    options = spmd.Options(memory_limit=int(0.97 * free.peak))
    return lambda: spmd.jit(step, mesh=mesh, options=options).lower(ws, x)


def chat_request() -> Ready:
    """One chat of eight tokens, from the socket to the engine's model and back."""
    from tests.serving.http.live import post, serving

    live = OPEN.enter_context(serving())
    body = {
        "model": "fake-llama",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
    }

    def ask() -> None:
        post(f"{live.url}/v1/chat/completions", json=body).raise_for_status()

    ask()  # what is made once is not counted
    return ask


def trainer_run() -> Ready:
    """Three steps of `Trainer` with a checkpoint at the end."""
    from spmd.models.training import trainer

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (64, 64)) / 8}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    def data(step: int) -> Any:
        x = np.random.default_rng(step).standard_normal((64, 64), np.float32)
        return {"x": x, "y": x}

    options = trainer.TrainerOptions(steps=3, run_dir=tempfile.mkdtemp(), save_every=3)
    mesh = spmd.make_mesh(rows=4, columns=2)
    trained = trainer.Trainer(
        init, loss, {"w": ("rows", "columns")}, data, mesh=mesh, batch_marks={"*": ("rows",)},
        optimizer=optax.adamw(1e-3), options=options,
    )  # fmt: skip
    return trained.run


SCENARIOS: dict[str, Callable[[], Ready]] = {
    "lower a step of AdamW": jit_step,
    "lower under a memory limit": memory_limit,
    "answer a chat": chat_request,
    "train three steps": trainer_run,
}


def entered(prepare: Callable[[], Ready]) -> dict[str, int]:
    """Files and functions of the checkout that a run enters, on all threads, and its calls."""
    calls: Counter[tuple[str, int]] = Counter()
    counts = threading.Event()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_call = (
            event == "call" and counts.is_set() and code.co_filename.startswith(f"{ROOT}{os.sep}")
        )
        if is_call and not code.co_name.startswith("<"):  # comprehensions are where they stand
            calls[code.co_filename, code.co_firstlineno] += 1

    threading.setprofile(look)  # of threads that are started from now on, so before they are
    run = prepare()
    sys.setprofile(look)
    counts.set()
    run()
    counts.clear()
    sys.setprofile(None)
    files = {file for file, _ in calls}
    return {"files": len(files), "functions": len(calls), "calls": calls.total()}


if __name__ == "__main__":
    print(json.dumps(entered(SCENARIOS[sys.argv[1]])), flush=True)
    os._exit(0)  # servers and writers need not end well
