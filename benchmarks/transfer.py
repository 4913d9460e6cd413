"""Weights of a Llama, in bf16, that go from a trainer's devices to a server's in the same process.

`received`: the bytes that a device gets, at most; `least`: of its parts what it did not have. XLA's
are those of one `jax.jit` with the results' shardings, by its HLO (of bf16, which CPUs send as f32,
half). `memory` is the most that a device holds of its parts in both trees and beside them. Seconds
are this machine's: a second transfer; jax.device_put after quantizing; saving and restoring a
checkpoint, as it is.

Over all devices that there are, at least two; eight virtual ones where nothing else is said.

Examples:
    benchmarks/run transfer --width 1024
    JAX_PLATFORMS=cuda benchmarks/run transfer --width 4096
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.tables import print_table
from spmd.cli.flags import Parser
from spmd.errors import bytes_text
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.fresh import init
from spmd.models.llama.quantize import quantize
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState


def over(devices: Sequence[int], *spec: Any, **axes: int) -> NamedSharding:
    """A sharding on some devices."""
    mesh = spmd.Mesh(devices, tuple(axes.values()), tuple(axes)).in_jax
    return NamedSharding(mesh, PartitionSpec(*spec))


COUNT = len(jax.devices())
HALF = COUNT // 2
ALL, FEWER = over(range(COUNT), "data", data=COUNT), over(range(HALF), "data", data=HALF)
PARALLEL = None, "model"
CASES = {
    f"FSDP over {COUNT} to 2 x TP over {HALF}": (
        ALL, over(range(COUNT), *PARALLEL, replica=2, model=HALF)
    ),
    f"{COUNT} to {HALF} of them": (ALL, FEWER),
    f"{HALF} to {COUNT}": (FEWER, ALL),
    f"{HALF} to {HALF} others, TP": (FEWER, over(range(HALF, COUNT), *PARALLEL, model=HALF)),
}  # fmt: skip

HEADER = ("weights go", "as", "received", "least", "XLA sends", "memory", "s", "device_put s")


def lacking(source: Any, target: Any, shape: tuple[int, ...], size: int) -> Counter[Any]:
    """The bytes of each device's part that it has not got, element by element."""
    have, found = source.devices_indices_map(shape), Counter[Any]()
    for device, index in target.devices_indices_map(shape).items():
        missing = np.zeros(shape, bool)
        missing[index] = True
        if device in have:
            missing[have[device]] = False
        found[device] = int(missing.sum()) * size
    return found


def line(name: str, kind: str, weights: Any) -> list[str]:
    """A row: one way to go for one kind of weights."""
    source, to = CASES[name]
    whole, convert = NamedSharding(to.mesh, PartitionSpec()), partial(quantize, kind=kind)
    tree, jitted = jax.device_put(weights, source), jax.jit(convert)
    wanted = jitted(weights)  # eagerly, GPUs round a quotient otherwise
    places = jax.tree.map(lambda x: to if x.ndim == 2 else whole, wanted)
    targets = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to if x.ndim == 2 else whole),
        tree,
    )

    def restored() -> Any:
        with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
            checkpoints.save(TrainState(tree, {}, 1))
            checkpoints.finish()
            found = checkpoints.find(1)
            return found and checkpoints.restore(found, TrainState(targets, {})).params

    move, seconds = spmd.TransferPlan(tree, places, convert=convert), list[str]()
    ways: tuple[Callable[[], Any], ...] = (
        lambda: move(tree), lambda: jax.device_put(jitted(tree), places), restored
    )  # fmt: skip
    for run in ways:
        for _ in range(2):  # compiled the first time
            start = time.perf_counter()
            jax.block_until_ready(run())
        seconds.append(f"{time.perf_counter() - start:.3f}")
    moved, sent = move(tree), "-"
    jax.tree.map(np.testing.assert_array_equal, moved, wanted)
    each = (lacking(source, x.sharding, x.shape, x.dtype.itemsize) for x in jax.tree.leaves(moved))
    least: Counter[Any] = sum(each, Counter())
    if source.device_set == to.device_set:
        text = str(jax.jit(convert, out_shardings=places).lower(tree).compile().as_text())
        total = sum(c.bytes * c.count for c in hlo_collectives(text))
        is_wide = kind == "none" and jax.default_backend() == "cpu"
        sent = bytes_text(total / 2 if is_wide else total)
    both = Counter[Any]()
    for shard in (s for x in jax.tree.leaves((tree, moved)) for s in x.addressable_shards):
        both[shard.device] += shard.data.nbytes
    trees = max(both.values())
    memory = f"{bytes_text(trees)} + {bytes_text(move.peak_bytes - trees)}"
    figures = (bytes_text(move.bytes), bytes_text(max(least.values())), sent, memory)
    return [name, "bf16" if kind == "none" else kind, *figures, *seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = Parser("benchmarks/run transfer", __doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the model, with two layers")
    width = parser.parse_args(arguments).width
    config = LlamaConfig(
        vocab_size=8 * width, hidden_size=width, intermediate_size=2 * width, scan_layers=False,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=width // 8,
    )  # fmt: skip
    fresh = init(jax.random.key(0), config)
    weights = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16")), fresh)
    ways = ((name, kind) for name in CASES for kind in ("none", "int8"))
    print_table((*HEADER, "checkpoint s"), (line(*way, weights) for way in ways))
