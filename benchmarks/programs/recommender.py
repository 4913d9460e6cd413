"""A recommender: embedding tables split by rows or columns, a small network, Adagrad."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from benchmarks.programs.program import Built, Program, marked, on_meshes

TABLES, ROWS, WIDTH, BATCH, BAG, DENSE, HIDDEN = 4, 8192, 64, 512, 4, 16, 128


def recommender_programs() -> list[Program]:
    """Tables over the axis of the batch, or over one of their own."""
    programs = []
    for name, dim in (("rows", 0), ("columns", 1)):
        programs += on_meshes(
            f"recommender/{name}", partial(build, dim=dim, axis="data"), "8x1"
        ) + on_meshes(
            f"recommender/{name}-own-axis", partial(build, dim=dim, axis="model"), "4x2", "2x4"
        )
    return programs


def build(mesh: spmd.Mesh, dim: int, axis: str) -> Built:
    """A training step with Adagrad; each example has `BAG` rows of each table, summed.

    Args:
      mesh: with axes `data` and `model`.
      dim: of the tables, split over `axis`.
      axis: the mesh axis.
    """

    def loss_fn(params: Any, ids: Any, dense: Any, clicks: Any) -> Any:
        bags = [params[f"table{t}"][ids[:, t]].sum(1) for t in range(TABLES)]
        x = jax.nn.relu(jnp.concatenate([*bags, dense], -1) @ params["hidden"])
        logits = (x @ params["out"])[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - clicks * logits)

    def step(params: Any, state: Any, ids: Any, dense: Any, clicks: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, ids, dense, clicks)
        state = jax.tree.map(lambda s, g: s + g * g, state, grads)
        params = jax.tree.map(
            lambda p, g, s: p - 0.1 * g * jax.lax.rsqrt(s + 1e-8), params, grads, state
        )
        return params, state, loss

    spec = (axis, None) if dim == 0 else (None, axis)
    shapes = {f"table{t}": (ROWS, WIDTH) for t in range(TABLES)}
    params = {name: marked(mesh, spec, shape) for name, shape in shapes.items()}
    params["hidden"] = marked(mesh, (None, None), (TABLES * WIDTH + DENSE, HIDDEN))
    params["out"] = marked(mesh, (None, None), (HIDDEN, 1))
    state = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
    batch = (
        marked(mesh, ("data",), (BATCH, TABLES, BAG), jnp.int32),
        marked(mesh, ("data",), (BATCH, DENSE)),
        marked(mesh, ("data",), (BATCH,)),
    )
    return Built(step, (params, state, *batch), donate=(0, 1))
