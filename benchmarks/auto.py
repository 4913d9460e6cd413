"""`spmd.auto` on a Llama training step beside the hand-written specs: predicted time, time taken.

Nothing runs and no devices are needed. The hand-written specs are planned on every mesh, too, as
parameters, batch and activations are marked in training; `auto` sees no mark at all.

Example:
    benchmarks/run auto --layers 4,32 --meshes data=4:model=2,data=8:model=1
"""

import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.models.llama import fresh
from spmd.models.llama.step import train_step


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
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each number of layers."""
    given = make_parser().parse_args(arguments)
    topology = spmd.Topology(given.topology)
    meshes = [ahead.mesh_of(ahead.parse_axes(text)) for text in given.meshes]
    shape = (given.global_batch, given.seq_len)
    print(f"{given.model}, batch {given.global_batch} x {given.seq_len}, adamw, {topology}")
    print_head(("layers", "best by hand, s", "on", "auto, s", "on", "ratio", "auto took, s"))
    for layers in map(int, given.layers):
        config = ahead.model_of(given.model, layers, scan_layers=given.scan)
        optimizer = optax.adamw(1e-4)
        params = jax.eval_shape(lambda key, c=config: fresh.init(key, c), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct(shape, np.int32)
        batch = {"inputs": tokens, "targets": tokens}
        args = (params, jax.eval_shape(optimizer.init, params), batch)
        start = time.perf_counter()
        found = spmd.auto(
            train_step(config, optimizer),
            meshes,
            *args,
            topology=topology,
            donate_argnums=(0, 1),
        )
        took = time.perf_counter() - start
        hand, where = min(
            (ahead.Case(config, mesh, topology, shape).lower().cost, str(mesh)) for mesh in meshes
        )
        how = "scanned" if given.scan else "unrolled"
        cells = [f"{layers}, {how}", f"{hand:.4f}", where, f"{found.seconds:.4f}", str(found.mesh)]
        print_line([*cells, f"{found.seconds / hand:.3f}", f"{took:.1f}"])
