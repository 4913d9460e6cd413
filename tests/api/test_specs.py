"""Specs of arguments and results, as `spmd.jit` takes them."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import SpecError
from spmd.mesh.spec import jax_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """Lists within an object, as caches of several layers are."""

    k: list[Any]
    count: Any


def test_results_and_their_shardings_follow_the_specs(mesh: spmd.Mesh) -> None:
    fn = lambda x, w: {"y": x @ w, "sum": x.sum()}  # noqa: E731
    specs, results = (("data", None), (None, "model")), {"y": ("data", "model"), "sum": ()}
    step = spmd.jit(fn, mesh=mesh, in_specs=specs, out_specs=results)
    x, w = np.arange(64, dtype=np.float32).reshape(8, 8), np.ones((8, 4), np.float32)
    out = step(x, w)
    np.testing.assert_allclose(out["y"], x @ w)
    np.testing.assert_allclose(out["sum"], x.sum())
    assert out["y"].sharding.spec == P("data", "model")
    assert out["sum"].sharding.is_fully_replicated
    for both in [(("data",), None), [("data",), ("model",)], (("data", "model"), ())]:
        two = spmd.jit(lambda x: (x * 2, x + 1), mesh=mesh, out_specs=both)
        doubled, _ = two(np.ones((8, 8), np.float32))
        assert doubled.sharding.spec[0] == "data"


def test_specs_of_lists_within_arguments_and_results(mesh: spmd.Mesh) -> None:
    data, whole = (NamedSharding(jax_mesh(mesh), spec) for spec in (P("data"), P()))
    specs = (whole, Cache([data, data], whole))

    def step(x: Any) -> Any:
        return x.sum(), Cache([x, x * 2], jnp.ones(8))

    total, cache = spmd.jit(step, mesh=mesh, out_shardings=specs)(np.ones((8, 8), np.float32))
    assert [total.sharding, *(k.sharding for k in cache.k), cache.count.sharding] == [
        *(whole, data, data, whole)
    ]
    lists = {"a": [P("data"), P(None, "model")], "b": P("model")}
    tree = {"a": [np.ones((8, 8), np.float32)] * 2, "b": [np.ones((8, 8), np.float32)]}
    out = spmd.jit(lambda tree: tree, mesh=mesh, in_specs=(lists,), out_specs=lists)(tree)
    found = [tuple(leaf.sharding.spec) for leaf in (*out["a"], *out["b"])]
    assert [spec + (None,) * (2 - len(spec)) for spec in found] == [
        ("data", None), (None, "model"), ("model", None)
    ]  # fmt: skip


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


@pytest.mark.parametrize("specs", [(("data", None),), {"y": ("data", None)}])
def test_a_tree_of_specs_for_one_array(mesh: spmd.Mesh, specs: Any) -> None:
    options: list[Any] = [{"out_specs": specs}, {"in_specs": (specs,)}]
    for what, given in zip(("the result", "argument x"), options, strict=True):
        with pytest.raises(SpecError, match=f"{what} don't match.*(?s:.*); no spec for itself"):
            spmd.jit(lambda x: x * 2, mesh=mesh, **given)(np.ones((8, 4), np.float32))


def test_specs_where_there_are_no_arrays(mesh: spmd.Mesh) -> None:
    with pytest.raises(SpecError, match="required: specs for no arrays"):
        spmd.jit(lambda x: (), mesh=mesh, out_specs={"y": ("data",)})(np.ones(8))


def split_sum(x: Any, w: Any) -> Any:
    return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", None, unreduced={"model"}))


def test_values_that_are_not_added_up_stay_outside() -> None:
    own = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w = np.arange(64, dtype=np.float32).reshape(8, 8), np.ones((8, 4), np.float32)

    def added(y: Any) -> Any:
        return jax.sharding.reshard(y, P("data", None))

    with jax.set_mesh(own):
        x_split = jax.device_put(x, NamedSharding(own, P("data", "model")))
        w_split = jax.device_put(w, NamedSharding(own, P("model", None)))
        terms = jax.jit(split_sum)(x_split, w_split)
        struct = jax.ShapeDtypeStruct(terms.shape, terms.dtype, sharding=terms.sharding)
        unreduced = P("data", unreduced={"model"})
        refused: dict[str, Any] = {
            "argument y": lambda: spmd.jit(added)(terms),
            "argument y ": lambda: spmd.jit(added).lower(struct),
            "argument x": lambda: spmd.jit(split_sum, in_specs=(unreduced, None))(x_split, w_split),
            "the result": lambda: spmd.jit(split_sum)(x_split, w_split),
            "result y": lambda: spmd.jit(lambda *a: {"y": split_sum(*a)})(x_split, w_split),
            "the result ": lambda: spmd.jit(added, out_specs=unreduced)(x),
            "a tensor of shape": lambda: spmd.mark_sharding(x, own, unreduced),
        }
        for what, call in refused.items():
            message = f"^{what.strip()}.*is unreduced over model"
            with pytest.raises(SpecError, match=message) as caught:
                call()
            assert caught.value.source and "test_specs.py" in caught.value.source
            assert caught.value.fix and "jax.sharding.reshard" in caught.value.fix
        # As it says.
        np.testing.assert_allclose(spmd.jit(added)(added(terms)), x @ w)
        np.testing.assert_allclose(
            spmd.jit(lambda *a: added(split_sum(*a)))(x_split, w_split), x @ w
        )


@pytest.mark.filterwarnings("ignore:.*nothing is split over axis")
def test_values_whose_gradients_are_to_be_added_up_lie_as_without() -> None:
    own = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w = np.arange(64, dtype=np.float32).reshape(8, 8), np.ones((8, 4), np.float32)

    with jax.set_mesh(own):
        x_split = jax.device_put(x, NamedSharding(own, P("data")))
        w_reduced = jax.device_put(w, NamedSharding(own, P(None, None, reduced={"data"})))
        doubled = spmd.jit(lambda w: w * 2)(w_reduced)
        assert doubled.sharding == jax.jit(lambda w: w * 2)(w_reduced).sharding
        gradient = jax.grad(lambda w, x: ((x @ w) ** 2).sum())
        found = spmd.jit(lambda *a: jax.sharding.reshard(gradient(*a), P()))(w_reduced, x_split)
    np.testing.assert_allclose(found, gradient(w, x), rtol=1e-5)
