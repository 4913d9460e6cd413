"""Bad input: one clear error with the op, the source line, the sizes and the fix."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd

THIS_FILE = "test_errors.py"


def message(error: type[spmd.SpmdError], run: Any) -> str:
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert text.count("\n  fix: ") == 1, text
    return text


def test_unknown_axis_names_the_axes_there_are(mesh: spmd.Mesh) -> None:
    text = message(
        spmd.SpecError, lambda: spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("dat", None))
    )
    assert "unknown axis 'dat'" in text
    assert "'data', 'model'" in text
    assert "fix: use 'data'" in text
    assert re.search(rf"at: .*{THIS_FILE}:\d+ \(test_unknown_axis", text)


def test_axis_used_twice(mesh: spmd.Mesh) -> None:
    text = message(
        spmd.SpecError, lambda: spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "data"))
    )
    assert "axis 'data' is used twice" in text
    assert "spec ('data', 'data')" in text
    assert THIS_FILE in text


def test_spec_longer_than_the_rank(mesh: spmd.Mesh) -> None:
    text = message(
        spmd.SpecError, lambda: spmd.mark_sharding(jnp.ones((8,)), mesh, ("data", "model"))
    )
    assert "2 entries for a tensor of rank 1" in text
    assert "drop 1" in text


def test_dim_that_does_not_divide(mesh: spmd.Mesh) -> None:
    x = jnp.ones((6, 8))
    text = message(spmd.SpecError, lambda: spmd.mark_sharding(x, mesh, ("data", None)))
    assert "dim 0 of a tensor of shape (6, 8) has size 6, which data=4 does not divide" in text
    assert "6 / 4 leaves 2" in text
    assert "pad the dim to 8" in text
    assert re.search(rf"at: .*{THIS_FILE}:\d+ \(test_dim_that", text)


def test_argument_that_does_not_divide_is_named(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x + 1, mesh=mesh, in_specs=(("data",),))
    text = message(spmd.SpecError, lambda: step(np.ones(6, np.float32)))
    assert "argument x has size 6, which data=4 does not divide" in text


def test_result_that_does_not_divide_is_named(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: {"y": x[:6]}, mesh=mesh, out_specs={"y": ("data",)})
    text = message(spmd.SpecError, lambda: step(np.ones(8, np.float32)))
    assert "result y has size 6, which data=4 does not divide" in text


def test_two_meshes_one_of_an_argument(mesh: spmd.Mesh) -> None:
    other = spmd.make_mesh(x=8)
    x = spmd.mark_sharding(jnp.ones((8, 8)), other, ("x",))
    text = message(spmd.MeshError, lambda: spmd.jit(lambda x: x * 2, mesh=mesh)(x))
    assert "two different meshes" in text
    assert "argument x" in text
    assert "(x=8)" in text
    assert "(data=4, model=2)" in text


def test_two_meshes_one_of_a_mark(mesh: spmd.Mesh) -> None:
    other = spmd.make_mesh(data=2, model=4)

    def fn(x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x * 2, other, ("data",))

    text = message(spmd.MeshError, lambda: spmd.jit(fn, mesh=mesh)(jnp.ones((8, 8))))
    assert "(data=2, model=4)" in text
    assert re.search(rf"{THIS_FILE}:\d+ \(.*fn\)", text)


def test_op_without_a_rule(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("nobody_wrote_this", jax.ShapeDtypeStruct((8, 4), jnp.float32))(x)

    text = message(spmd.UnsupportedOpError, lambda: spmd.jit(fn, mesh=mesh).lower(jnp.ones((8, 4))))
    assert "no sharding rule for op custom_call:nobody_wrote_this" in text
    assert "tensor<8x4xf32>" in text
    assert re.search(rf"at: .*{THIS_FILE}:\d+ \(.*fn\)", text)
    assert "register" in text


def test_no_mesh_at_all() -> None:
    text = message(spmd.MeshError, lambda: spmd.jit(lambda x: x * 2)(jnp.ones(8)))
    assert "has no mesh" in text
    assert "spmd.make_mesh" in text


def test_more_devices_than_there_are() -> None:
    text = message(spmd.MeshError, lambda: spmd.make_mesh(data=64))
    assert "needs 64 devices" in text
    assert "--xla_force_host_platform_device_count=64" in text


@pytest.mark.parametrize(
    ("shape", "names", "words"),
    [
        ((4, 2), ("a", "a"), "'a' is used twice"),
        ((4, 2), ("a",), "2 sizes and 1 names"),
        ((0,), ("a",), "size 0"),
    ],
)
def test_meshes_that_cannot_be(shape: Any, names: Any, words: str) -> None:
    assert words in message(spmd.MeshError, lambda: spmd.Mesh(None, shape, names))


def test_pattern_that_matches_nothing(mesh: spmd.Mesh) -> None:
    text = message(
        spmd.SpecError, lambda: spmd.mark_tree({"a": jnp.ones(8)}, mesh, {"b*": ("data",)})
    )
    assert "'b*' matches no leaf" in text
    assert "there are a" in text


def test_argument_that_is_no_array(mesh: spmd.Mesh) -> None:
    text = message(
        spmd.ArgumentError, lambda: spmd.jit(lambda x, mode: x, mesh=mesh)(jnp.ones(8), "fast")
    )
    assert "type str" in text
    assert "static_argnums" in text


def test_compiled_program_called_with_another_structure(mesh: spmd.Mesh) -> None:
    compiled = spmd.jit(lambda x: x["a"] * 2, mesh=mesh).compile({"a": jnp.ones(8)})
    text = message(spmd.ArgumentError, lambda: compiled({"b": jnp.ones(8)}))
    assert "another structure" in text
