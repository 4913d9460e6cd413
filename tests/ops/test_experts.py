"""A mixture of experts against a loop over them: values and gradients, alone and split."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from benchmarks.programs.program import marked
from spmd.errors import ArgumentError
from spmd.ops import experts, experts_exchange, experts_local
from tests.close import close
from tests.ops.test_attention import EVERY_FLOP_COUNTS, locally

EXPERTS, CHOICES = 6, 2


def plain(
    x: Any, gates: Any, chosen: Any, *weights: Any, biases: Any = None, limit: Any = None
) -> Any:
    """Every expert computes every row; those that did not choose it weigh nothing."""
    out = jnp.zeros_like(x)
    for e, (gate, up, down) in enumerate(zip(*weights, strict=True)):
        added = (0, 0, 0) if biases is None else [bias[e] for bias in biases]
        g, u = x @ gate.T + added[0], x @ up.T + added[1]
        if limit is None:
            hidden = jax.nn.silu(g) * u
        else:
            g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
            hidden = g * jax.nn.sigmoid(1.702 * g) * (u + 1)
        weight = jnp.sum(jnp.where(chosen == e, gates, 0), -1, keepdims=True)
        out += (hidden @ down.T + added[2]) * weight
    return out


def operands(
    biases: int = 0, b: int = 4, s: int = 6, count: int = EXPERTS, h: int = 8, m: int = 12
) -> Any:
    """Rows, gates, choices, weights and biases; an expert has no rows, a row one choice too few."""
    rng = np.random.default_rng(b * s + count)
    chosen = np.stack([
        rng.permutation(max(count - 1, CHOICES))[:CHOICES] for _ in range(b * s)
    ]).reshape(b, s, CHOICES)  # fmt: skip
    chosen[-1, -1, 0] = -1
    shapes: Any = ((b, s, h), (b, s, CHOICES), (count, m, h), (count, m, h), (count, h, m))
    shapes += ((count, m), (count, m), (count, h))[:biases]
    x, gates, *weights = (0.5 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, gates, chosen.astype(np.int32), *weights


def loss(fn: Any, mark: Any = lambda name, x: x, count: int = 6) -> Any:
    def run(x: Any, gates: Any, chosen: Any, *weights: Any) -> Any:
        x, gates, chosen = mark("rows", x), mark("rows", gates), mark("rows", chosen)
        weights = tuple(map(mark, ("in", "in", "out") * 2, weights))
        as_gpt_oss = {"biases": weights[3:], "limit": 0.3} if weights[3:] else {}
        return jnp.sum(jnp.sin(mark("rows", fn(x, gates, chosen, *weights[:3], **as_gpt_oss))))

    return jax.value_and_grad(run, (0, 1, *range(3, count)))


def test_in_half_precision_gates_stay_wide() -> None:
    x, gates, chosen, *weights = operands()
    x, *weights = (jnp.asarray(a, jnp.bfloat16) for a in (x, *weights))
    out = jax.jit(experts)(x, gates, chosen, *weights)
    assert out.dtype == jnp.bfloat16
    close(out, jax.jit(plain)(x.astype(jnp.float32), gates, chosen, *weights), 0.03)


@pytest.mark.usefixtures("exact_plans")
@pytest.mark.parametrize(("dtype", "biased"), [("int8", True), ("float8_e4m3fn", False)])
def test_eight_bits(dtype: str, biased: bool, devices8: Any) -> None:
    """Rows, experts and widths over axes of their own: scales are split as weights' rows."""
    mesh = spmd.make_mesh(x=2, y=2, z=2, devices=devices8)
    x, gates, chosen, *weights = operands(3)
    given: Any = {"biases": weights[3:], "limit": 1.0} if biased else {}
    values = [np.asarray(16 * w, np.float32).astype(dtype) for w in weights[:3]]
    scales = tuple(np.abs(w).max(-1) / 16 for w in weights[:3])
    wide = [np.float32(v) * s[..., None] for v, s in zip(values, scales, strict=True)]

    def run(x: Any, gates: Any, chosen: Any, *weights: Any) -> Any:
        return experts(x, gates, chosen, *weights[:3], scales=weights[3:], **given)

    specs = [("x",)] * 3 + [
        ("y", "z"), ("y", "z"), ("y", None, "z"), ("y", "z"), ("y", "z"), ("y",),
    ]  # fmt: skip
    args = (x, gates, chosen, *values, *scales)
    compiled = spmd.jit(run, mesh=mesh, in_specs=specs, options=EVERY_FLOP_COUNTS).compile(*args)
    close(compiled(*args), jax.jit(functools.partial(plain, **given))(x, gates, chosen, *wide))
    assert locally(compiled)["spmd.experts"][4] == (3, 6, 8)
    with pytest.raises(ArgumentError, match="or 8-bit weights with float32 scales"):
        experts(x, gates, chosen, *values)


SPLITS = {
    "uneven experts": ({"x": 5}, (), ("x",), (4, 2)),
    "biases, uneven experts": ({"x": 5}, (), ("x",), (4, 2)),
    "biases, rows, experts and width": ({"x": 2, "y": 2, "z": 2}, ("x",), ("y", "z"), (2, 3)),
    "biases, sequence and experts alike, and width": (
        {"x": 3, "y": 2},
        (None, "x"),
        ("x", "y"),
        (4, 2),
    ),
    "a row or none": ({"x": 5}, ("x",), ("x",), (1, 6)),
}
"""Name -> axes, spec of rows, spec of (experts, width inside), and rows and experts of a device."""


@pytest.mark.usefixtures("exact_plans")
@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str, devices8: Any) -> None:
    axes, rows, own, (batch, here) = SPLITS[name]
    mesh = spmd.make_mesh(devices=devices8[: int(np.prod(list(axes.values())))], **axes)
    expert, width = (*own, None, None)[:2]
    specs = {
        "rows": (*rows, None, None)[:3],
        "in": (expert, width, None),
        "out": (expert, None, width),
    }
    args = operands(biases=3 if "biases" in name else 0)

    def mark(name: str, x: Any) -> Any:
        return spmd.mark_sharding(x, mesh, (*specs[name], None, None)[: x.ndim])

    step = spmd.jit(loss(experts, mark, len(args)), mesh=mesh, options=EVERY_FLOP_COUNTS)
    compiled = step.compile(*args)
    close(compiled(*args), jax.jit(loss(plain, count=len(args)))(*args))
    found = locally(compiled)
    assert set(found) == {"spmd.experts", "spmd.experts_grad"}
    # Rows that nobody asked to split may be split besides, where their experts are gathered anyway.
    for local in found.values():
        assert local[0][0] <= batch and local[4][0] == here


@pytest.fixture(scope="module")
def exchanging(devices8: Any) -> Any:
    """Loss and gradients where four devices split rows and eight experts, and by a loop."""
    mesh = spmd.make_mesh(devices=devices8[:4], x=4)

    def mark(name: str, x: Any) -> Any:
        return spmd.mark_sharding(x, mesh, ("x", None, None)[: x.ndim])

    step = spmd.jit(loss(experts, mark), mesh=mesh, options=EVERY_FLOP_COUNTS)
    compiled = step.compile(*operands(count=8))
    kinds = [c.kind for c in compiled.collectives if c.kind == "ragged_all_to_all"]
    assert len(kinds) == 2, "there and back, and the gradient's"
    return compiled, jax.jit(loss(plain))


ROUTES = {
    "one expert": lambda rng: np.array([rng.integers(8), rng.integers(8)]),
    "one device's": lambda rng: 2 * rng.integers(4) + np.array([0, 1]),
    "any": lambda rng: rng.permutation(8)[:CHOICES],
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "seed"), [*itertools.product(ROUTES, range(2))])
def test_rows_reach_their_experts_however_many(name: str, seed: int, exchanging: Any) -> None:
    """Crowded devices take several turns; every choice counts, in value and gradient."""
    compiled, reference = exchanging
    x, gates, chosen, *weights = operands(count=8)
    rng = np.random.default_rng(seed)
    first = ROUTES[name](rng)
    route = [first if name != "any" else ROUTES[name](rng) for _ in range(chosen.size // CHOICES)]
    chosen = np.asarray(route, np.int32).reshape(chosen.shape)
    if name == "one expert":  # no row chooses one twice
        chosen[..., 1] = (chosen[..., 0] + 1 + rng.integers(7, size=chosen.shape[:2])) % 8
    args = (x, gates, chosen, *weights)
    close(compiled(*args), reference(*args))


def test_gradient_of_weights_by_the_kernel_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sorted rows, the last of which belong to no expert, and an expert that has none."""
    monkeypatch.setattr(experts_local, "INTERPRET", True)
    rng = np.random.default_rng(0)
    x, dout, weights = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((512, 256), (512, 128), (4, 128, 256))
    )
    sizes = jnp.asarray([200, 0, 130, 7], jnp.int32)
    is_here = (jnp.arange(512) < 337)[:, None]
    found, want = (
        jax.vjp(lambda x, w, f=f: f(jnp.where(is_here, x, 0), w, sizes), x, weights)[1](
            jnp.where(is_here, dout, 0)
        )
        for f in (experts_local.tpu_product, experts_local.ragged)
    )
    assert experts_local._tiles(x.shape, weights.shape) == (512, 128, 256)
    close(found, want, 1e-4)


def test_gates_travel_bit_by_bit() -> None:
    """A gate that is no number of the rows' dtype arrives as it is, and so does a zero."""
    gates = np.array([0.0, 1 / 3, -1e-30, 3e38], np.float32)
    for dtype, width in ((jnp.bfloat16, 128), (jnp.float32, 8), (jnp.float16, 6)):
        sent = jax.jit(experts_exchange._with)(jnp.ones((4, width), dtype), jnp.asarray(gates))
        assert sent.dtype == dtype
        assert sent.shape[1] % 128 == 0 or width % 128
        assert np.array_equal(experts_exchange._without(sent, width, jnp.float32), gates)


def test_mapped_scanned_and_recomputed() -> None:
    x, gates, chosen, *weights = operands()

    def run(fn: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            out = jax.vmap(lambda x, g, c: fn(x[None], g[None], c[None], *weights)[0])
            return x + out(x, gates, chosen), None

        return jax.value_and_grad(
            lambda x: jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, 2)[0])
        )

    close(jax.jit(run(experts))(x), jax.jit(run(plain))(x))


def planned(batch: int, choices: int = 2) -> Any:
    """A layer of eight experts on an axis of their own, rows split over all devices."""
    mesh = spmd.Mesh(None, (2, 4), ("data", "expert"))

    rows, own = (("data", "expert"), None, None), ("expert", None, None)
    args = (
        marked(mesh, rows, (batch, 1024, 1024), jnp.bfloat16),
        marked(mesh, rows, (batch, 1024, choices)),
        marked(mesh, rows, (batch, 1024, choices), jnp.int32),
        *[marked(mesh, own, (8, 1024, 1024), jnp.bfloat16)] * 3,
    )  # fmt: skip
    fn = lambda *args: spmd.mark_sharding(experts(*args), mesh, rows)  # noqa: E731
    lowered = spmd.jit(fn, mesh=mesh).lower(*args, topology=spmd.Topology("h200:8"))
    return [(c.kind, c.axes) for c in lowered.collectives if c.bytes > 1e6]


@pytest.mark.thorough
@pytest.mark.usefixtures("exact_plans")
def test_what_is_smaller_is_sent() -> None:
    """Few rows go to their experts, or to all; experts go to many rows."""
    there, back = ("all_gather", ("expert",)), ("reduce_scatter", ("expert",))
    assert planned(8) == [("ragged_all_to_all", ("expert",))]
    assert planned(16, choices=8) == [there, back]
    assert planned(512) == [there] * 3


@pytest.mark.parametrize(
    ("index", "shape"), [(0, (4, 8)), (1, (4, 6, 3)), (3, (6, 12, 9)), (5, (6, 12, 8)), (2, None)]
)
def test_what_does_not_fit_is_said(index: int, shape: Any) -> None:
    args = list(operands())
    args[index] = args[index].astype(np.float32) if shape is None else np.zeros(shape, np.float32)
    with pytest.raises(spmd.ArgumentError, match="experts cannot be computed"):
        experts(*args)
