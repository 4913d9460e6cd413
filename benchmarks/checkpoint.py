r"""How long training waits for a checkpoint, as a share of how long the checkpoint takes.

Makes a state of the given size on all devices (parameters and two moments, as AdamW has them),
saves it a few times while a jitted step goes on changing (and donating) it, and prints for each
save: seconds until the step loop went on (the stall), seconds until the checkpoint had its name,
the share, and the rate. Then restores it. The first save pays for threads and folders.

Example:
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        benchmarks/run checkpoint --megabytes 1024
"""

import argparse
import contextlib
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as absl_logging
from jax.sharding import NamedSharding, PartitionSpec

from spmd.cli.flags import Parser, positive
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState

ARRAYS = 16
WIDTH = 4096
IDLE = 0.2
"""Seconds of a step in which the host has nothing to do: accelerators compute by themselves."""


def make_state(megabytes: int) -> TrainState:
    """Parameters and two moments, in rows over all devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    count = jax.device_count()
    rows = max(1, megabytes * 2**20 // (4 * WIDTH * 3 * ARRAYS * count)) * count
    spec = NamedSharding(mesh, PartitionSpec("data", None))

    @functools.partial(jax.jit, out_shardings=spec)
    def make(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, ARRAYS)
        return {f"w{i}": jax.random.normal(keys[i], (rows, WIDTH)) for i in range(ARRAYS)}

    params, first, second = (make(jax.random.key(i)) for i in range(3))
    return TrainState(params, {"mu": first, "nu": second})


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Changes everything, in place."""
    changed: tuple[Any, Any] = jax.tree.map(lambda x: x * 0.999 + 0.001, (params, opt_state))
    return changed


@contextlib.contextmanager
def folder(given: argparse.Namespace) -> Iterator[Path]:
    """Where the checkpoints go; empty, and removed afterwards."""
    path = Path(given.folder or tempfile.mkdtemp())
    try:
        yield path / "bench_checkpoint"
    finally:
        shutil.rmtree(path / "bench_checkpoint", ignore_errors=True)


def measure(
    given: argparse.Namespace, state: TrainState, checkpoints: Checkpoints
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Save, go on stepping until the save has ended, and again."""
    records: list[dict[str, Any]] = []
    params, opt_state = state.params, state.opt_state
    for number in range(1, given.saves + 1):
        jax.block_until_ready((params, opt_state))
        checkpoints.save(TrainState(params, opt_state, number))
        steps = 0
        ended: list[dict[str, Any]] = []
        while not ended:
            params, opt_state = step(params, opt_state)
            jax.block_until_ready(params)
            time.sleep(IDLE)
            steps += 1
            ended = checkpoints.poll()
        records.append({**ended[0], "steps": steps})
    return TrainState(params, opt_state, given.saves), records


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run checkpoint", __doc__)
    add = parser.add_argument
    add(
        "--megabytes",
        type=positive,
        default=1024,
        help="size of the state, on all devices together",
    )
    add("--saves", type=positive, default=4, help="how often it is saved")
    add("--folder", help="where it is saved (default: a temporary folder)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    absl_logging.set_verbosity(absl_logging.WARNING)
    state = make_state(given.megabytes)
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    device = jax.devices()[0].device_kind
    print(f"{size / 2**20:,.0f} MiB on {jax.device_count()} x {device}")
    print("| save | training waited, s | checkpoint, s | share | MiB/s | steps meanwhile |")
    print("| --- | --- | --- | --- | --- | --- |")
    with folder(given) as path, Checkpoints(path, keep_last=2) as checkpoints:
        state, records = measure(given, state, checkpoints)
        for record in records:
            if "error" in record:
                sys.exit(f"error: {record['error']}")
            stall, seconds = record["save_stall_seconds"], record["save_seconds"]
            print(
                f"| {record['step']} | {stall:.3f} | {seconds:.2f} | {stall / seconds:.1%} | "
                f"{size / 2**20 / seconds:,.0f} | {record['steps']} |"
            )
        structs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (state.params, state.opt_state),
        )
        started = time.perf_counter()
        found = checkpoints.find()
        checked = time.perf_counter()
        assert found is not None
        restored = checkpoints.restore(found, TrainState(*structs))
        total = jnp.sum(restored.params["w0"])
        print(
            f"found and checked in {checked - started:.2f} s, restored in "
            f"{time.perf_counter() - checked:.2f} s; sum {float(total):.3f}"
        )


if __name__ == "__main__":
    main()
