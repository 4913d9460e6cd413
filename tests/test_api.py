"""`spmd.jit` as a user meets it: specs, static arguments, caches, keys, meshes of jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd


@pytest.fixture
def mesh() -> spmd.Mesh:
    return spmd.make_mesh(data=4, model=2)


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


def test_one_compilation_serves_arrays_where_it_put_them(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda w, s: (w * 2, s + w), mesh=mesh)
    w = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "model"))
    compiled = step.compile(w, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert compiled.in_shardings[1].spec == P("data", "model")
    state = compiled.init(1, lambda: jnp.zeros((8, 8)))
    for _ in range(3):
        w, state = step(w, state)
    assert sum(map(len, step._cache.values())) == 1
    np.testing.assert_allclose(state, np.full((8, 8), 7.0))


def test_other_shardings_compile_anew(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x * 2, mesh=mesh)
    step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",)))
    out = step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, (None, "model")))
    assert out.sharding.spec == P(None, "model")
    assert sum(map(len, step._cache.values())) == 2


def test_static_arguments(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array, power: int, *, mode: str = "a") -> jax.Array:
        return x**power if mode == "a" else -(x**power)

    step = spmd.jit(fn, mesh=mesh, static_argnums=1, static_argnames="mode")
    x = jnp.full((8,), 3.0)
    np.testing.assert_allclose(step(x, 2), np.full(8, 9.0))
    np.testing.assert_allclose(step(x, 3, mode="b"), np.full(8, -27.0))


def test_keyword_arguments_and_scalars(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, *, scale: x * scale, mesh=mesh)
    np.testing.assert_allclose(step(jnp.ones(8), scale=2.0), np.full(8, 2.0))


def test_donated_arguments_are_gone(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
    x = spmd.mark_sharding(jnp.zeros((8, 8)), mesh, ("data", "model"))
    y = step(x)
    assert x.is_deleted()
    assert y.sharding == NamedSharding(y.sharding.mesh, P("data", "model"))


def test_mesh_is_taken_from_arguments_or_marks(mesh: spmd.Mesh) -> None:
    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",))
    assert spmd.jit(lambda x: x * 2)(x).sharding.spec == P("data", None)

    def fn(x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x * 2, mesh, (None, "model"))

    assert spmd.jit(fn)(np.ones((8, 8), np.float32)).sharding.spec == P(None, "model")


def test_explicit_meshes_of_jax_come_in_and_go_out() -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(explicit, P("data", "model")))
    out = spmd.jit(lambda x: x * 2, mesh=explicit)(x)
    np.testing.assert_allclose(out, np.full((8, 8), 2.0))
    assert out.sharding.mesh == explicit
    assert out.sharding.spec == P("data", "model")


def test_open_dims_are_filled_in(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x * 2, mesh, (..., "model"))

    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",))
    assert spmd.jit(fn, mesh=mesh)(x).sharding.spec == P("data", "model")


def test_mark_sharding_runs_under_plain_jit_and_marks_gradients(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return (spmd.mark_sharding(x, mesh, ("data", None)) ** 2).sum()

    x = jnp.arange(64.0).reshape(8, 8)
    np.testing.assert_allclose(jax.jit(jax.grad(fn))(x), 2 * x)
    text = jax.jit(jax.grad(fn)).lower(x).as_text()
    assert text.count("sharding_constraint") == 2


def test_mesh_axis_indices_and_tuples(mesh: spmd.Mesh) -> None:
    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ((0, "model"), None))
    assert x.sharding.spec == P(("data", "model"), None)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_arrays(mesh: spmd.Mesh, impl: str) -> None:
    def fn(key: Any, x: jax.Array) -> Any:
        return jax.random.split(key)[0], x + 1

    given = jax.random.key(1, impl=impl)
    key, _ = spmd.jit(fn, mesh=mesh)(given, jnp.ones(8))
    assert key.dtype == given.dtype
    want = jax.random.key_data(jax.random.split(given)[0])
    np.testing.assert_array_equal(jax.random.key_data(key), want)


def test_lowering_needs_no_devices() -> None:
    mesh = spmd.Mesh(None, (32, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), mesh, (None, "model"))
    lowered = spmd.jit(lambda x, w: x @ w, mesh=mesh, in_specs=(("data",), None)).lower(
        x, w, topology=spmd.Topology("v5e:16x16")
    )
    assert "32x512xbf16" in lowered.as_text("local")


def test_every_stage_prints(mesh: spmd.Mesh) -> None:
    compiled = spmd.jit(lambda x: (x * 2).sum(), mesh=mesh, in_specs=(("data",),)).compile(
        np.ones(8, np.float32)
    )
    for stage in spmd.api.STAGES:
        assert compiled.as_text(stage)
    with pytest.raises(spmd.ArgumentError, match="unknown stage"):
        compiled.as_text("nonsense")


def test_a_modules_result_marks_are_kept_unless_a_spec_is_given():
    module = """module {
      sdy.mesh @mesh = <["data"=4, "model"=2]>
      func.func @main(%x: tensor<8x16xf32>) -> (
          tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
          tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}) {
        %0 = stablehlo.sine %x : tensor<8x16xf32>
        %1 = stablehlo.cosine %x : tensor<8x16xf32>
        return %0, %1 : tensor<8x16xf32>, tensor<8x16xf32>
      }
    }"""
    mesh = spmd.make_mesh(data=4, model=2)
    compiled = spmd.compile_stablehlo(module, mesh)
    assert [s.spec for s in compiled.out_shardings] == [P("data", "model"), P("model", None)]
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    np.testing.assert_allclose(compiled(x)[1], np.cos(x), rtol=1e-5, atol=1e-6)
    other = spmd.compile_stablehlo(module, mesh, result_specs=[(None, "data"), None])
    assert [s.spec for s in other.out_shardings] == [P(None, "data"), P("model", None)]


STEP = """module {
  func.func @main(%w: tensor<8x8xf32>, %h: tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<f32>) {
    %0 = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0]
      : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%h init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>
    return %0, %1 : tensor<4x8xf32>, tensor<f32>
  }
}"""


def test_updates_of_a_module_are_donated_and_lie_like_their_arguments() -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    specs = [None, ("data", None)]
    compiled = spmd.compile_stablehlo(STEP, mesh, specs, updates=[(0, 1)])
    assert compiled.out_shardings[0] == compiled.in_shardings[1]
    w = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    first = jax.device_put(np.ones((4, 8), np.float32), compiled.in_shardings[1])
    second, total = compiled(w, first)
    assert first.is_deleted()
    assert float(total) == 32
    np.testing.assert_allclose(second, np.ones((4, 8)) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([(1, 1)], "result 1 cannot take the place of argument 1"),
        ([(0, 5)], "result 0 cannot take the place of argument 5"),
        ([(0, 1), (0, 1)], "a result or an argument is in two updates"),
    ],
)
def test_updates_that_do_not_fit(updates: Any, message: str) -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    with pytest.raises(spmd.ArgumentError, match=message):
        spmd.lower_stablehlo(STEP, mesh, updates=updates)


def test_a_struct_keeps_its_open_dims() -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((8, 16), jnp.float32), mesh, (None, None))
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((16, 32), jnp.float32), mesh, ("data", ...))

    def fn(x: Any, w: Any) -> Any:
        return spmd.mark_sharding(x @ w, mesh, (None, "model"))

    compiled = spmd.jit(fn, mesh=mesh).compile(x, w)
    assert tuple(compiled.in_shardings[1].spec) == ("data", "model")
