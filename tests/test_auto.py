"""Specs that nobody gave: chosen, printed, pasted back, run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.api import path_name
from spmd.auto import AutoSharding, auto_specs
from spmd.mesh.spec import jax_mesh, match_patterns
from spmd.planning.plan import Weighed
from tests.lowering import manual_programs

pytestmark = pytest.mark.usefixtures("devices8")
OPTIMIZER = optax.adam(1e-2)
H200 = spmd.Topology("h200:8")


def step(params: Any, state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        h = x
        for layer in p["layers"]:
            h = jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def structs(batch: int, size: int) -> Any:
    matrix = jax.ShapeDtypeStruct((size, size), jnp.float32)
    params = {"layers": [{"up": matrix, "down": matrix} for _ in range(3)]}
    state = jax.eval_shape(OPTIMIZER.init, params)
    return params, state, jax.ShapeDtypeStruct((batch, size), jnp.float32)


def test_a_large_batch_is_split_over_everything(mesh: spmd.Mesh) -> None:
    found = spmd.auto(step, mesh, *structs(1 << 16, 1024), topology=H200, donate_argnums=(0, 1))
    assert found.specs["x"][0] == ("data", "model")
    again = found.jitted.lower(*found.mark(*structs(1 << 16, 1024)), topology=H200)
    assert again.cost <= found.seconds * 1.02
    text = str(found)
    assert "mesh = spmd.make_mesh(data=4, model=2)" in text
    assert text.count("layers/*/up") == 1  # of three layers that agree
    assert "# state: inferred" in text


def test_a_memory_limit_splits_parameters() -> None:
    mesh = spmd.make_mesh(data=8)
    args = structs(1 << 14, 2048)
    free = spmd.auto(step, mesh, *args, topology=H200, donate_argnums=(0, 1))
    tight = spmd.auto(
        step, mesh, *args, topology=H200, memory_limit=250 << 20, donate_argnums=(0, 1)
    )
    assert tight.specs["params/layers/0/up"] != (None, None)
    assert tight.seconds >= free.seconds
    with pytest.raises(spmd.PlanError, match="auto found no plan"):
        spmd.auto(step, mesh, *args, topology=H200, memory_limit=1 << 20, donate_argnums=(0, 1))


def test_marks_are_kept_and_the_mesh_is_chosen() -> None:
    meshes = [spmd.make_mesh(data=8), spmd.make_mesh(data=2, model=4)]
    params, state, x = structs(64, 256)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = spmd.auto(step, meshes, params, state, x, topology=H200, donate_argnums=(0, 1))
    assert len(found.considered) == 2
    assert found.seconds == min(entry.seconds for entry in found.considered if entry.seconds)
    marked = spmd.mark_sharding(x, meshes[0], (None, "data"))
    kept = spmd.auto(step, meshes[0], params, state, marked, topology=H200, donate_argnums=(0, 1))
    assert kept.specs["x"] == (None, "data")


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("name", ["scan_inside", "nested"])
def test_manual_axes_are_left_alone(name: str) -> None:
    mesh = spmd.make_mesh(x=2, y=2, z=2)
    fn = next(p for p in manual_programs.PROGRAMS if p.name == name).make(jax_mesh(mesh))
    args = (manual_programs.X, manual_programs.W)
    found = spmd.auto(fn, mesh, *args, topology=H200)
    assert_close(found.jitted(*found.mark(*args)), jax.jit(fn)(*args))


def test_what_is_chosen_runs(mesh: spmd.Mesh) -> None:
    rng = np.random.default_rng(0)
    drawn = lambda s: jnp.asarray(rng.normal(size=s.shape) / 8, s.dtype)  # noqa: E731
    params = jax.tree.map(drawn, structs(32, 64)[0])
    state, x = OPTIMIZER.init(params), jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    found = spmd.auto(step, mesh, params, state, x, topology=H200)
    assert_close(found.jitted(*found.mark(params, state, x)), jax.jit(step)(params, state, x))


def forward(count: int, x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) * count


def forward_structs() -> tuple[Any, Any]:
    x = jax.ShapeDtypeStruct((1 << 14, 256), jnp.float32)
    return x, jax.ShapeDtypeStruct((256, 256), jnp.float32)


@pytest.mark.parametrize(("spec", "dim"), [((..., "data"), 1), (("model", ...), 0)])
def test_an_open_dim_is_split_and_a_marked_one_stays(spec: Any, dim: int, mesh: spmd.Mesh) -> None:
    x, w = forward_structs()
    marked = spmd.mark_sharding(x, mesh, spec)
    found = spmd.auto(forward, mesh, 3, marked, w, topology=H200, static_argnums=0)
    own = found.specs["x"][dim]
    assert own == spec[dim] or own[0] == spec[dim]


def test_static_arguments_are_not_marked(mesh: spmd.Mesh) -> None:
    x, w = forward_structs()
    found = spmd.auto(forward, mesh, 3, x, w, topology=H200, static_argnums=0)
    count, x, w = found.mark(3, x, w)
    assert count == 3
    assert x.sharding.spec == jax.P(*found.specs["x"])
    with pytest.raises(spmd.SpmdError, match="actual: 1 leaves") as error:
        found.mark(3, x)
    assert error.value.required == "2: x, w"


def test_a_module_is_planned_with_its_own_marks_and_all_options(mesh: spmd.Mesh) -> None:
    by_columns = jax.NamedSharding(jax_mesh(mesh), jax.P(None, "data"))
    x, w = forward_structs()

    def specs(planner: Any, *shardings: Any) -> Any:
        fn = jax.jit(lambda x, w: forward(3, x, w), in_shardings=shardings)
        options = spmd.Options(topology=H200, planner=planner)
        return auto_specs(fn.lower(x, w).compiler_ir(), mesh, (None, None), options=options)

    assert specs("exact", None, None)[0] == (("data", "model"), None)
    assert specs("exact", by_columns, None)[0] == (None, "data")
    # The greedy planner leaves arguments as the marks suggest.
    assert specs("greedy", None, None) == [(None, None), (None, None)]


KEYS = st.sampled_from(["0", "1", "10", "w", "z", "w[0]", "w0", "a?", "ab"])
SPECS = st.sampled_from([("data", None), (None, "data")]).map(lambda spec: {"": spec})
TREES = st.recursive(SPECS, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=4))


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
def test_printed_rules_give_each_leaf_its_spec(tree: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: list(node) == [""])
    specs = {path_name(path): spec[""] for path, spec in leaves}
    mesh = spmd.Mesh(None, (8,), ("data",))
    named = {f"params/{name}": spec for name, spec in specs.items()}
    others = (Weighed("data=4", 0.0, 0.0, "another one is faster"),)
    found = AutoSharding(mesh, named, 0.0, frozenset(), others, Any)  # type: ignore[arg-type]
    rules = found.rules("params")
    matched = match_patterns(rules, tuple(specs), what="leaf")
    assert [rules[pattern or ""] for pattern in matched] == list(specs.values())
    assert str(found).endswith("# data=4: 0 ms")
