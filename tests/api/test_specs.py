"""Specs of arguments and results, as `spmd.jit` takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd


def test_results_and_their_shardings_follow_the_specs(mesh: spmd.Mesh) -> None:
    step = spmd.jit(
        lambda x, w: {"y": x @ w, "sum": x.sum()},
        mesh=mesh,
        in_specs=(("data", None), (None, "model")),
        out_specs={"y": ("data", "model"), "sum": ()},
    )
    x, w = np.arange(64.0).reshape(8, 8), np.ones((8, 4))
    x, w = x.astype(np.float32), w.astype(np.float32)
    out = step(x, w)
    np.testing.assert_allclose(out["y"], x @ w)
    np.testing.assert_allclose(out["sum"], x.sum())
    assert out["y"].sharding.spec == P("data", "model")
    assert out["sum"].sharding.is_fully_replicated


def test_a_spec_for_each_of_several_results(mesh: spmd.Mesh) -> None:
    for specs in [(("data",), None), [("data",), ("model",)], (("data", "model"), ())]:
        step = spmd.jit(lambda x: (x * 2, x + 1), mesh=mesh, out_specs=specs)
        doubled, _ = step(np.ones((8, 8), np.float32))
        assert doubled.sharding.spec[0] == "data"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Arrays, and an object that is equal to itself only."""

    params: Any
    maker: object = dataclasses.field(metadata={"static": True})


def test_specs_go_by_path_where_structures_hold_different_objects(mesh: spmd.Mesh) -> None:
    def specs(**params: Any) -> State:
        return State(params, object())

    def step(state: State) -> State:
        return State({"w": state.params["w"] * 2, "b": {"x": state.params["b"]["x"] + 1}}, object())

    state = State({"w": np.ones((8, 8), np.float32), "b": {"x": np.ones(8, np.float32)}}, object())
    wanted = specs(w=P(None, "model"), b=P("data"))
    out = spmd.jit(step, mesh=mesh, in_specs=(wanted,), out_specs=wanted)(state)
    np.testing.assert_array_equal(out.params["w"], np.full((8, 8), 2.0))
    assert out.params["w"].sharding.spec == P(None, "model")
    assert out.params["b"]["x"].sharding.spec == P("data")
    spmd.jit(step, mesh=mesh, out_specs=specs(w=P(), b=None, empty=()))(state)
    for wrong in [specs(w=P()), specs(w=P(), b=P(), c=P("data"))]:
        with pytest.raises(spmd.errors.SpecError, match="don't match its structure"):
            spmd.jit(step, mesh=mesh, out_specs=wrong)(state)
