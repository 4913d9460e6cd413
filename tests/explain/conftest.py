"""A small training step, compiled once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from benchmarks.programs.program import marked, struct
from tests.explain.programs import trained


def train_step(mesh: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            h = spmd.mark_sharding(batch["x"] @ p["w_in"], mesh, ("data", "model"))
            return jnp.mean((jax.nn.relu(h) @ p["w_out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.heavy)], ids=["scan", "unrolled"]
)
def training(request: Any) -> spmd.Lowered:
    return trained(request.param)


@pytest.fixture(scope="session")
def compiled(devices8: Any) -> Any:
    """An MLP's training step on a mesh of data=4, model=2; one argument's name needs escaping."""
    mesh = spmd.make_mesh(data=4, model=2)

    params = {
        "w_in": marked(mesh, ("data", "model"), (16, 32)),
        "w_out": marked(mesh, ("model", "data"), (32, 8)),
        "<b>&": struct((8,)),
    }
    batch = {name: marked(mesh, ("data", None), (8, n)) for name, n in (("x", 16), ("y", 8))}
    return spmd.jit(train_step(mesh), mesh=mesh, donate_argnums=0).compile(params, batch)
