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
from spmd.cli.flags import Parser, words
from spmd.models.llama import fresh
from spmd.models.llama.step import train_step

MODEL, MACHINE, SHAPE = "llama2-7b", "h200:8", (16, 1024)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each number of layers."""
    parser = Parser("benchmarks/run auto", __doc__)
    parser.add_argument("--layers", type=words, default="4,32", help="numbers of layers")
    about = "meshes to choose from"
    parser.add_argument("--meshes", type=words, default="data=4:model=2", help=about)
    given, topology = parser.parse_args(arguments), spmd.Topology(MACHINE)
    meshes = [ahead.mesh_of(ahead.parse_axes(text)) for text in given.meshes]
    print(f"{MODEL}, batch {SHAPE[0]} x {SHAPE[1]}, adamw, {topology}")
    print_head(("layers", "best by hand, s", "on", "auto, s", "on", "ratio", "auto took, s"))
    for layers in map(int, given.layers):
        config = ahead.model_of(MODEL, layers)
        optimizer = optax.adamw(1e-4)
        params = jax.eval_shape(lambda key, c=config: fresh.init(key, c), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct(SHAPE, np.int32)
        batch = {"inputs": tokens, "targets": tokens}
        args = (params, jax.eval_shape(optimizer.init, params), batch)
        start = time.perf_counter()
        step = train_step(config, optimizer)
        found = spmd.auto(step, meshes, *args, topology=topology, donate_argnums=(0, 1))
        took = time.perf_counter() - start
        hand, where = min(
            (ahead.Case(config, mesh, topology, SHAPE).lower().cost, str(mesh)) for mesh in meshes
        )
        cells = [f"{layers}, scanned", f"{hand:.4f}", where, f"{found.seconds:.4f}"]
        print_line([*cells, str(found.mesh), f"{found.seconds / hand:.3f}", f"{took:.1f}"])
