"""What talks to Python: callbacks become calls by number, what needs none of them runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

import spmd
from spmd.frontend.artifact import function_artifact
from spmd.frontend.trace import trace
from spmd.ir.dialect.callbacks import CALLBACK
from spmd.options import Options

X = np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)


# Callbacks: what runs is in tests/api/test_callbacks.py.


def traced(fn: Any, on_callbacks: Any = "run", platform: str = "cpu") -> Any:
    return trace(fn, (SAME,), {}, platform=platform, on_callbacks=on_callbacks)


def printing(x: Any) -> Any:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x * 2


def calling_each_way(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        jax.lax.cond(carry[0, 0] > 0, lambda: jax.debug.callback(print, carry), lambda: None)
        return io_callback(np.sin, SAME, carry, ordered=True), None

    x = jax.lax.scan(step, printing(x), None, length=3)[0]
    return jax.pure_callback(np.cos, SAME, x)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_callbacks_become_calls_by_number(platform: str) -> None:
    found = traced(calling_each_way, platform=platform)
    assert [(c.label, c.is_debug, c.has_effect, c.is_ordered) for c in found.callbacks] == [
        ("jax.debug.print", True, True, True),
        ("jax.debug.callback", True, True, False),
        ("io_callback of sin", False, True, True),
        ("jax.pure_callback of cos", False, False, False),
    ]
    text = str(found.module)
    assert "token" not in text and "python" not in text
    for number, callback in enumerate(found.callbacks):
        assert f'called = "{callback.label}"' in text and f"number = {number} : i64" in text


def test_dropped_ones_are_not_in_the_module_and_a_function_called_twice_is_one() -> None:
    found = traced(calling_each_way, "drop")
    assert [c.label for c in found.callbacks] == ["io_callback of sin", "jax.pure_callback of cos"]
    assert traced(printing, "drop").callbacks == ()
    assert "spmd.callback" not in str(traced(printing, "drop").module)
    inner = jax.jit(printing)
    assert len(traced(lambda x: inner(inner(x))).callbacks) == 1


def test_the_source_line_and_the_names_stay() -> None:
    lowered = spmd.jit(calling_each_way, mesh=spmd.make_mesh(data=8)).lower(X)
    sources = {op.loc.source for op in lowered.stages.program.walk() if op.name == CALLBACK}
    assert {source.partition(" ")[2] for source in sources} == {
        "(printing)", "(calling_each_way)", "(calling_each_way.<locals>.step)",
        "(calling_each_way.<locals>.step.<locals>.<lambda>)",
    }  # fmt: skip
    assert all("test_callbacks.py" in source for source in sources)


def test_a_library_that_traces_while_it_is_lowered() -> None:
    """Its jaxpr shows no callback: jax's own rule for it is replaced."""
    late = Primitive("late")
    late.def_abstract_eval(lambda x: x)

    def run(x: Any) -> Any:
        jax.debug.callback(print, x)
        return jax.pure_callback(np.sin, SAME, x)

    mlir.register_lowering(late, mlir.lower_fun(run, multiple_results=False))
    found = traced(lambda x: late.bind(x) * 2)
    labels = ["jax.debug.callback", "jax.pure_callback of sin"]
    assert [c.label for c in found.callbacks] == labels
    assert [c.label for c in traced(lambda x: late.bind(x) * 2, "drop").callbacks] == labels[1:]


def test_others_that_trace_leave_them_alone() -> None:
    """An exported bundle cannot call Python: its module says so, and is refused when it is read."""
    _, _, calls = function_artifact(printing, [SAME], platform="cpu")
    assert list(calls.custom_calls) == ["xla_ffi_python_cpu_callback"]


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


@pytest.mark.parametrize(("fn", "marked"), [(plain, True), (jitted, False), (in_a_loop, True)])
def test_custom_partitioning_is_inlined(fn: Any, marked: bool, mesh: spmd.Mesh) -> None:
    """With marks inside jax names devices, and leaves a call that only points to callbacks."""

    def program(x: Any) -> Any:
        return fn(spmd.mark_sharding(x, mesh, ("data", "model")) if marked else x)

    step = spmd.jit(program, mesh=mesh, in_specs=(("data", "model"),), options=Options(check=True))
    for got, want in zip(*map(jax.tree.leaves, (step(X), jax.jit(fn)(X))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
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
