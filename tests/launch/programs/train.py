"""A few steps of two matrices over all devices of the job; then things that must not pass.

Process 0 prints one JSON object: losses, and the message of every mismatch.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import spmd
from spmd import launch
from tests.programs import mlp
from tests.waiting import PATIENCE

STEPS = 3


def losses(mesh: spmd.Mesh) -> list[float]:
    return mlp(mesh).run(STEPS)[2]


def message(run) -> str:
    try:
        run()
    except spmd.LaunchError as error:
        return str(error)
    return "nothing"


def planning(mesh: spmd.Mesh) -> dict[str, list[str]]:
    """What each process says of plans: how many it made, and what it raised where one cannot be."""
    plan = spmd.compiler.plan_problem
    planned: list[int] = []
    failing: list[int] = []
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def counted(*given, **more):
        planned.append(1)
        if failing:
            raise ZeroDivisionError("this is what went wrong")
        return plan(*given, **more)

    def compile_with(fn, **options):
        given = spmd.Options(unroll=0, **options)
        return spmd.jit(fn, mesh=mesh, in_specs=[("data",)], options=given).compile(x)

    def raised(run) -> str:
        try:
            run()
        except Exception as error:
            return f"{type(error).__name__} {error} {getattr(error, 'least_bytes', 0)}"
        return "nothing"

    spmd.compiler.plan_problem = counted
    orders = [jnp.sin, jnp.cos], [jnp.cos, jnp.sin]
    with ThreadPoolExecutor(2) as threads:  # each process begins with another one
        list(threads.map(compile_with, orders[jax.process_index()]))
    counts = launch.exchange(str(len(planned)), label="plans")
    is_short = raised(lambda: compile_with(jnp.cumsum, memory_limit=1))
    failing.append(1)
    failed = raised(lambda: compile_with(jnp.tanh))
    spmd.compiler.plan_problem = plan
    return {
        "counts": counts,
        "short": launch.exchange(is_short, label="short"),
        "failed": launch.exchange(failed, label="failed"),
    }


def mismatches(mesh: spmd.Mesh) -> dict[str, str]:
    """Process 1 differs in a flag, in the mesh, in the program, in an option, in its place."""
    odd = jax.process_index() == 1

    def compile_with(factor=2.0, axes="data", options=None, over=None, ahead=False, rows=8):
        over = over or (
            mesh if axes == "data" else spmd.Mesh(mesh.device_ids, (mesh.size,), (axes,))
        )
        x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
        fn = spmd.jit(
            lambda x: jnp.sum(x * factor),
            mesh=over,
            in_specs=[(axes,)],
            options=options or spmd.Options(),
        )
        return (lambda: fn.lower(x).compile()) if ahead else lambda: fn.compile(x)

    xla = {"xla_backend_optimization_level": 1 if odd else 0}
    return {
        "flag": message(lambda: launch.check_same({"--steps": "20" if odd else "10"})),
        "program": message(compile_with(factor=3.0 if odd else 2.0)),
        "lowered": message(compile_with(factor=3.0 if odd else 2.0, ahead=True)),
        "mark": message(compile_with(axes="model" if odd else "data", over=mesh)),
        "shape": message(compile_with(rows=6 if odd else 8)),
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
        found["planning"] = planning(mesh)
    if launch.is_main_process():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
