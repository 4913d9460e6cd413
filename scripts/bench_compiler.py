"""Time of every stage of our compiler on a Llama training step, nothing run on a device.

Example:
    python scripts/bench_compiler.py --layers 4,32 --noscan
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from absl import app, flags

import spmd
from models.llama import model, sharding
from models.llama.config import named_config

_MODEL = flags.DEFINE_string("model", "llama2-7b", "named config")
_MESH = flags.DEFINE_string("mesh", "data=4,model=2", "mesh; needs no devices")
_LAYERS = flags.DEFINE_list("layers", ["4"], "numbers of layers")
_SCAN = flags.DEFINE_bool("scan", True, "scan over layers, or unroll them")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adamw", ["adamw", "adafactor"], "optimizer")
_TOPOLOGY = flags.DEFINE_string("topology", "h200:8", "machine to plan for")
_SHARDY = flags.DEFINE_bool("shardy", True, "time Shardy's propagation on the same module too")
_REPEAT = flags.DEFINE_integer("repeat", 3, "runs; the fastest is shown")

STAGES = ("import", "propagate", "plan", "partition", "optimize", "emit")


def lower(layers: int) -> spmd.Lowered:
    """The whole compiler once on one training step."""
    axes = {name: int(size) for name, size in (p.split("=") for p in _MESH.value.split(","))}
    mesh = spmd.Mesh(None, tuple(axes.values()), tuple(axes))
    config = dataclasses.replace(
        named_config(_MODEL.value), num_hidden_layers=layers, scan_layers=_SCAN.value
    )
    optimizer = optax.adamw(1e-4) if _OPTIMIZER.value == "adamw" else optax.adafactor(1e-4)
    marks = sharding.activation_marks(mesh, config)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda p: model.loss(p, batch["inputs"], batch["targets"], config, marks)
        )(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))
    token = jax.ShapeDtypeStruct((2 * mesh.size, 1024), np.int32)
    return spmd.jit(train_step, mesh=mesh, donate_argnums=(0, 1)).lower(
        sharding.mark_params(params, mesh, config),
        jax.eval_shape(optimizer.init, params),
        sharding.mark_batch({"inputs": token, "targets": token}, mesh),
        topology=spmd.Topology(_TOPOLOGY.value),
    )


def shardy_seconds(lowered: spmd.Lowered) -> float:
    """Time of `sdy-propagation-pipeline` alone on a copy of the same marked module."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    module = lowered.request.module
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(binary=True))
        main_op = next(
            op.operation
            for op in copy.body.operations
            if op.operation.name == "func.func"
            and str(op.operation.attributes["sym_name"]) == '"main"'
        )
        attrs = []
        for entries in lowered.request.arg_entries:
            dims = ", ".join(
                "{?}" if names is None else "{" + ", ".join(f'"{n}"' for n in names) + "}"
                for names in entries or ()
            )
            known = entries is not None and entries != ()
            text = f"{{sdy.sharding = #sdy.sharding<@mesh, [{dims}]>}}" if known else "{}"
            attrs.append(ir.Attribute.parse(text))
        main_op.attributes["arg_attrs"] = ir.ArrayAttr.get(attrs)
        pipeline = PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        start = time.perf_counter()
        pipeline.run(copy.operation)
        seconds = time.perf_counter() - start
    return seconds


def main(argv: Sequence[str]) -> None:
    """Prints one table."""
    del argv
    print(f"jax {jax.__version__}, {_MODEL.value}, {_OPTIMIZER.value}, mesh {_MESH.value}, "
          f"{'scanned' if _SCAN.value else 'unrolled'}")  # fmt: skip
    print(f"| layers | ops | {' | '.join(STAGES)} | import to partition, s | us/op "
          "| Shardy propagation, s | ratio |")  # fmt: skip
    print("| --- " * (len(STAGES) + 6) + "|")
    for layers in map(int, _LAYERS.value):
        runs = [lower(layers) for _ in range(_REPEAT.value)]
        peer = min(map(shardy_seconds, runs)) if _SHARDY.value else float("nan")
        best = min((run.stages for run in runs), key=lambda s: sum(s.seconds.values()))
        ops = sum(1 for _ in best.imported.program.walk())
        seconds = best.seconds
        total = sum(seconds[s] for s in ("import", "propagate", "plan", "partition"))
        times = " | ".join(f"{seconds[s]:.3f}" for s in STAGES)
        print(f"| {layers} | {ops} | {times} | {total:.3f} | {total / ops * 1e6:.0f} "
              f"| {peer:.3f} | {total / peer:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    app.run(main)
