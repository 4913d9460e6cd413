"""Marks on arrays, structs and tracers."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd


def test_mark_sharding_runs_under_plain_jit_and_marks_gradients(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return (spmd.mark_sharding(x, mesh, ("data", None)) ** 2).sum()

    x = jnp.arange(64.0).reshape(8, 8)
    np.testing.assert_allclose(jax.jit(jax.grad(fn))(x), 2 * x)
    assert jax.jit(jax.grad(fn)).lower(x).as_text().count("sharding_constraint") == 2


def test_axes_by_their_indices_and_in_tuples_and_open_dims(mesh: spmd.Mesh) -> None:
    x: Any = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ((0, "model"), None))
    assert x.sharding.spec == P(("data", "model"), None)

    def fn(x: Any) -> Any:
        return spmd.mark_sharding(x * 2, mesh, (..., "model"))

    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",))
    assert spmd.jit(fn, mesh=mesh)(x).sharding.spec == P("data", "model")


def test_a_struct_keeps_its_open_dims(mesh: spmd.Mesh) -> None:
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((8, 16), jnp.float32), mesh, (None, None))
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((16, 32), jnp.float32), mesh, ("data", ...))

    def fn(x: Any, w: Any) -> Any:
        return spmd.mark_sharding(x @ w, mesh, (None, "model"))

    assert tuple(spmd.jit(fn, mesh=mesh).compile(x, w).in_shardings[1].spec) == ("data", "model")


@pytest.mark.parametrize("compile_", [jax.jit, spmd.jit])
@pytest.mark.parametrize("is_set", [False, True])
def test_marks_of_typed_values_change_types(mesh: spmd.Mesh, compile_: Any, is_set: bool) -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(explicit, P("data")))

    def fn(x: Any) -> Any:
        y = spmd.mark_sharding(x * 2, mesh, ("data", "model"))
        return y, spmd.mark_sharding(x + 1, mesh, (..., "model"))

    with jax.set_mesh(explicit) if is_set else contextlib.nullcontext():
        y, z = compile_(fn)(x)
    assert str(jax.typeof(y)) == "float32[8@data,16@model]"
    assert str(jax.typeof(z)) == "float32[8@data,16]"  # an open mark says nothing of types
    np.testing.assert_array_equal(y, np.full((8, 16), 2))
    np.testing.assert_array_equal(z, np.full((8, 16), 2))


@pytest.mark.parametrize("name", ["spmd_train", "jax_llama", "jaxed.model", "spmdish"])
def test_errors_name_lines_of_modules_called_like_libraries(name: str, mesh: spmd.Mesh) -> None:
    source = "def mark(x): return mark_sharding(x, mesh, ('data', 'data'))"
    module: dict[str, Any] = {"__name__": name, "mark_sharding": spmd.mark_sharding, "mesh": mesh}
    exec(compile(source, f"{name}.py", "exec"), module)
    with pytest.raises(spmd.SpecError) as error:
        module["mark"](jnp.ones((8, 8)))
    assert error.value.source == f"{name}.py:1 (mark)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"planner": "gredy"}, r"planner='gredy' is no(?s:.*)'exact', 'greedy'"),
        ({"callbacks": "no"}, r"callbacks='no' is no option\n.*'run', 'drop'"),
        ({"unroll": -1}, "unroll=-1"),
    ],
)
def test_options_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(spmd.ArgumentError, match=message):
        spmd.Options(**given)


def test_an_error_that_gets_its_line_keeps_what_it_knows() -> None:
    error = spmd.PlanError("it does not fit", fix="use more devices")
    error.least_bytes = 12
    for source in ("train.py:3 (step)", "other.py:1"):
        error.at(source)
    assert str(error) == "it does not fit\n  at: train.py:3 (step)\n  fix: use more devices"
    assert error.least_bytes == 12
