"""Products of 8-bit floats: against float32, their scales against numpy, and split over devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd.errors import ArgumentError
from spmd.ops import Fp8State, fp8, fp8_dot, fp8_state

pytestmark = pytest.mark.exact_plans

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROUNDED = {E4M3: 2**-4, E5M2: 2**-3}
"""How far a number may move, as a share of it, when it is rounded."""

CASES = {
    "x w": ((6, 32), (32, 5), None),
    "more rows": ((2, 3, 32), (32, 5), None),
    "out, in": ((2, 3, 32), (5, 32), (((2,), (1,)), ((), ()))),
    "two dims summed": ((4, 8, 6), (6, 5, 8), (((1, 2), (2, 0)), ((), ()))),
    "a batch": ((3, 4, 16), (16, 3, 5), (((2,), (0,)), ((0,), (1,)))),
}


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> Any:
    return scale * jax.random.normal(jax.random.key(seed), shape)


@functools.partial(jax.jit, static_argnums=0)
def products(dims: Any, x: Any, w: Any, dy: Any) -> tuple[Any, ...]:
    result, pull = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, dims), x, w)
    return result, *pull(dy)


def close(got: Any, want: Any, bound: Any, share: float) -> None:
    """Whether `got` is `want` but for so large a share of what the terms are in magnitude."""
    # Numbers that are rounded to none of the format's subnormals add a little.
    error = np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32))
    assert (error <= share * np.asarray(bound) + 1e-3 * np.abs(bound).max()).all()
    assert error.max() > 0  # they were rounded


@pytest.mark.parametrize(
    ("name", "scaling"), [*((name, "delayed") for name in CASES), ("two dims summed", "current")]
)
def test_values_and_gradients_are_those_of_float32_up_to_rounding(name: str, scaling: str) -> None:
    x_shape, w_shape, dims = CASES[name]
    x, w = normal(x_shape, 0, 30.0), normal(w_shape, 1, 0.01)
    dims = dims or (((x.ndim - 1,), (0,)), ((), ()))
    dy = normal(jax.eval_shape(lambda: jax.lax.dot_general(x, w, dims)).shape, 2, 1e-6)
    state = None if scaling == "current" else fp8_state(w)

    @jax.jit
    def run(x: Any, w: Any, state: Any, dy: Any) -> Any:
        result, back = jax.vjp(
            lambda x, w, s: fp8_dot(x, w, s, dimension_numbers=CASES[name][2]), x, w, state
        )
        return result, *back(dy)

    if state is not None:  # the first step has met nothing yet
        state = run(x, w, state, dy)[3]
    got = run(x, w, state, dy)[:3]
    want = products(dims, x, w, dy)
    bounds = products(dims, *map(jnp.abs, (x, w, dy)))
    backward = ROUNDED[E4M3] + ROUNDED[E5M2] + 2**-6
    shares = 2 * ROUNDED[E4M3] + 2**-7, backward, backward
    for each in zip(got, want, bounds, shares, strict=True):
        close(*each)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_and_gradients_have_the_dtypes_of_their_operands(dtype: Any) -> None:
    x, w = normal((8, 512), 0, 100.0).astype(dtype), normal((512, 4), 1)

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        result, back = jax.vjp(fp8_dot, x, w)
        return result, *back(jnp.ones_like(result))

    result, dx, dw = run(x, w)
    assert (result.dtype, dx.dtype, dw.dtype) == (dtype, dtype, w.dtype)
    want = x.astype(jnp.float32) @ w
    np.testing.assert_allclose(result, want, rtol=0, atol=0.1 * np.abs(want).max())


# Scales


def scale_of(history: list[float], dtype: Any) -> float:
    """The largest power of two that takes the history's largest number no further than `dtype`."""
    largest = max((m for m in history if np.isfinite(m)), default=0.0)
    return 2.0 ** np.floor(np.log2(LARGEST[dtype] / largest)) if largest else 1.0


def rounded(x: Any, scale: float, dtype: Any) -> Any:
    """What the product reads, scaled back."""
    scaled = np.clip(np.asarray(x, np.float32) * np.float32(scale), -LARGEST[dtype], LARGEST[dtype])
    return scaled.astype(dtype).astype(np.float64) / scale


def test_scales_come_from_the_steps_before() -> None:
    """Growing operands overflow, and are cut off; zeros and what is not finite leave no trace."""
    steps, history = [1.0, 2.0, 5000.0, 0.0, 1e-4, np.inf, 1.0, 1.0, 1.0], 3
    w = normal((16, 4), 9)
    state = fp8_state(history=history)
    met: list[list[float]] = [[], [], []]

    @jax.jit
    def step(x: Any, dy: Any, state: Any) -> Any:
        result, back = jax.vjp(lambda x, s: fp8_dot(x, w, s), x, state)
        return result, *back(dy)

    overflowed = 0
    for i, factor in enumerate(steps):
        x, dy = normal((8, 16), i), normal((8, 4), 50 + i, 1e-3)
        x = x.at[0, 0].set(np.inf) if np.isinf(factor) else x * factor
        result, dx, state = step(x, dy, state)
        scales = [
            scale_of(row[-history:], dtype)
            for row, dtype in zip(met, (E4M3, E4M3, E5M2), strict=True)
        ]
        x8, w8 = rounded(x, scales[0], E4M3), rounded(w, scales[1], E4M3)
        overflowed += bool((np.abs(np.where(np.isfinite(x), x, 0)) * scales[0] > 448).any())
        np.testing.assert_allclose(result, x8 @ w8, rtol=1e-5, atol=1e-5 * np.abs(x8).max())
        dy8 = rounded(dy, scales[2], E5M2)
        np.testing.assert_allclose(dx, dy8 @ w8.T, rtol=1e-5, atol=1e-7)
        for row, operand in zip(met, (x, w, dy), strict=True):
            row.append(float(np.abs(operand).max()))
        newest_first = [([0.0] * history + row)[: -history - 1 : -1] for row in met]
        np.testing.assert_array_equal(state.maxima, np.array(newest_first, np.float32))
    assert overflowed == 3  # two that grew, and the one after zeros had pushed all others out


def test_numbers_are_cut_off_but_nan_stays_nan() -> None:
    x = jnp.array([[1e6, 1.0], [-jnp.inf, 1.0], [jnp.nan, 1.0]])
    got = jax.jit(fp8_dot)(x, jnp.eye(2), fp8_state())
    np.testing.assert_array_equal(got[:, 0], [448.0, -448.0, np.nan])
    np.testing.assert_array_equal(got[:2, 1], [1.0, 1.0])
    zeros = jax.jit(fp8_dot)(jnp.zeros((2, 3)), jnp.zeros((3, 4)))  # current scaling
    np.testing.assert_array_equal(zeros, np.zeros((2, 4)))


def test_a_margin_leaves_room() -> None:
    x, w = jnp.array([[410.0, 900.0]]), jnp.eye(2)
    state = Fp8State(jnp.array([[448.0], [1.0], [1.0]]))
    np.testing.assert_array_equal(fp8_dot(x, w, state), [[416.0, 448.0]])
    np.testing.assert_array_equal(fp8_dot(x, w, state, margin=2), [[416.0, 896.0]])


def test_several_weights_are_as_many_products() -> None:
    x, weights = normal((6, 16)), (normal((16, 4), 1), normal((16, 8), 2))
    whole = fp8_state(weights)
    assert whole.maxima.shape == (5, 16)

    def loss(x: Any, weights: Any, state: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y)) for y in fp8_dot(x, weights, state))

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))
    dx, dw, state = grads(x, weights, whole)
    terms = []
    for i, w in enumerate(weights):
        one = grads(x, (w,), Fp8State(whole.maxima[np.array([0, 1 + i, 3 + i])]))
        np.testing.assert_array_equal(dw[i], one[1][0])
        np.testing.assert_array_equal(state.maxima[np.array([0, 1 + i, 3 + i])], one[2].maxima)
        terms.append(one[0])
    np.testing.assert_array_equal(dx, terms[0] + terms[1])


def test_what_cannot_be_asked_is_refused() -> None:
    x, w = normal((4, 8)), normal((8, 2))
    with pytest.raises(ArgumentError, match="takes no such operands"):
        fp8_dot(jnp.ones((4, 8), jnp.int32), w)
    with pytest.raises(ArgumentError, match="cannot scale 2 products"):
        fp8_dot(x, (w, w), fp8_state(w))
    with pytest.raises(ArgumentError, match="at least 1 step"):
        fp8_state(history=0)


# Split over devices

LAYERS = 2


def drawn(
    stacked: bool, width: int = 64, inner: int = 256, rows: int = 128, dtype: Any = jnp.float32
) -> tuple[dict[str, Any], Any]:
    """Parameters and states of a few layers, and a batch."""
    layers: list[dict[str, Any]] = []
    for i in range(LAYERS):
        up, down = normal((width, inner), i, 0.1), normal((inner, width), 9 + i, 0.1)
        layers.append({"up": up, "down": down, "s": fp8_state(up), "t": fp8_state(down)})
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    params = stack if stacked else {str(i): layer for i, layer in enumerate(layers)}
    return params, normal((rows, width), 77).astype(dtype)


def block(x: Any, layer: Any) -> Any:
    return fp8_dot(jax.nn.relu(fp8_dot(x, layer["up"], layer["s"])), layer["down"], layer["t"])


def train(params: Any, x: Any) -> Any:
    """One step of a few layers, unrolled or scanned."""

    def loss(params: Any) -> Any:
        y = x
        if "up" in params:
            y = jax.lax.scan(lambda y, layer: (block(y, layer), None), y, params)[0]
        else:
            for i in range(LAYERS):
                y = block(y, params[str(i)])
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    (weights, _), (grads, states) = fp8.split(params), fp8.split(jax.grad(loss)(params))
    return fp8.merge(jax.tree.map(lambda w, g: w - g, weights, grads), states)


SPECS = {"up": ("data", "model"), "down": ("model", "data")}


def marked(params: Any, mesh: spmd.Mesh) -> Any:
    def mark(path: Any, leaf: Any) -> Any:
        name = path[-1].key if hasattr(path[-1], "key") else ""
        spec = SPECS.get(name)
        return leaf if spec is None else spmd.mark_sharding(leaf, mesh, (None, *spec)[-leaf.ndim :])

    return jax.tree_util.tree_map_with_path(mark, params)


class Step(NamedTuple):
    """A step split over eight devices, and what makes arguments for it and for the whole."""

    compiled: Any
    arguments: Callable[[], Any]
    whole: Any


@pytest.fixture(scope="module", params=["unrolled", "scanned"])
def step(request: Any, devices8: Any) -> Step:
    mesh = spmd.make_mesh(data=4, model=2, devices=devices8)
    params, x = drawn(request.param == "scanned")

    def arguments() -> Any:
        return marked(params, mesh), spmd.mark_sharding(x, mesh, ("data", None))

    jitted = spmd.jit(train, mesh=mesh, donate_argnums=0, options=spmd.Options(check=True))
    return Step(jitted.compile(*arguments()), arguments, (params, x))


@pytest.mark.thorough
def test_a_split_step_is_the_whole_one(step: Step) -> None:
    """Twice: the second step's scales come from the first one's maxima."""
    got, x = jax.tree.map(jnp.copy, step.arguments())
    want, whole_x = step.whole
    for _ in range(2):
        got, want = step.compiled(got, x), jax.jit(train)(want, whole_x)
    (got, states), (want, wanted) = fp8.split(got), fp8.split(want)
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max())
    assert_maxima_travel_together(step.compiled.collectives)
    shardings = jax.tree.leaves(fp8.split(step.compiled.in_shardings[0])[1])
    assert shardings and all(sharding.is_fully_replicated for sharding in shardings)


@pytest.fixture(scope="module", params=["unrolled", "scanned"])
def large(request: Any) -> Any:
    """The step's collectives at sizes where bytes count, on a machine that is not here."""
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    stacked = request.param == "scanned"
    args = jax.eval_shape(lambda: drawn(stacked, 2048, 8192, 16384, jnp.bfloat16))
    jitted = spmd.jit(train, mesh=mesh, donate_argnums=0, options=spmd.Options(check=True))
    params, x = marked(args[0], mesh), spmd.mark_sharding(args[1], mesh, ("data", None))
    return jitted.lower(params, x, topology=spmd.Topology("h200:8")).collectives


PIECE = 2048 * 8192 // 8


@pytest.mark.thorough
def test_collectives_of_a_large_step(large: Any) -> None:
    gathers = [c for c in large if c.axes == ("data",) and c.kind == "all_gather"]
    sent = sum(c.bytes * c.count for c in gathers)
    # Weights in 8 bits: those of the forward pass serve the backward pass, or two loops have each
    # their own.
    assert sent in (2 * LAYERS * 3 * PIECE, 2 * 2 * LAYERS * 3 * PIECE)
    sums = [c for c in large if c.kind == "reduce_scatter"]  # of gradients, in the dtype of x
    assert sum(c.bytes * c.count for c in sums) == 2 * LAYERS * 3 * 2 * PIECE
    assert_maxima_travel_together(large)


def assert_maxima_travel_together(collectives: Any) -> None:
    """All of a step's, however long it is."""
    maxima = [c for c in collectives if "maximum" in c.reason]
    assert [(c.kind, c.count) for c in maxima] == [("all_reduce", 1)]


@pytest.mark.parametrize("specs", [(("x", None), None), (None, (None, "x"))])
def test_split_over_what_is_not_summed_it_is_the_same_to_the_bit(specs: Any, devices8: Any) -> None:
    mesh = spmd.make_mesh(x=8, devices=devices8)
    x, w = normal((16, 32)), normal((32, 24), 1)

    def run(x: Any, w: Any, state: Any) -> Any:
        y, back = jax.vjp(lambda x: fp8_dot(x, w, state), x)
        return y, *back(jnp.sin(y))

    args = x, w, Fp8State(jnp.array([[3.0], [2.0], [1.0]]))
    got = spmd.jit(run, mesh=mesh, in_specs=(*specs, None))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(run)(*args))
