"""`spmd.auto` on a Llama training step beside the hand-written specs: predicted time, time taken.

Nothing runs and no devices are needed. The hand-written specs are planned on every mesh, too, as
parameters, batch and activations are marked in training; `auto` sees no mark at all.

Example:
    benchmarks/run auto --layers 4,32 --meshes data=4:model=2,data=8:model=1
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

import spmd
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.llama.step import argument_types, train_step


def parse_mesh(text: str) -> spmd.Mesh:
    """`data=4:model=2` as a mesh without devices."""
    axes = {name: int(size) for name, size in (p.split("=") for p in text.split(":"))}
    return spmd.Mesh(None, tuple(axes.values()), tuple(axes))


def by_hand(
    given: argparse.Namespace, config: LlamaConfig, mesh: spmd.Mesh, topology: spmd.Topology
) -> float:
    """Predicted seconds of the plan under the hand-written specs."""
    optimizer = optax.adamw(1e-4)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    types = argument_types(config, optimizer, mesh, (given.global_batch, given.seq_len))
    lowered = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1)).lower(*types, topology=topology)
    return lowered.cost


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run auto", __doc__)
    add = parser.add_argument
    add("--model", default="llama2-7b", help="named config")
    add("--layers", type=words, default="4,32", help="numbers of layers")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--meshes", type=words, default="data=4:model=2", help="meshes to choose from")
    add("--seq_len", type=positive, default=1024, help="tokens in a sequence")
    add("--global_batch", type=positive, default=16, help="sequences in a step")
    add("--topology", default="h200:8", help="machine to plan for")
    add("--memory_limit", type=float, default=0, help="giB of a device; 0: what the topology has")
    add("--rules", action=Switch, help="print what was chosen")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each number of layers."""
    given = make_parser().parse_args(arguments)
    topology = spmd.Topology(given.topology)
    meshes = [parse_mesh(text) for text in given.meshes]
    limit = int(given.memory_limit * 2**30) or None
    print(f"{given.model}, batch {given.global_batch} x {given.seq_len}, adamw, {topology}")
    print("| layers | best by hand, s | on | auto, s | on | ratio | auto took, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layers in map(int, given.layers):
        config = dataclasses.replace(
            named_config(given.model), num_hidden_layers=layers, scan_layers=given.scan
        )
        optimizer = optax.adamw(1e-4)
        params = jax.eval_shape(lambda key, c=config: fresh.init(key, c), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((given.global_batch, given.seq_len), np.int32)
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
        hand, where = min((by_hand(given, config, mesh, topology), str(mesh)) for mesh in meshes)
        how = "scanned" if given.scan else "unrolled"
        print(f"| {layers}, {how} | {hand:.4f} | {where} | {found.seconds:.4f} | {found.mesh} "
              f"| {found.seconds / hand:.3f} | {took:.1f} |", flush=True)  # fmt: skip
        if given.rules:
            print(found)


if __name__ == "__main__":
    main()
