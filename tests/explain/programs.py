"""Programs whose reports several tests read."""

import re
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd.explain.page.page import render
from tests.programs import llama

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))


def lowered(
    fn: Any, *shapes: Any, specs: Any = None, topology: str = "h200:8", **options: Any
) -> spmd.Lowered:
    """A function of float32 arrays on `MESH`, for a machine that is not here."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jitted = spmd.jit(fn, mesh=MESH, in_specs=specs, **options)
    return jitted.lower(*structs, topology=spmd.Topology(topology))


@lru_cache
def trained(is_scanned: bool) -> spmd.Lowered:
    planner = "exact" if is_scanned else "greedy"
    training = llama(spmd.make_mesh(data=4, model=2), "adamw", is_scanned)
    return training.lower(topology=spmd.Topology("h200:8"), planner=planner)


def assert_text_and_page_have(items: Any, of: spmd.Lowered, section: str) -> None:
    """The title and all figures of each item."""
    text = of.explain(prices=False).partition(f"\n{section}\n")[2]
    page = render(of._report())
    for item in items:
        assert item.title in text and item.title in page
        for what, figures in item.rows:
            assert re.search(rf"{what} +{re.escape(figures)}", text)
            assert f"<dt>{what}</dt><dd>{figures}</dd>" in page


def pipelined_step(schedule: str, stages: int = 4, microbatches: int = 8) -> spmd.Lowered:
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
