"""Unroll: loops that are written out compute what they did."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.close import partitioned

LAYERS, WIDTH, ROWS = 4, 16, 8
WRITTEN_OUT = spmd.Options(unroll=LAYERS, check=True)


def made(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(len(shape)).randn(*shape), np.float32) * 0.3


def scan_over(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    out, sums = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, x.sum()), x, w, **options)
    return out.sum() + (sums * jnp.arange(LAYERS)).sum()


def checkpointed(x: jax.Array, w: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) + x, None))
    return (jax.lax.scan(layer, x, w)[0] ** 2).sum()


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    def outer(total: jax.Array, rows: jax.Array) -> Any:
        return total + scan_over(rows, w), None

    return jax.lax.scan(outer, jnp.zeros(()), x.reshape(2, ROWS // 2, WIDTH))[0]


def by_fori_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def trip(i: Any, carry: Any) -> Any:
        x, seen = carry
        x = jnp.tanh(x @ jax.lax.dynamic_index_in_dim(w, LAYERS - 1 - i, keepdims=False))
        return x, seen.at[i].set(x.sum())

    x, seen = jax.lax.fori_loop(1, LAYERS, trip, (x, jnp.ones(LAYERS)))
    return (x**2).sum() + (seen * jnp.arange(LAYERS)).sum()


def reversed_scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return scan_over(x, w, reverse=True)


@pytest.mark.parametrize("fn", [scan_over, reversed_scan, checkpointed, nested, by_fori_loop])
def test_values_and_gradients(mesh: spmd.Mesh, fn: Any) -> None:
    x, w = made(ROWS, WIDTH), made(LAYERS, WIDTH, WIDTH)
    specs = (("data", None), (None, "data", "model"))
    step = jax.value_and_grad(fn, (0, 1))
    text = partitioned(step, x, w, mesh=mesh, in_specs=specs, options=WRITTEN_OUT).as_text(
        "program"
    )
    loops = 2 if fn is nested else 0  # the outer loop, and its gradient
    assert text.count("stablehlo.while") == loops
    if not loops:
        assert "dynamic_slice" not in text


def test_residuals_are_handed_on_without_a_stack(mesh: spmd.Mesh) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    x, w = made(ROWS, WIDTH), made(LAYERS, WIDTH, WIDTH)
    jitted = spmd.jit(jax.grad(loss), mesh=mesh, options=spmd.Options(unroll=LAYERS))
    text = jitted.lower(w, x).as_text("program")
    assert "dynamic_update_slice" not in text
    assert text.count("stablehlo.concatenate") == 1  # the gradient
    assert f"-> tensor<{LAYERS}x{ROWS}x{WIDTH}xf32>" not in text


@cache
def planned(platform: str, width: int, layers: int = LAYERS, **options: Any) -> spmd.Lowered:
    """A gradient step of some layers of some width, split over its weights on two devices."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            return out.astype(jnp.float32).sum()

        return w - jax.grad(loss)(w)

    mesh = spmd.Mesh(None, (2,), ("data",))
    w = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2 * width, width), jnp.bfloat16)
    specs = ((None, None, "data"), ("data", None))
    jitted = spmd.jit(
        step, mesh=mesh, in_specs=specs, donate_argnums=0, options=spmd.Options(**options)
    )
    return jitted.lower(w, x, topology=spmd.Topology(platform))


@pytest.mark.parametrize("machine", ["h200:2", pytest.param("v5e:2x1", marks=pytest.mark.heavy)])
def test_the_compiler_decides_by_time(machine: str) -> None:
    looped, chosen = planned(machine, 8192, unroll=0), planned(machine, 8192)
    assert "while" in looped.as_text("program") and "while" not in chosen.as_text("program")
    assert chosen.cost < looped.cost
    (form,) = chosen.stages.plan.forms
    assert not form.refusal and (form.seconds, form.before) == (chosen.cost, looped.cost)
    assert f"{form.name}: " in chosen.explain(prices=False)
    assert f"{looped.cost * 1e3:.3g} ms" in chosen.summary()


def test_what_is_written_out_chooses_from_what_loops_took(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = planned("h200:2", 8192)
    assert chosen.stages.plan.like_loops
    monkeypatch.setattr("spmd.planning.exact.taken_by", lambda plan: {})  # every placement
    assert chosen.cost <= planned.__wrapped__("h200:2", 8192).cost * 1.01


def test_longer_loops_stay_and_those_where_it_would_not_pay(mesh: spmd.Mesh) -> None:
    assert "while" in planned("h200:2", 256, 32).as_text("program")  # too short a step
    assert "while" in planned("cpu:2", 8192).as_text("program")  # where nothing is hidden
    jitted = spmd.jit(scan_over, mesh=mesh, options=spmd.Options(unroll=LAYERS - 1))
    assert "while" in jitted.lower(made(ROWS, WIDTH), made(LAYERS, WIDTH, WIDTH)).as_text("program")


def test_the_report_says_why_loops_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd.compiler.RUNS", 3)
    lowered = planned.__wrapped__("v5e:2x1", 8192, 8)
    (form,) = lowered.stages.plan.forms
    assert "while" in lowered.as_text("program") and form.seconds is None
    assert re.search(r"not loops of .* written out: .* would have to win [\d.]+ ms", form.text)
    assert form.text in lowered.explain(prices=False) and form.name not in lowered.summary()


def test_what_is_written_out_keeps_to_the_memory_limit() -> None:
    limit = planned("h200:2", 8192, unroll=0).predicted_memory.peak
    assert planned("h200:2", 8192, memory_limit=limit).predicted_memory.peak <= limit


@pytest.mark.parametrize(
    ("start", "end", "step", "trips"),
    [(0, 7, 3, 3), (5, 3, 1, 0), (0, 100, -1, None), (0, 120, 100, None), (120, 127, 7, 1)],
)
def test_loops_that_wrap_around_end(start: int, end: int, step: int, trips: int | None) -> None:
    def counted(x: jax.Array) -> Any:
        def more(state: Any) -> Any:
            return state[0] < jnp.int8(end)

        return jax.lax.while_loop(
            more, lambda s: (s[0] + jnp.int8(step), s[1] + 1), (jnp.int8(start), x)
        )

    mesh = spmd.Mesh(None, (2,), ("data",))
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    jitted = spmd.jit(counted, mesh=mesh, options=spmd.Options(unroll=64))
    program = jitted.lower(x, topology=spmd.Topology("h200:2")).stages.program
    assert ("stablehlo.while" in [op.name for op in program.walk()]) == (trips is None)
    options = spmd.Options(unroll=64)
    partitioned(counted, jnp.zeros(8), mesh=spmd.make_mesh(data=8), options=options, tolerance=0.0)


@pytest.mark.parametrize(
    ("recomputed", "policy"), [(False, None), (True, None), (True, "dots_saveable")]
)
def test_what_is_computed_again_waits_for_its_turn(recomputed: bool, policy: str | None) -> None:
    """`jax.checkpoint` in a scan relies on the loops to keep the two computations apart."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

        if recomputed:
            how = getattr(jax.checkpoint_policies, policy) if policy else None
            layer = jax.checkpoint(layer, prevent_cse=False, policy=how)
        return jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).sum())(w)

    w, x = 0.1 * np.ones((LAYERS, 16, 16), np.float32), np.ones((32, 16), np.float32)
    mesh = spmd.make_mesh(data=8)
    specs = ((None, None, "data"), ("data", None))
    compiled = partitioned(step, w, x, mesh=mesh, in_specs=specs, options=WRITTEN_OUT)
    text = compiled.as_text("optimized")
    assert "while" not in text
    assert text.count("optimization_barrier") in ((LAYERS, 2 * LAYERS) if recomputed else (0,))
