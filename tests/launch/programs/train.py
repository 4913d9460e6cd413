"""A few steps of two matrices over all devices of the job; then things that must not pass.

Process 0 prints one JSON object: losses, and the message of every mismatch.
"""

import json
import sys

import jax
import jax.numpy as jnp

import spmd
from spmd import launch
from tests.programs import mlp
from tests.waiting import PATIENCE

STEPS = 3


def losses(mesh: spmd.Mesh) -> list[float]:
    """The losses of a few steps."""
    training = mlp(mesh)
    compiled = training.jit().compile(*training.structs())
    params = training.marked_params
    state = compiled.init(1, training.optimizer.init, params)
    found = []
    for _ in range(STEPS):
        params, state, loss = compiled(params, state, training.marked_batch)
        found.append(float(loss))
    return found


def message(run) -> str:
    """What a mismatch says."""
    try:
        run()
    except spmd.LaunchError as error:
        return str(error)
    return "nothing"


def mismatches(mesh: spmd.Mesh) -> dict[str, str]:
    """Process 1 differs in a flag, in the mesh, in the program, in an option, in its place."""
    odd = jax.process_index() == 1
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def compile_with(factor=2.0, axes="data", options=None):
        over = mesh if axes == "data" else spmd.Mesh(mesh.device_ids, (mesh.size,), (axes,))
        fn = spmd.jit(
            lambda x: jnp.sum(x * factor),
            mesh=over,
            in_specs=[(axes,)],
            options=options or spmd.Options(),
        )
        return lambda: fn.compile(x)

    xla = {"xla_backend_optimization_level": 1 if odd else 0}
    return {
        "flag": message(lambda: launch.check_same({"--steps": "20" if odd else "10"})),
        "program": message(compile_with(factor=3.0 if odd else 2.0)),
        "mesh": message(compile_with(axes="model" if odd else "data")),
        "option": message(compile_with(options=spmd.Options(compiler_options=xla))),
        "place": message(lambda: launch.check_same({}, label="loss" if odd else "step")),
        "same": message(compile_with()),
    }


def main() -> None:
    """Trains, and tries mismatches if there are two processes."""
    spmd.initialize(timeout_s=PATIENCE, heartbeat_timeout_s=60)
    spmd.initialize()  # a second time does nothing
    data = int(sys.argv[1])
    mesh = spmd.make_mesh(data=data, model=jax.device_count() // data)
    found: dict[str, object] = {"losses": losses(mesh), "processes": jax.process_count()}
    if jax.process_count() == 2:
        found["mismatches"] = mismatches(mesh)
    if launch.is_main_process():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
