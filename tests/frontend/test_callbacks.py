"""What talks to Python: callbacks are refused by name, what needs none of them runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.experimental.custom_partitioning import custom_partitioning

import spmd
from spmd.options import Options

X = np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)


# ---------------------------------------------------------------------------------------------
# Callbacks.


def printing(x: Any) -> Any:
    jax.debug.print("{}", x.sum())
    return x * 2


def printing_in_order(x: Any) -> Any:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x * 2


def debugging(x: Any) -> Any:
    jax.debug.callback(lambda s: None, x.sum())
    return x * 2


def calling(x: Any) -> Any:
    return jax.pure_callback(np.sin, SAME, x)


def doing(x: Any) -> Any:
    return io_callback(np.sin, SAME, x)


def doing_in_order(x: Any) -> Any:
    return io_callback(np.sin, SAME, x, ordered=True)


def printing_in_a_loop(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        jax.debug.print("{}", carry.sum())
        return carry * 2, None

    return jax.lax.scan(step, x, None, length=3)[0]


def printing_each(x: Any) -> Any:
    return jax.vmap(printing)(x)


@pytest.mark.parametrize(
    "fn",
    [
        printing,
        printing_in_order,
        debugging,
        calling,
        doing,
        doing_in_order,
        printing_in_a_loop,
        printing_each,
    ],
)
def test_callbacks_are_refused_by_name_and_line(fn: Any, mesh: spmd.Mesh) -> None:
    with pytest.raises(spmd.UnsupportedOpError) as caught:
        spmd.jit(fn, mesh=mesh, in_specs=(("data", "model"),)).lower(X)
    text = str(caught.value)
    assert "custom_call:xla_ffi_python_cpu_callback cannot be partitioned" in text
    assert "calls back into Python" in text
    assert "test_callbacks.py" in text
    assert "\n  fix: remove the callback" in text


# ---------------------------------------------------------------------------------------------
# checkify: errors are values.


def test_checkify(mesh: spmd.Mesh) -> None:
    def divide(x: Any) -> Any:
        checkify.check(x.sum() > -1, "the sum is {s}", s=x.sum())
        return 1 / x

    checked = checkify.checkify(divide, errors=checkify.user_checks | checkify.div_checks)
    step = spmd.jit(checked, mesh=mesh, in_specs=(("data", "model"),))
    error, out = step(X)
    assert error.get() is None
    np.testing.assert_allclose(out, 1 / X, rtol=1e-6)
    for wrong, what in ((X - 1, "the sum is -64"), (np.where(X.min() == X, 0, X), "division by")):
        error, _ = step(wrong.astype(np.float32))
        assert what in str(error.get())
        plain, _ = jax.jit(checked)(wrong.astype(np.float32))
        assert str(plain.get()).partition("(")[0] == str(error.get()).partition("(")[0]


# ---------------------------------------------------------------------------------------------
# custom_partitioning: its callbacks are never asked.


def infer(mesh: Any, arguments: Any, result: Any) -> Any:
    raise AssertionError("XLA's partitioner asked")


@custom_partitioning
def row_sums(x: Any) -> Any:
    return jnp.sin(x).sum(1) * 2


row_sums.def_partition(
    partition=infer, infer_sharding_from_operands=infer, sharding_rule="i j -> i"
)


def plain(x: Any) -> Any:
    return row_sums(x) + 1


def jitted(x: Any) -> Any:
    return jax.jit(row_sums)(x) + 1


def in_a_loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + row_sums(x), c), jnp.zeros(8), None, length=3)


@pytest.mark.parametrize("fn", [plain, jitted, in_a_loop])
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_custom_partitioning_is_inlined(fn: Any, marked: bool, mesh: spmd.Mesh) -> None:
    """With marks inside jax names devices, and leaves a call that only points to callbacks."""

    def program(x: Any) -> Any:
        return fn(spmd.mark_sharding(x, mesh, ("data", "model")) if marked else x)

    options = Options(check=True)
    step = spmd.jit(program, mesh=mesh, in_specs=(("data", "model"),), options=options)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6),
        step(X),
        jax.jit(fn)(X),
    )
    assert [c.kind for c in step.compile(X).collectives] != []


def test_custom_partitioning_in_a_module_is_refused() -> None:
    text = """
    func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
      %y = stablehlo.custom_call @CustomSPMDPartitioning(%x) {api_version = 2 : i32,
        backend_config = "1"} : (tensor<8x8xf32>) -> tensor<8x8xf32>
      return %y : tensor<8x8xf32>
    }"""
    with pytest.raises(spmd.UnsupportedOpError, match="only points to what it computes") as caught:
        spmd.compile_stablehlo(text, spmd.make_mesh(data=4, model=2))
    assert "compile the jax function itself" in str(caught.value)
