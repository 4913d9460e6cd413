"""Arguments that nobody marked: how they lie is weighed with everything else."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import spmd
from spmd.mesh.sharding import format_sharding


def training_step(mesh: spmd.Mesh, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """README's first program, with a batch that may be marked."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden = jax.nn.relu(batch["x"] @ params["w_in"])
            return jnp.mean((hidden @ params["w_out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {
        "w_in": spmd.mark_sharding(jnp.ones((256, 1024)), mesh, ("data", "model")),
        "w_out": spmd.mark_sharding(jnp.ones((1024, 256)), mesh, ("model", "data")),
    }
    return step, (params, jax.eval_shape(optimizer.init, params), batch)


def lowered(batch: Any, topology: str | None = None) -> spmd.Lowered:
    mesh = spmd.make_mesh(data=4, model=2)
    step, args = training_step(mesh, batch)
    jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1))
    return jitted.lower(*args, topology=spmd.Topology(topology) if topology else None)


def placed(program: spmd.Lowered) -> dict[str, str]:
    plan = program.stages.plan
    names = plan.program.arg_names
    return dict(zip(names, [format_sharding(s, plan.mesh) for s in plan.arguments], strict=True))


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize("topology", [None, "v5e:2x4"])
def test_the_rows_of_a_batch_that_nobody_marked_are_split(topology: str | None) -> None:
    rows = 4096 if topology is None else 1 << 16
    shape = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    found = lowered({"x": shape, "y": shape}, topology)
    lies = placed(found)
    assert lies["batch/x"].startswith("[{data"), lies
    assert lies["batch/y"].startswith("[{data"), lies
    marked = spmd.mark_sharding(shape, found.mesh, ("data", None))
    assert found.cost <= 1.01 * lowered({"x": marked, "y": marked}, topology).cost


@pytest.mark.usefixtures("devices8")
def test_what_is_marked_stays_and_optimizer_state_lies_like_its_parameter(mesh: spmd.Mesh) -> None:
    shape = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    lies = placed(lowered({"x": spmd.mark_sharding(shape, mesh, (None, "model")), "y": shape}))
    assert lies["batch/x"] == "[{}, {model}]"
    for moment in ("mu", "nu"):
        assert lies[f"opt_state/0/{moment}/w_in"] == lies["params/w_in"] == "[{data}, {model}]"
