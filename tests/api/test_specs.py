"""Specs of arguments and results, as `spmd.jit` takes them."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.mesh.spec import jax_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """Lists within an object, as caches of several layers are."""

    k: list[Any]
    count: Any


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


def test_specs_in_lists_inside_dicts(mesh: spmd.Mesh) -> None:
    specs = {"a": [P("data"), P(None, "model")], "b": P("model")}
    tree = {"a": [np.ones((8, 8), np.float32)] * 2, "b": [np.ones((8, 8), np.float32)]}
    step = spmd.jit(lambda tree: tree, mesh=mesh, in_specs=(specs,), out_specs=specs)
    out = step(tree)
    found = [tuple(leaf.sharding.spec) for leaf in (*out["a"], *out["b"])]
    assert [spec + (None,) * (2 - len(spec)) for spec in found] == [
        ("data", None), (None, "model"), ("model", None)
    ]  # fmt: skip


def test_specs_of_lists_within_results(mesh: spmd.Mesh) -> None:
    data, whole = (NamedSharding(jax_mesh(mesh), spec) for spec in (P("data"), P()))
    specs = (whole, Cache([data, data], whole))

    def step(x: Any) -> Any:
        return x.sum(), Cache([x, x * 2], jnp.ones(8))

    total, cache = spmd.jit(step, mesh=mesh, out_shardings=specs)(np.ones((8, 8), np.float32))
    assert [total.sharding, *(k.sharding for k in cache.k), cache.count.sharding] == [
        *(whole, data, data, whole)
    ]


def test_objects_that_are_changed_and_returned_are_no_loss(mesh: spmd.Mesh) -> None:
    def step(cache: Cache) -> Any:
        cache.k = [k + 1 for k in cache.k]
        return dataclasses.replace(cache, count=cache.count + 1)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*changes argument")
        out = spmd.jit(step, mesh=mesh)(Cache([np.ones(8, np.float32)], jnp.ones(())))
    np.testing.assert_array_equal(out.k[0], np.full(8, 2))


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
