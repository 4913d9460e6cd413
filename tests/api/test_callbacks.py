"""Python functions that a partitioned program calls: once, in order, with whole values."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import spmd
from spmd.lowering.execute import check_no_callbacks
from spmd.mesh.spec import jax_mesh
from tests.waiting import PATIENCE

X = np.arange(32, dtype=np.float32).reshape(8, 4)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)
SPECS = (("data", "model"),)


class Seen:
    """Collects what it is called with, and returns the first of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args[0].tolist() if len(args) == 1 else tuple(a.tolist() for a in args))
        return np.asarray(args[0])

    def nothing(self, *args: Any) -> None:
        self(*args)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def jitted(fn: Callable[..., Any], mesh: spmd.Mesh, **options: Any) -> spmd.Jitted[..., Any]:
    options = {"check": True, **options}
    return spmd.jit(fn, mesh=mesh, in_specs=SPECS, options=spmd.Options(**options))


def check(fn: Callable[..., Any], mesh: spmd.Mesh, seen: Seen, *, in_order: bool = True) -> Any:
    """Runs a program partitioned and by `jax.jit`: values and calls are the same."""
    step = jitted(fn, mesh)
    got = jax.block_until_ready(step(X))
    jax.effects_barrier()
    calls = list(seen.calls)
    seen.calls.clear()
    want = jax.block_until_ready(jax.jit(fn)(X))
    jax.effects_barrier()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    order: Any = list if in_order else lambda made: sorted(map(str, made))
    assert calls and order(calls) == order(seen.calls)
    return step.compile(X)


# Values and counts.


def every_kind(seen: Seen, x: Any) -> Any:
    jax.debug.callback(seen, x)
    y = jax.pure_callback(seen, SAME, x + 1)
    z = io_callback(seen, SAME, y + 1)
    return y, z * 2, io_callback(seen, SAME, z + 1, ordered=True)


def by_row(seen: Seen, x: Any) -> Any:
    def one(row: Any) -> Any:
        jax.debug.callback(seen, row.sum())
        type_ = jax.ShapeDtypeStruct(row.shape, row.dtype)
        return jax.pure_callback(seen, type_, row, vmap_method="sequential")

    return jax.vmap(one)(x)


def effects_in_branches(seen: Seen, x: Any) -> Any:
    """One that nobody reads stays in its branch."""
    jax.lax.cond(x.sum() > 0, lambda: jax.debug.callback(seen, x.sum()), lambda: None)
    jax.lax.cond(x.sum() < 0, lambda: jax.debug.callback(seen, x.sum()), lambda: None)
    return x * 2


def equal_calls(seen: Seen, x: Any) -> Any:
    """They are not merged, and constant ones stay in their loop."""
    total = x.sum()
    jax.debug.callback(seen, total)
    jax.debug.callback(seen, total)

    def step(carry: Any, _: Any) -> Any:
        jax.debug.callback(seen, x)
        return carry + x, None

    return jax.lax.scan(step, x, None, length=3)[0]


def recomputed(seen: Seen, x: Any) -> Any:
    """As often as plain jax does: its own recomputation calls again."""

    @jax.checkpoint
    def block(x: Any) -> Any:
        jax.debug.callback(seen, x.sum())
        return jnp.sin(jnp.sin(x))

    return jax.value_and_grad(lambda x: block(x).sum())(x)


@pytest.mark.parametrize(
    ("fn", "count"),
    [(every_kind, 4), (by_row, 16), (effects_in_branches, 1), (equal_calls, 5), (recomputed, 2)],
)
def test_calls_are_those_of_jax(mesh: spmd.Mesh, seen: Seen, fn: Any, count: int) -> None:
    check(functools.partial(fn, seen), mesh, seen, in_order=False)
    assert len(seen.calls) == count


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_ordered_ones_are_called_in_order(mesh: spmd.Mesh, seen: Seen, marked: bool) -> None:
    """Also where jax, for a program that names devices, refuses `jax.debug.print(ordered=True)`."""

    def fn(x: Any) -> Any:
        y = spmd.mark_sharding(jnp.sin(x), mesh, ("model", "data")) if marked else jnp.sin(x)
        for i in range(6):
            if i % 2:
                jax.debug.callback(seen, jnp.int32(i), ordered=True)
            else:
                io_callback(seen, jax.ShapeDtypeStruct((), np.int32), i, ordered=True)
        return y

    step = jitted(fn, mesh)
    for _ in range(2):
        np.testing.assert_allclose(step(X), np.sin(X), rtol=1e-6)
    jax.effects_barrier()
    assert seen.calls == [*range(6), *range(6)]


EXTREMES = {
    "f32": np.array([-0.0, np.inf, -np.inf, np.nan, 1e-30, 3.4e38, -1.5, 7], np.float32),
    "bf16": np.array([-0.0, np.inf, 2.5, -3], jnp.bfloat16),
    "f8": np.array([-0.0, 2.5, 448, -3], jnp.float8_e4m3fn),
    "i8": np.array([-128, 127, 0, 1], np.int8),
    "u32": np.array([2**32 - 1, 0, 1, 2], np.uint32),
    "bool": np.array([True, False, True, True]),
    "complex": np.array([1 - 2j, -0.0, complex(np.inf, 3), 4j], np.complex64),
    "empty": np.zeros((0, 4), np.float32),
}


def test_results_arrive_to_the_bit(mesh: spmd.Mesh) -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(lambda _: EXTREMES, jax.tree.map(np.zeros_like, EXTREMES), x)

    for name, got in jitted(fn, mesh)(X).items():
        assert np.asarray(got).tobytes() == EXTREMES[name].tobytes(), name


def test_pieces_where_they_are_asked_for(mesh: spmd.Mesh, seen: Seen) -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(seen, x, partitioned=True)
        return x * 2

    compiled = jitted(fn, mesh).compile(X)
    compiled(X)
    jax.effects_barrier()
    assert not compiled.collectives
    pieces = [X[i : i + 2, j : j + 2].tolist() for i in range(0, 8, 2) for j in (0, 2)]
    assert sorted(seen.calls) == sorted(pieces)


# Control flow, gradients, recomputation.


def test_loops_and_branches(mesh: spmd.Mesh, seen: Seen) -> None:
    def fn(x: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            io_callback(seen.nothing, None, i, carry.sum(), ordered=True)
            call = lambda c: io_callback(seen, SAME, c + 1, ordered=True)  # noqa: E731
            carry = jax.lax.cond(i % 2 == 0, call, lambda c: c * 2, carry)
            note = lambda: io_callback(seen.nothing, None, i, ordered=True)  # noqa: E731
            jax.lax.cond(i == 2, note, lambda: None)
            return carry, carry.sum()

        io_callback(seen.nothing, None, x, ordered=True)
        x, sums = jax.lax.scan(step, x, jnp.arange(4))

        def more(x: Any) -> Any:
            return io_callback(seen, SAME, x * 2, ordered=True)

        x = jax.lax.while_loop(lambda x: x.sum() < 50_000, more, x)
        io_callback(seen.nothing, None, x.sum(), ordered=True)
        return x, sums

    check(fn, mesh, seen)


def test_what_is_recomputed_is_not_called_again(mesh: spmd.Mesh, seen: Seen) -> None:
    """Neither in the backward loop of a scan nor behind the fullest moment of a block."""
    scalar = jax.ShapeDtypeStruct((), np.float32)

    @jax.custom_jvp
    def called(x: Any) -> Any:
        return io_callback(seen, scalar, x)

    called.defjvp(lambda primals, tangents: (called(*primals), tangents[0]))

    def layer(x: Any, _: Any) -> Any:
        x = jnp.sin(x) * called(x[0, 0])
        return jnp.tanh(jnp.cos(x) * jnp.sin(x) + x), None

    def loss(x: Any) -> Any:
        for _ in range(4):
            x, _ = layer(x, None)
        return jax.lax.scan(layer, x, None, length=8)[0].sum()

    x, grad = np.full((256, 256), 0.5, np.float32), jax.value_and_grad(loss)
    free = jitted(grad, mesh, recompute=False).lower(x).predicted_memory.peak
    step = jitted(grad, mesh, memory_limit=int(free * 0.6))
    assert step.compile(x).stages.plan.recomputed
    got = jax.block_until_ready(step(x))
    jax.effects_barrier()
    assert len(seen.calls) == 12
    want = jax.jit(grad)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


# Manual regions.


def tripling(seen: Seen) -> Callable[[Any], Any]:
    def local(x: Any) -> Any:
        jax.debug.callback(seen, x)
        piece = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return io_callback(lambda x: np.asarray(x) * 3, piece, x)

    return local


def test_in_shard_map_each_device_calls(mesh: spmd.Mesh, seen: Seen) -> None:
    """Also in a region that has no results."""
    spec = P("data", "model")

    def mapped(local: Any, outs: Any) -> Any:
        manual = jax_mesh(mesh)
        return jax.shard_map(local, mesh=manual, in_specs=spec, out_specs=outs, check_vma=False)

    def fn(x: Any) -> Any:
        mapped(lambda x: jax.debug.callback(seen, x), None)(x + 1)
        return mapped(tripling(seen), spec)(jnp.sin(x))

    check(fn, mesh, seen, in_order=False)
    assert len(seen.calls) == 16


def test_in_partly_manual_regions_one_of_the_free_axis_calls(mesh: spmd.Mesh, seen: Seen) -> None:
    """jax runs `debug.callback` so, and refuses those with results."""

    def fn(x: Any) -> Any:
        return jax.shard_map(
            tripling(seen), mesh=jax_mesh(mesh), in_specs=P("data"), out_specs=P("data"),
            axis_names={"data"}, check_vma=False,
        )(x)  # fmt: skip

    np.testing.assert_array_equal(jitted(fn, mesh)(X), X * 3)
    jax.effects_barrier()
    assert sorted(seen.calls) == [X[i : i + 2].tolist() for i in range(0, 8, 2)]


# Errors.


def fails(*_: Any) -> Any:
    raise ValueError("this is what went wrong")


@pytest.mark.parametrize("kind", ["debug", "pure", "io"])
def test_what_a_callback_raises_reaches_the_user(mesh: spmd.Mesh, kind: str) -> None:
    """And no device is left waiting for the one that called."""

    def fn(x: Any) -> Any:
        y = x.sum()
        if kind == "debug":
            jax.debug.callback(fails, y)
        elif kind == "pure":
            y = jax.pure_callback(fails, jax.ShapeDtypeStruct((), np.float32), y)
        else:
            y = io_callback(fails, jax.ShapeDtypeStruct((), np.float32), y)
        return (x * y).sum()

    with pytest.raises(RuntimeError) as caught:
        jax.block_until_ready(jitted(fn, mesh)(X))
        jax.effects_barrier()
    assert "ValueError: this is what went wrong" in str(caught.value)
    assert "test_callbacks.py" in str(caught.value)
    _forget()


def _forget() -> None:
    """jax remembers the effect of the program that failed, and raises again at the end."""
    try:
        jax.effects_barrier()
    except RuntimeError:
        from jax._src.dispatch import runtime_tokens  # it has no public name

        runtime_tokens.clear()


def test_a_result_of_another_shape(mesh: spmd.Mesh) -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.zeros(3, np.float32), SAME, x)

    with pytest.raises(RuntimeError, match=r"returned \(float32\[3\]\) instead of"):
        jax.block_until_ready(jitted(fn, mesh)(X))


def test_equinox(mesh: spmd.Mesh) -> None:
    eqx = pytest.importorskip("equinox")

    def loss(x: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            return jnp.sin(eqx.error_if(x, x.sum() > 1000, "the sum is too large")), None

        return jax.lax.scan(layer, x, None, length=3)[0].sum()

    step = jitted(jax.value_and_grad(loss), mesh)
    want = jax.jit(jax.value_and_grad(loss))(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), step(X), want)
    with pytest.raises(RuntimeError, match="the sum is too large"):
        jax.block_until_ready(step(X * 1000))


# Options, reports, other ways to run.


def looking(x: Any) -> Any:
    jax.debug.print("{}", x)
    return jax.pure_callback(lambda x: np.asarray(x) * 3, SAME, x)


def test_drop_leaves_debug_callbacks(mesh: spmd.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    np.testing.assert_array_equal(jitted(looking, mesh, callbacks="drop")(X), X * 3)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""
    only = jitted(lambda x: (jax.debug.print("{}", x), x * 2)[1], mesh, callbacks="drop")
    assert not only.compile(X).collectives


def test_explain_names_the_callback_that_costs(mesh: spmd.Mesh) -> None:
    lowered = jitted(looking, mesh).lower(X)
    reasons = [c.reason for c in lowered.collectives]
    assert {c.kind for c in lowered.collectives} == {"all_gather", "all_reduce"}
    assert any("of jax.debug.print at" in reason for reason in reasons)
    assert any("one device calls jax.pure_callback of <lambda> at" in reason for reason in reasons)
    assert all("test_callbacks.py" in c.source for c in lowered.collectives)
    assert "jax.debug.print" in lowered.explain(prices=False)


def test_the_text_names_no_object(mesh: spmd.Mesh) -> None:
    texts = [jitted(lambda x: looking(x), mesh).lower(X) for _ in range(2)]
    for stage in ("stablehlo", "planned", "optimized", "emitted"):
        assert texts[0].as_text(stage) == texts[1].as_text(stage)
        assert "0x7" not in texts[0].as_text(stage)


def test_verify_calls_those_with_results_again_and_measure_calls_in_every_step(
    mesh: spmd.Mesh, seen: Seen
) -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(seen, x.sum())
        return io_callback(seen, SAME, x) * 2

    compiled = jitted(fn, mesh).compile(X)
    assert compiled.verify(X)
    jax.effects_barrier()
    assert len(seen.calls) == 3
    compiled.measure(X, steps=2)
    jax.effects_barrier()
    assert len(seen.calls) > 3 + 2 * 2


def test_neither_machines_that_are_not_here_nor_a_module_alone_call_python(mesh: spmd.Mesh) -> None:
    lowered = jitted(looking, mesh).lower(X, topology=spmd.Topology("v5e:2x4"))
    assert lowered.collectives
    with pytest.raises(spmd.MeshError, match="calls Python cannot be compiled for a machine"):
        lowered.compile()
    says = r"(?s)calls back into Python, .* only points to .*compile the jax function itself with"
    for step in (jitted(looking, mesh), jax.jit(looking)):
        text = step.lower(X).as_text("stablehlo")
        with pytest.raises(spmd.UnsupportedOpError, match=says):
            spmd.lower_stablehlo(text, mesh)


def test_one_device() -> None:
    mesh = spmd.make_mesh(data=1, devices=jax.devices()[:1])
    compiled = spmd.jit(looking, mesh=mesh, in_specs=(("data", None),)).compile(X)
    np.testing.assert_array_equal(compiled(X), X * 3)
    assert not compiled.collectives


def inspecting(told: list[tuple[str, P]], mesh: spmd.Mesh) -> Callable[[Any], Any]:
    """Returns a function that notes what `jax.debug.inspect_array_sharding` tells of its values."""

    def look(value: Any, name: str) -> Any:
        def note(sharding: Any) -> None:
            assert dict(sharding.mesh.shape) == {"data": 4, "model": 2}
            told.append((name, sharding.spec))

        jax.debug.inspect_array_sharding(value, callback=note)
        return value

    def fn(x: Any) -> Any:
        product = spmd.mark_sharding(look(jnp.tanh(x), "tanh").T @ x, mesh, (None, "model"))
        look(product, "product")
        x, _ = jax.lax.scan(lambda carry, _: (look(carry * 2, "carry"), None), x, None, length=3)
        halves = jax.vmap(lambda r: look(r / 2, "row"))
        x = jax.lax.cond(x.sum() > 0, lambda x: look(x + 1, "branch"), lambda x: x, halves(x))
        look({"sum": x.sum(0), "ones": jnp.ones(4)}, "tree")
        return x, product

    return fn


def test_inspected_shardings_are_those_of_the_plan(mesh: spmd.Mesh) -> None:
    told: list[tuple[str, P]] = []
    fn = inspecting(told, mesh)
    step = jitted(fn, mesh)
    lowered = step.lower(X)
    assert not told
    got = step(X)
    step(X)
    both = [(name, P("data", "model")) for name in ("branch", "carry", "row", "tanh")]
    others = [("product", P(None, "model")), ("tree", P("model")), ("tree", P(None))]
    assert sorted(map(str, told)) == sorted(map(str, both + others))
    told.clear()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, jax.jit(fn)(X))
    told.clear()
    # They do not change the program, in which nothing is left of them.
    compiled = lowered.compile()
    dropped = jitted(fn, mesh, callbacks="drop").lower(X)
    texts = [each.as_text("emitted").splitlines()[1:] for each in (lowered, dropped)]
    assert texts[0] == texts[1]
    assert len(told) == 7
    assert compiled.verify(X)
    assert len(told) == 7


def test_inspected_shardings_are_told_for_machines_that_are_not_here() -> None:
    mesh = spmd.make_mesh(data=4, model=2, topology="h200:8")
    lowered = jitted(inspecting([], mesh), mesh).lower(X)
    check_no_callbacks(lowered.stages.emitted)
    assert "spmd.inspect" in lowered.as_text("planned")


def test_pictures_of_shardings(mesh: spmd.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")

    def fn(x: Any) -> Any:
        jax.debug.visualize_array_sharding(x * 2, use_color=False)
        return x

    jitted(fn, mesh)(X)
    shown = capsys.readouterr().out
    assert all(f"CPU {i}" in shown for i in mesh.device_ids) and "," not in shown


BUSY = """
import jax, jax.numpy as jnp, numpy as np, spmd
mesh = spmd.make_mesh(x=2)

def fn(x):
    jax.debug.callback(lambda x: print(np.asarray(x).sum()), x)
    return x.sum() + jnp.tanh(x).sum()

x = jnp.ones((100_000, 8))
for _ in range(5):
    jax.block_until_ready(spmd.jit(fn, mesh=mesh, in_specs=(("x",),))(x))
jax.effects_barrier()
"""


@pytest.mark.thorough
def test_every_thread_waits_for_the_callback() -> None:
    """As many devices as XLA has threads: nothing is left to copy what it is called with."""
    environment = {**os.environ, "NPROC": "2", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    asked = [sys.executable, "-c", BUSY]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["800000.0"] * 5
