"""Registered composites: whole up to emission, then a kernel or what they are made of."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.control_flow import Index
from spmd.ir.description import COMPOSITE
from spmd.ir.dialect.composites import WORKSPACE, arguments_of
from spmd.ir.program import OpKind
from spmd.ir.types import Opaque
from spmd.mesh.spec import jax_mesh
from spmd.predict.timeline import LocalTimes

CHECKED = spmd.Options(check=True)
X = np.random.default_rng(0).standard_normal((10, 6), np.float32)


@jax.jit
def _helper(x: Any) -> Any:
    return jnp.exp(x)


def scaled_softmax(x: Any, *, scale: float = 1.0, axis: int = -1) -> Any:
    """Calls a function of its own: a module of more than one."""
    e = _helper(x * scale)
    return e / jnp.sum(e, axis, keepdims=True)


def mean_and_rows(x: Any) -> Any:
    """A sum over all rows, and something of each row."""
    return jnp.sum(x, 0), jnp.cos(x)


def with_attributes(x: Any, **attributes: Any) -> Any:
    SEEN.append(attributes)
    return x * attributes["f"]


@jax.jit
def _flip(x: Any) -> Any:
    return jnp.flip(x, 0)


def cpu_kernel(x: Any) -> Any:
    """Stands for a kernel that takes even numbers of rows."""
    return NotImplemented if x.shape[0] % 2 else _flip(jnp.flip(x, 0)) + 1


def failing(x: Any) -> Any:
    raise ValueError("no such shape")


SEEN: list[dict[str, Any]] = []

spmd.register_composite(
    "test.softmax", "b v -> b v", kinds={"v": "replicate"}, decomposition=scaled_softmax
)
spmd.register_composite(
    "test.sum", "b v -> v, b v", kinds={"b": "reduce"}, reduction="add", decomposition=mean_and_rows
)
spmd.register_composite("test.attributes", "b v -> b v", decomposition=with_attributes)
spmd.register_composite(
    "test.kernel", "b v -> b v", decomposition=lambda x: x + 1, kernels={"cpu": cpu_kernel}
)
spmd.register_composite("test.no_decomposition", "b v -> b v", kernels={"cpu": cpu_kernel})
spmd.register_composite("test.elsewhere", "b v -> b v", kernels={"cuda": lambda x: x})
spmd.register_composite("test.fails", "b v -> b v", decomposition=failing)
spmd.register_composite("test.wrong", "b v -> b v", decomposition=lambda x: x[:1])
heavy = {"cpu": lambda x: jnp.linalg.qr(x @ x.T)[0] @ x}
spmd.register_composite("test.heavy", "b v -> b v", kernels=heavy, flops=lambda kind: 1e12)


def composite(name: str, fn: Any, **attributes: Any) -> Any:
    return partial(jax.lax.composite(fn, name), **attributes)


def jitted(fn: Any, *specs: Any, **options: Any) -> Any:
    mesh, in_specs = spmd.make_mesh(x=4, y=2), specs or None
    return spmd.jit(fn, mesh=mesh, in_specs=in_specs, options=CHECKED, **options)


def emitted_functions(lowered: spmd.Lowered) -> int:
    return str(lowered.as_text("emitted")).count("func.func private")


def test_stays_one_op_and_is_computed_at_local_shapes() -> None:
    soft = composite("test.softmax", scaled_softmax, scale=0.5, axis=-1)

    def fn(x: Any) -> Any:
        return soft(soft(x) * 3)

    compiled = jitted(fn, (None, "y")).compile(X)
    assert compiled.as_text("program").count('name = "test.softmax"') == 2
    assert compiled.as_text("optimized").count("stablehlo.exponential") == 2
    assert "composite" not in compiled.as_text("optimized")
    np.testing.assert_allclose(compiled(X), jax.jit(fn)(X), rtol=1e-5)
    assert compiled.verify(X)
    assert compiled.collectives[0].reason.startswith("operand 0 of test.softmax needs")


def test_in_a_loop_and_in_a_manual_region() -> None:
    soft = composite("test.softmax", scaled_softmax, axis=-1)

    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: soft(x) + x, x)

    compiled = jitted(looped, ("x", None)).compile(X[:8])
    np.testing.assert_allclose(compiled(X[:8]), jax.jit(looped)(X[:8]), rtol=1e-5)

    mesh = spmd.make_mesh(x=4, y=2)
    where = jax_mesh(mesh)
    spec = jax.sharding.PartitionSpec("x")

    def manual(x: Any) -> Any:
        inside = jax.shard_map(
            lambda x: soft(x) * jax.lax.axis_index("x"), mesh=where, in_specs=spec,
            out_specs=spec, axis_names={"x"}, check_vma=False,
        )  # fmt: skip
        return inside(x)

    got = spmd.jit(manual, mesh=mesh, options=CHECKED)(X[:8])
    want = scaled_softmax(X[:8]) * np.repeat(np.arange(4.0), 2)[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("rows", [40_000, 39_998])
def test_a_reduced_factor_is_owed_by_the_results_that_lack_it(rows: int) -> None:
    """Also where four devices do not divide the rows: padding adds nothing."""
    mesh = spmd.make_mesh(x=4, y=2)
    both = composite("test.sum", mean_and_rows)

    def fn(x: Any) -> Any:
        total, each = both(spmd.mark_sharding(x + 1, mesh, ("x", None)))
        return total, jnp.sum(each, 1)

    x = np.random.default_rng(1).standard_normal((rows, 4), np.float32)
    compiled = spmd.jit(fn, mesh=mesh, options=CHECKED).compile(x)
    total, each = compiled(x)
    np.testing.assert_allclose(total, (x + 1).sum(0), rtol=1e-3)
    np.testing.assert_allclose(each, np.cos(x + 1).sum(1), rtol=1e-4, atol=1e-4)
    owed = [c.kind for c in compiled.collectives if c.reason.startswith("sum of test.sum over x")]
    assert owed in (["all_reduce"], ["reduce_scatter"])


def test_attributes_arrive_as_python_values() -> None:
    SEEN.clear()
    given = {"b": True, "i": 3, "f": 0.1, "s": "text", "t": (1, 2), "a": np.arange(3)}
    fn = composite("test.attributes", with_attributes, **given)
    np.testing.assert_allclose(jitted(fn)(X), X * np.float32(0.1), rtol=1e-6)
    found = SEEN[-1]
    assert found.keys() == given.keys()
    assert all(found[k] == given[k] for k in ("b", "i", "s", "t"))
    assert found["f"] == pytest.approx(0.1, rel=1e-6)
    np.testing.assert_array_equal(found["a"], [0, 1, 2])


def test_a_kernel_is_taken_on_its_platform_where_it_fits() -> None:
    fn = composite("test.kernel", lambda x: x + 1)
    even = jitted(lambda x: fn(fn(x)), ("y",)).compile(X[:8])
    assert "reverse" not in even.as_text("optimized")
    assert "reverse" in even.as_text("emitted")
    once = jitted(fn, ("y",)).lower(X[:8])
    assert emitted_functions(even) == emitted_functions(once) > 1, "equal calls share functions"
    assert even.verify(X[:8])
    np.testing.assert_allclose(even(X[:8]), X[:8] + 2)
    odd = jitted(fn, ("y",)).compile(X)  # five rows on each device
    assert "reverse" not in odd.as_text("emitted")
    np.testing.assert_allclose(odd(X), X + 1)
    other = jitted(fn, ("y",)).lower(X[:8], topology=spmd.Topology("h200:8"))
    assert "reverse" not in other.as_text("emitted")


def test_without_a_decomposition_or_a_registration() -> None:
    fn = composite("test.no_decomposition", lambda x: x + 1)
    np.testing.assert_allclose(jitted(fn, ("y",))(X[:8]), X[:8] + 1)
    with pytest.raises(spmd.SpmdError, match="has nothing that computes it here"):
        jitted(fn, ("y",)).lower(X)
    inlined = jitted(composite("test.elsewhere", lambda x: x * 3), ("y",)).lower(X)
    assert "composite" not in inlined.as_text("program")
    lowered = jitted(composite("test.nobody", lambda x: x * 3)).lower(X)
    assert "composite" not in lowered.as_text("program")
    assert "multiply" in lowered.as_text("program")


def test_costs() -> None:
    fn = composite("test.heavy", lambda x: x * 2)
    lowered = jitted(lambda x: fn(jnp.sin(x))).lower(np.zeros((64, 64), np.float32))
    (op,) = (op for op in lowered.stages.optimized.program.walk() if op.name == COMPOSITE)
    topology = spmd.Topology("cpu:8")
    program = lowered.stages.optimized.program
    seconds = LocalTimes(program, topology, Index(program)).seconds(op)
    assert seconds == pytest.approx(1e12 / topology.peak_flops("f32"))
    assert op.kind.attrs[WORKSPACE] > 0
    assert lowered.predicted_memory.temporary >= op.kind.attrs[WORKSPACE]


def test_mistakes_are_said() -> None:
    with pytest.raises(spmd.SpmdError, match="already has a rule"):
        spmd.register_composite("test.softmax", "b v -> b v", decomposition=scaled_softmax)
    with pytest.raises(spmd.SpmdError, match=r"nothing computes composite test\.none"):
        spmd.register_composite("test.none", "b v -> b v")
    with pytest.raises(spmd.SpmdError, match="'sum' is not a kind"):
        spmd.register_composite(
            "test.kind", "b v -> b v", kinds={"b": "sum"}, decomposition=scaled_softmax
        )
    fn = composite("test.fails", lambda x: x * 2)
    with pytest.raises(spmd.SpmdError, match="ValueError: no such shape") as caught:
        jitted(fn).lower(X)
    assert "test.fails on cpu fails at local shapes" in str(caught.value)
    fn = composite("test.wrong", lambda x: x * 2)
    with pytest.raises(spmd.SpmdError, match="has other results"):
        jitted(fn).lower(X)
    kind = OpKind(COMPOSITE, (), (), {"name": "test.x", "with.a": Opaque("unit")})
    with pytest.raises(spmd.SpmdError, match=r"attribute a of composite test\.x"):
        arguments_of(kind)
