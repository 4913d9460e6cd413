"""Experts that most tokens take, computed where the tokens are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.description import COMPOSITE
from spmd.mesh.sharding import local_shape
from spmd.models.llama.config import ConfigError
from spmd.models.llama.experts import mixture
from spmd.models.llama.named import CONFIGS
from tests.close import close

CONFIG = dataclasses.replace(CONFIGS["tiny"], num_experts=8, num_experts_per_tok=2)
ROWS, NAMES = ("expert",), ("gate_proj", "up_proj", "down_proj")
SPLIT = {"gate": {"weight": ()}, "experts": {name: {"weight": ("expert",)} for name in NAMES}}


def weights(hidden: int, inner: int) -> Any:
    """Structs of a router and its experts."""
    struct = lambda *shape: {"weight": jax.ShapeDtypeStruct(shape, jnp.float32)}  # noqa: E731
    shapes = ((8, inner, hidden), (8, inner, hidden), (8, hidden, inner))
    experts = {name: struct(*shape) for name, shape in zip(NAMES, shapes, strict=True)}
    return {"gate": struct(8, hidden), "experts": experts}


def loss(hot: int) -> Any:
    def run(x: Any, weights: Any) -> Any:
        out, loads = mixture(weights, x, CONFIG, hot)
        return jnp.sum(jnp.sin(out)), loads

    return jax.value_and_grad(run, (0, 1), has_aux=True)


def test_the_same_numbers(devices8: Any) -> None:
    """Half of the choices are of two experts of one device."""
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape) / 4, jnp.float32)  # noqa: E731
    x, given = draw(np.zeros((8, 16, 16))).at[..., 0].set(3), jax.tree.map(draw, weights(16, 24))
    given["gate"]["weight"] = given["gate"]["weight"].at[:2, 0].set(3)
    want = jax.jit(loss(0))(x, given)
    assert want[0][1][0, :2].sum() > 1.9  # of two
    close(jax.jit(loss(2))(x, given), want)
    mesh = spmd.make_mesh(expert=4, devices=devices8[:4])
    close(spmd.jit(loss(2), mesh=mesh, in_specs=(ROWS, SPLIT)).compile(x, given)(x, given), want)


def test_rows_of_hot_experts_stay_where_they_are() -> None:
    """The others' are sent: a device has a quarter of the rows and two experts in both ops."""
    x = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.float32)
    jitted = spmd.jit(loss(2), mesh=spmd.Mesh(None, (4,), ("expert",)), in_specs=(ROWS, SPLIT))
    plan = jitted.lower(x, weights(2048, 8192), topology=spmd.Topology("h200:4")).stages.plan
    found = [
        [
            local_shape(op.kind.operands[i].shape, plan.choice(op).operands[i], plan.mesh)[0]
            for i in (0, 4)
        ]
        for op in plan.program.walk()
        if op.name == COMPOSITE and op.kind.attrs["name"] == "spmd.experts"
    ]
    assert found == [[2, 2], [2, 2]]


def test_there_are_not_more_than_experts() -> None:
    with pytest.raises(ConfigError, match="hot_experts 9: there are 8"):
        dataclasses.replace(CONFIG, hot_experts=9)
