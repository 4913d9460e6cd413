"""Programs whose reports several tests read."""

from typing import Any

import jax
import jax.numpy as jnp

import spmd


def pipelined_step(schedule: str, stages: int = 4, microbatches: int = 8) -> spmd.Lowered:
    """The gradient of eight layers over stages."""
    mesh = spmd.Mesh(None, (stages, 2), ("stage", "data"))

    def loss(w: Any, x: Any) -> Any:
        def layer(w: Any, x: Any) -> Any:
            return x + jnp.tanh(x @ w)

        y = spmd.pipeline(layer, w, x, stages=stages, microbatches=microbatches, schedule=schedule)
        return jnp.mean(y**2)

    specs = (("stage", None, None), ("data", None))
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 128, 128), (256, 128))]
    options = spmd.Options(planner="greedy")
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=specs, options=options)
    return step.lower(*structs, topology=spmd.Topology(f"h200:{2 * stages}"))
