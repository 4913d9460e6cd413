"""Layouts: what is handed from step to step lies in memory as its collectives want it."""

import re
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd

LAYERS, WIDE, NARROW, ROWS = 3, 32, 16, 8
pytestmark = pytest.mark.exact_plans

OPTIMIZER = optax.adamw(1e-2)
OPTIONS = spmd.Options(layouts=True, combine_bytes=1 << 10)


def forward(params: Any, x: jax.Array) -> jax.Array:
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.tanh(x @ up.T) @ down.T
    return x


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> Any:
        return x + jnp.tanh(x @ weights["up"].T) @ weights["down"].T, None

    return jax.lax.scan(layer, x, params)[0]


def made(shape: Any) -> jax.Array:
    return jnp.asarray(np.random.RandomState(sum(shape)).randn(*shape), np.float32) * 0.1


def params_of(is_scanned: bool) -> Any:
    stack = (LAYERS,) if is_scanned else ()
    shapes = {"up": (*stack, WIDE, NARROW), "down": (*stack, NARROW, WIDE)}
    if is_scanned:
        return {name: made(shape) for name, shape in shapes.items()}
    return {name: [made(shape) for _ in range(LAYERS)] for name, shape in shapes.items()}


def step(params: Any, state: Any, x: jax.Array) -> Any:
    model = scanned if isinstance(params["up"], jax.Array) else forward
    loss, grads = jax.value_and_grad(lambda params: (model(params, x) ** 2).mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def specs_of(params: Any) -> Any:
    """FSDP as torch's weights have it: split along the inputs, the minor dim."""
    spec = lambda p: P(*[None] * (p.ndim - 1), "data")  # noqa: E731
    return (jax.tree.map(spec, params), None, ("data", None))


def jitted(mesh: Any, params: Any, options: spmd.Options) -> Any:
    return spmd.jit(
        step, mesh=mesh, in_specs=specs_of(params), donate_argnums=(0, 1), options=options
    )


@pytest.mark.thorough
@pytest.mark.parametrize("is_scanned", [False, True])
def test_steps_are_equal_to_the_bit(is_scanned: bool) -> None:
    mesh, x = spmd.make_mesh(data=8), made((ROWS * 8, NARROW))
    found = []
    for layouts in (True, False):
        params, options = params_of(is_scanned), replace(OPTIONS, layouts=layouts)
        state = OPTIMIZER.init(params)
        compiled = jitted(mesh, params, options).compile(params, state, x)
        params, state = compiled.init(0, lambda: params_of(is_scanned)), None
        state = compiled.init(1, OPTIMIZER.init, params)
        for _ in range(3):
            params, state, loss = compiled(params, state, x)
        found.append((params, state, loss))
        formats = compiled.in_formats[0], compiled.out_formats[0], compiled.in_formats[1][0].mu
        for format_, leaf in zip(jax.tree.leaves(formats[0]), jax.tree.leaves(params), strict=True):
            assert (format_.layout is not None) == layouts
            order, rank = leaf.format.layout.major_to_minor, leaf.ndim
            assert not layouts or format_.layout.major_to_minor == order
            assert (order.index(rank - 1) < order.index(rank - 2)) == layouts  # inputs, outputs
        assert formats[0] == formats[1] == formats[2]
        assert compiled._moved == 0
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_local_program_says_so() -> None:
    mesh, params, x = spmd.make_mesh(data=8), params_of(False), made((ROWS * 8, NARROW))
    lowered = jitted(mesh, params, OPTIONS).lower(params, OPTIMIZER.init(params), x)
    for stage in ("local", "optimized"):
        lines = lowered.as_text(stage).splitlines()
        assert sum("// in memory: 1, 0" in line for line in lines) == 3 * 2 * LAYERS


def test_weights_of_one_shape_do_not_share_their_order() -> None:
    mesh, x = spmd.make_mesh(data=8), made((1 << 12, 64))
    params = {"rows": made((512, 64)), "columns": made((64, 512))}  # each device's are 64 x 64
    specs = {"rows": P("data"), "columns": P(None, "data")}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ params["rows"].T) @ params["columns"].T).mean()

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        updates, state = OPTIMIZER.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    run = spmd.jit(
        step, mesh=mesh, in_specs=(specs, None, ("data",)), donate_argnums=(0, 1), options=OPTIONS
    )
    lines = run.lower(params, OPTIMIZER.init(params), x).as_text("optimized").splitlines()
    laid = [line.split('"')[1] for line in lines if "// in memory: 1, 0" in line]
    assert laid == ["params/columns", "state/0/mu/columns", "state/0/nu/columns"]


def turned(x: jax.Array) -> jax.Array:
    return jax.device_put(x, Format(Layout((1, 0)), x.sharding))


@pytest.mark.thorough
def test_state_that_comes_major_to_minor_is_moved_once() -> None:
    mesh, params, x = spmd.make_mesh(data=8), params_of(False), made((ROWS * 8, NARROW))
    want = step(params, OPTIMIZER.init(params), x)
    run = jitted(mesh, params, OPTIONS)
    placed = jax.tree.map(lambda p: spmd.mark_sharding(p, mesh, (None, "data")), params)
    first, state = placed, jax.tree.map(jnp.copy, OPTIMIZER.init(placed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            first, state, _ = run(first, state, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))  # they were donated
    (compiled,) = [c for kind in run._cache.values() for c in kind]
    assert compiled._moved == 1
    again = run(*jax.tree.map(jnp.asarray, (params, state)), x)
    np.testing.assert_allclose(want[2], again[2], 1e-5)


def descend(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: (jnp.tanh(x @ w.T) ** 2).sum())(w)


def descent(mesh: Any) -> Any:
    specs = ((None, "data"), ("data", None))
    return spmd.jit(
        descend, mesh=mesh, in_specs=specs, out_specs=specs[0], donate_argnums=0, options=OPTIONS
    )


def test_state_that_comes_in_another_order_at_each_call_warns() -> None:
    mesh, x = spmd.make_mesh(data=8), made((ROWS * 8, WIDE))
    run, want = descent(mesh), descend(made((NARROW, WIDE)), x)

    def weight() -> Any:
        return spmd.mark_sharding(made((NARROW, WIDE)), mesh, (None, "data"))

    np.testing.assert_allclose(run(weight(), x), want, rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="w lie in memory in another order.*in_formats"):
        run(weight(), x)
    out = run(turned(weight()), x)
    assert out.format.layout.major_to_minor == (1, 0)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_what_is_not_donated_keeps_its_order() -> None:
    mesh = spmd.make_mesh(data=8)
    run = spmd.jit(lambda w, x: x @ w.T, mesh=mesh)
    w, x = spmd.mark_sharding(made((NARROW, WIDE)), mesh, (None, "data")), made((ROWS, WIDE))
    want = np.asarray(x) @ np.asarray(w).T
    for given in (w, turned(w), w, turned(w)):
        np.testing.assert_allclose(run(given, x), want, rtol=1e-5, atol=1e-6)
    assert run._cache_size() == 2
    formats = [c.in_formats[0].layout for kind in run._cache.values() for c in kind]
    assert [layout and layout.major_to_minor for layout in formats] == [None, (1, 0)]


def test_exports_are_major_to_minor() -> None:
    mesh, x, w = spmd.make_mesh(data=8), made((ROWS * 8, WIDE)), made((NARROW, WIDE))
    loaded = jax.export.deserialize(descent(mesh).lower(w, x).export().serialize())
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        new = jax.jit(loaded.call)(w, x)
    np.testing.assert_allclose(new, descend(w, x), rtol=1e-5, atol=1e-6)


def test_what_is_asked_of_programs_works_in_any_layout(tmp_path: Any) -> None:
    mesh, x = spmd.make_mesh(data=8), made((ROWS * 8, WIDE))
    compiled = descent(mesh).compile(made((NARROW, WIDE)), x)
    w = compiled.init(0, lambda: made((NARROW, WIDE)))
    assert w.format.layout.major_to_minor == (1, 0)
    assert compiled.verify(w, x)
    assert compiled.measure(w, x, steps=1).seconds > 0
    path = tmp_path / "saved"
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, {"w": w})
        saver.wait_until_finished()
        wanted = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)
        restored = saver.restore(path, {"w": wanted})["w"]
    np.testing.assert_array_equal(restored, w)
    np.testing.assert_array_equal(compiled(restored, x), compiled(w, x))


@pytest.mark.parametrize("unroll", [0, LAYERS])
def test_joins_and_scatters_are_pinned(unroll: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of gradients and a table's gradient lie as the optimizer reads them."""
    monkeypatch.setattr("spmd.lowering.layouts._PINNED_BYTES", 0)
    mesh, weights = spmd.make_mesh(data=8), params_of(True)
    params = {**weights, "table": made((WIDE * 2, NARROW))}
    x = np.random.RandomState(0).randint(0, 2 * WIDE, (ROWS * 8,))

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            weights = {"up": params["up"], "down": params["down"]}
            return (scanned(weights, params["table"][x]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    specs = ({**specs_of(weights)[0], "table": P(None, "data")}, ("data",))
    options = replace(OPTIONS, unroll=unroll)
    run = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=0, options=options)
    lowered = run.lower(params, x)
    lines = lowered.as_text("optimized").splitlines()
    pins = [(lines[i - 1], line) for i, line in enumerate(lines) if "LayoutConstraint" in line]
    assert sum("scatter" in before for before, _ in pins) == 1
    assert sum("concatenate" in before for before, _ in pins) == (2 if unroll else 0)
    down, table, up, _ = lowered.stages.optimized.argument_orders
    for before, pin in pins:
        order = [*reversed(eval(pin.split("dense<")[1].split(">")[0]))]
        assert tuple(order) in ((table or (0, 1),) if "scatter" in before else (down, up))
    want = jax.jit(step)(params, x)
    got = lowered.compile()({**params}, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_what_leaves_for_the_hosts_memory_is_transposed_before() -> None:
    mesh, x, w = spmd.make_mesh(data=8), made((ROWS * 8, NARROW)), made((WIDE, NARROW))

    def step(w: Any, m: Any, x: jax.Array) -> Any:
        m = 0.9 * m + jax.grad(lambda w: (jnp.tanh(x @ w.T) ** 2).mean())(w)
        return w - m, m

    split = P(None, "data")
    there = NamedSharding(jax.make_mesh((8,), ("data",)), split, memory_kind="pinned_host")
    how: Any = dict(in_specs=(split, there, P("data")), donate_argnums=(0, 1), options=OPTIONS)
    compiled = spmd.jit(step, mesh=mesh, **how).compile(w, w, x)
    text = compiled.as_text("optimized")
    (moved,) = re.findall(r"custom_call %(\d+) .*pinned_host", text)
    assert f"%{moved} = stablehlo.transpose" in text
    want, got = (w, w), (jnp.copy(w), jnp.copy(w))
    for _ in range(3):
        want, got = jax.jit(step)(*want, x), compiled(*got, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-8), got, want)
        assert got[1].sharding.memory_kind == "pinned_host"
        assert got[1].format.layout.major_to_minor == (1, 0)
