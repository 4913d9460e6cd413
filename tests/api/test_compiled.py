"""Compiled programs: creating their arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd


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


def test_what_is_compiled_is_not_compiled_again(mesh: spmd.Mesh) -> None:
    lowered = spmd.jit(lambda x: x * 2, mesh=mesh).lower(np.ones(8, np.float32))
    compiled = lowered.compile()
    assert not hasattr(compiled, "compile")
    assert not isinstance(compiled, spmd.Lowered)
    assert compiled.collectives == lowered.collectives == ()


def test_a_partitioned_program_is_exported_and_called_elsewhere(mesh: spmd.Mesh) -> None:
    pytest.importorskip("flatbuffers")

    def fn(params: Any, x: Any, *, scale: Any) -> Any:
        y = jnp.tanh(x @ params["w"]) * scale
        return {"y": y, "sum": y.sum()}

    w = spmd.mark_sharding(jnp.arange(512.0).reshape(16, 32) / 512, mesh, (None, "model"))
    x = spmd.mark_sharding(jnp.ones((8, 16)), mesh, ("data",))
    lowered = spmd.jit(fn).lower({"w": w}, x, scale=2.0)
    again = jax.export.deserialize(lowered.export().serialize())
    assert again.nr_devices == 8
    assert "sdy.manual_computation" in again.mlir_module()
    got, want = again.call({"w": w}, x, scale=2.0), fn({"w": w}, x, scale=2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_keys_are_not_exported(mesh: spmd.Mesh) -> None:
    lowered = spmd.jit(jax.random.key_data, mesh=mesh).lower(jax.random.key(0))
    with pytest.raises(spmd.ArgumentError, match="key arrays, float0 or refs cannot be exported"):
        lowered.export()
