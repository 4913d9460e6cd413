"""Lowered and compiled programs: what they tell, creating their arguments, saving them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import spmd
from spmd.errors import ArgumentError


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4)])
def test_created_arguments_are_those_of_one_device(sizes: tuple[int, int]) -> None:
    mesh = spmd.make_mesh(data=sizes[0], model=sizes[1])

    def make(key: jax.Array) -> dict[str, jax.Array]:
        w_key, b_key = jax.random.split(key)
        return {"b": jax.random.uniform(b_key, (16,)), "w": jax.random.normal(w_key, (16, 32))}

    specs = {"b": ("model",), "w": ("data", "model")}
    key = jax.random.key(3)
    step = spmd.jit(lambda params: params, mesh=mesh, in_specs=(specs,))
    compiled = step.compile(jax.eval_shape(make, key))
    created: Any = compiled.init(0, make, key)
    whole = jax.jit(make)(key)
    for name in specs:
        wanted = compiled.in_shardings[0][name]
        assert created[name].sharding == wanted
        assert created[name].addressable_shards[0].data.shape == wanted.shard_shape(
            whole[name].shape
        )
        np.testing.assert_array_equal(created[name], whole[name])


def test_calls_after_the_first_run_without_python(
    mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, noise = jax.random.split(key)
        return key, x + jax.random.uniform(noise, x.shape)

    x, key, whole = jnp.arange(8.0), jax.random.key(0), jax.jit(step)
    wanted_key, wanted = whole(whole(key, x)[0], x)
    for donated in ((), (0,)):
        jitted: Any = spmd.jit(step, mesh=mesh, in_specs=(None, ("data",)), donate_argnums=donated)
        for fn in (jitted, jitted.lower(key, x).compile()):
            first, _ = fn(key.copy(), x)
            fn(first.copy(), x)  # the first call with a key that lies on the mesh
            with monkeypatch.context() as without:
                without.delattr(spmd.Compiled, "run")
                other, made = fn(first, x)
            np.testing.assert_array_equal(made, wanted)
            assert other == wanted_key
            if donated:
                with pytest.raises(ArgumentError, match="deleted"):
                    fn(first, x)
        with pytest.raises(ArgumentError, match="another type"):
            fn(key, x[:4])


def test_a_partitioned_program_is_exported_and_called_elsewhere(mesh: spmd.Mesh) -> None:
    pytest.importorskip("flatbuffers")

    def fn(params: Any, x: Any, *, scale: Any) -> Any:
        y = jnp.tanh(x @ params["w"]) * scale
        return {"y": y, "sum": y.sum()}

    w = spmd.mark_sharding(jnp.arange(512.0).reshape(16, 32) / 512, mesh, (None, "model"))
    x = spmd.mark_sharding(jnp.ones((8, 16)), mesh, ("data",))
    again = jax.export.deserialize(spmd.jit(fn).lower({"w": w}, x, scale=2.0).export().serialize())
    assert again.nr_devices == 8
    assert "sdy.manual_computation" in again.mlir_module()
    got, want = again.call({"w": w}, x, scale=2.0), fn({"w": w}, x, scale=2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


saved: Any = serialize_executable.serialize  # it is typed for `jax.stages.Compiled` alone


def scaled(params: Any, x: Any, scale: Any = 1.0) -> Any:
    return {"y": jnp.tanh(x @ params["w"]) * scale, "w": params["w"] * 2}


def test_stages_have_what_those_of_jax_have(mesh: spmd.Mesh) -> None:
    x, params = np.ones((64, 32), np.float32), {"w": np.ones((32, 16), np.float32)}
    theirs: Any = jax.jit(scaled, donate_argnums=0).lower(params, x, scale=2.0)
    ours = spmd.jit(scaled, mesh=mesh, donate_argnums=0).lower(params, x, scale=2.0)
    for own, their in ((ours, theirs), (ours.compile(), theirs.compile())):
        # `call` is `jax.stages.Compiled`'s own way of a call.
        public = [name for name in dir(their) if not name.startswith("_") and name != "call"]
        assert [name for name in public if not hasattr(own, name)] == []
        for name in ("in_tree", "out_tree", "donate_argnums"):
            assert getattr(own, name) == getattr(their, name), name
        for name in ("in_avals", "args_info", "out_info"):
            trees: list[Any] = [jax.tree.structure(getattr(each, name)) for each in (own, their)]
            assert trees[0] == trees[1], name
        assert str(own.in_avals) == str(their.in_avals)
        assert str(own.args_info) == str(their.args_info)
        assert repr(own.out_avals["y"]) == "ShapedArray(float32[64,16])"
    compiled = ours.compile()
    assert not hasattr(compiled, "compile") and not isinstance(compiled, spmd.Lowered)
    assert compiled.collectives == ours.collectives
    assert compiled.out_info["y"].sharding == compiled.out_shardings["y"]
    assert compiled.input_formats[0][1].sharding == compiled.input_shardings[0][1]
    assert compiled.output_formats == compiled.out_formats


def test_operations_are_counted_before_and_after_xla(mesh: spmd.Mesh) -> None:
    x: Any = spmd.mark_sharding(np.ones((64, 32), np.float32), mesh, ("data",))
    w = np.random.default_rng(0).standard_normal((32, 1024), np.float32)  # a constant
    lowered = spmd.jit(lambda x: jnp.tanh(x @ w), mesh=mesh, out_specs=("data", "model")).lower(x)
    assert lowered.stages.emitted.constants
    whole: Any = jax.jit(lambda x: jnp.tanh(x @ w)).lower(x).cost_analysis()
    for planned in (lowered, lowered.compile()):
        assert planned.cost_analysis()["flops"] == pytest.approx(whole["flops"] / 8, rel=0.05)
    there = spmd.make_mesh(data=16, model=2, topology="h200:32")  # of which nothing is here
    other = spmd.jit(scaled, mesh=there, out_specs={"y": ("data", "model"), "w": ()})
    lowered = other.lower({"w": np.ones((32, 1024), np.float32)}, np.ones((64, 32), np.float32))
    assert 0 < lowered.cost_analysis()["flops"] < whole["flops"] / 8


def test_a_compiled_program_is_saved_as_jax_saves_it(mesh: spmd.Mesh) -> None:
    x = spmd.mark_sharding(np.ones((8, 16), np.float32), mesh, ("data",))
    params = {"w": spmd.mark_sharding(np.ones((16, 4), np.float32), mesh, (None, "model"))}
    compiled = spmd.jit(scaled, mesh=mesh, donate_argnums=0).compile(params, x, scale=2.0)
    again = serialize_executable.deserialize_and_load(*saved(compiled))
    results, wanted = again(params, x, scale=2.0), scaled({"w": np.ones((16, 4))}, np.ones((8, 16)))
    np.testing.assert_allclose(results["y"], 2 * wanted["y"], rtol=1e-6)
    assert results["y"].sharding == compiled.out_shardings["y"]
    assert params["w"].is_deleted()
    with pytest.raises(TypeError, match=r"was called with|compiled with"):
        again(params, x)


def test_what_jax_would_not_save_is_refused(mesh: spmd.Mesh) -> None:
    w = np.random.default_rng(0).standard_normal((16, 4096), np.float32)
    x, key = np.ones((8, 16), np.float32), jax.random.key(0)
    constant = spmd.jit(lambda x: x @ w, mesh=mesh).compile(x)
    with pytest.raises(ArgumentError, match=r"without its large constants(.*\n)*.*as arguments"):
        saved(constant)
    drawn = spmd.jit(lambda key: jax.random.normal(key, (8,)), mesh=mesh).compile(key)
    with pytest.raises(ArgumentError, match=r"key arrays(.*\n)*.*jax.random.key_data"):
        saved(drawn)
    # As it says.
    passed = spmd.jit(lambda x, w: x @ w, mesh=mesh).compile(x, w)
    again = serialize_executable.deserialize_and_load(*saved(passed))
    np.testing.assert_allclose(again(x, w), constant(x), rtol=1e-6)
