"""`spmd.auto` on a Llama training step beside the hand-written specs: predicted time, time taken.

Nothing runs and no devices are needed. The hand-written specs are planned on every mesh, too, as
parameters, batch and activations are marked in training; `auto` sees no mark at all.

Example:
    benchmarks/run auto --layers 4,32 --meshes data=4:model=2,data=8:model=1
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax
from absl import app, flags

import spmd
from models.llama import model, sharding
from models.llama.config import LlamaConfig, named_config
from models.llama.training import argument_types, train_step

_MODEL = flags.DEFINE_string("model", "llama2-7b", "named config")
_LAYERS = flags.DEFINE_list("layers", ["4", "32"], "numbers of layers")
_SCAN = flags.DEFINE_bool("scan", True, "scan over layers, or unroll them")
_MESHES = flags.DEFINE_list("meshes", ["data=4:model=2"], "meshes to choose from")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "tokens in a sequence")
_BATCH = flags.DEFINE_integer("global_batch", 16, "sequences in a step")
_TOPOLOGY = flags.DEFINE_string("topology", "h200:8", "machine to plan for")
_LIMIT = flags.DEFINE_float("memory_limit", 0, "GiB of a device; 0: what the topology has")
_RULES = flags.DEFINE_bool("rules", False, "print what was chosen")


def parse_mesh(text: str) -> spmd.Mesh:
    """`data=4:model=2` as a mesh without devices."""
    axes = {name: int(size) for name, size in (p.split("=") for p in text.split(":"))}
    return spmd.Mesh(None, tuple(axes.values()), tuple(axes))


def by_hand(config: LlamaConfig, mesh: spmd.Mesh, topology: spmd.Topology) -> float:
    """Predicted seconds of the plan under the hand-written specs."""
    optimizer = optax.adamw(1e-4)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    types = argument_types(config, optimizer, mesh, (_BATCH.value, _SEQ_LEN.value))
    lowered = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1)).lower(*types, topology=topology)
    return lowered.stages.plan.seconds


def main(argv: Sequence[str]) -> None:
    """Prints a row for each number of layers."""
    del argv
    topology = spmd.Topology(_TOPOLOGY.value)
    meshes = [parse_mesh(text) for text in _MESHES.value]
    limit = int(_LIMIT.value * 2**30) or None
    print(f"{_MODEL.value}, batch {_BATCH.value} x {_SEQ_LEN.value}, adamw, {topology}")
    print("| layers | best by hand, s | on | auto, s | on | ratio | auto took, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layers in map(int, _LAYERS.value):
        config = dataclasses.replace(
            named_config(_MODEL.value), num_hidden_layers=layers, scan_layers=_SCAN.value
        )
        optimizer = optax.adamw(1e-4)
        params = jax.eval_shape(lambda key, c=config: model.init(key, c), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((_BATCH.value, _SEQ_LEN.value), np.int32)
        args = (
            params,
            jax.eval_shape(optimizer.init, params),
            {"inputs": tokens, "targets": tokens},
        )
        start = time.perf_counter()
        found = spmd.auto(
            train_step(config, optimizer),
            meshes,
            *args,
            topology=topology,
            memory_limit=limit,
            donate_argnums=(0, 1),
        )
        took = time.perf_counter() - start
        hand, where = min((by_hand(config, mesh, topology), str(mesh)) for mesh in meshes)
        how = "scanned" if _SCAN.value else "unrolled"
        print(f"| {layers}, {how} | {hand:.4f} | {where} | {found.seconds:.4f} | {found.mesh} "
              f"| {found.seconds / hand:.3f} | {took:.1f} |", flush=True)  # fmt: skip
        if _RULES.value:
            print(found)


if __name__ == "__main__":
    app.run(main)
