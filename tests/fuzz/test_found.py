"""What fuzzing found, each in its smallest form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

CHECKED = spmd.Options(check=True)


def numbers(*shape: int) -> Any:
    return (np.random.RandomState(0).randint(-96, 97, shape) / 64).astype(np.float32)


def check(fn: Callable[..., Any], *args: Any, want: Any = None, **options: Any) -> None:
    """`want` is for what XLA itself gets wrong; else it is what jax.jit says."""
    want = jax.jit(fn)(*args) if want is None else want
    step = spmd.jit(fn, options=CHECKED, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), step(*args), want)


def test_a_branch_that_returns_nothing() -> None:
    """jax hands on what both branches return unchanged, and leaves an op without results."""

    def fn(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: x, lambda x: (x.max(1), x)[1], x)

    check(fn, numbers(4, 4), mesh=spmd.Mesh(None, (2,), ("a",)), in_specs=(("a",),))


def test_a_loop_that_returns_another_carry() -> None:
    def fn(x: Any, y: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, c: (c[0], c[0], c[1] + i), (x, y, y))

    mesh = spmd.Mesh(None, (3, 2), ("a", "b"))
    check(fn, numbers(6, 4), numbers(6, 4), mesh=mesh, in_specs=(("b", None), (None, "b")))


@pytest.mark.parametrize("out", [("a", None), (("b", "a"), None), (None, "b")], ids=str)
def test_a_local_slice_of_a_slice(out: Any) -> None:
    """XLA adds the starts of the two, as if the first were not clamped."""

    def fn(x: Any, i: Any) -> Any:
        return lax.dynamic_slice_p.bind(x, i, jnp.int32(7), slice_sizes=(8, 6))

    x, mesh = numbers(10, 6), spmd.Mesh(None, (4, 2), ("a", "b"))
    step = spmd.jit(fn, options=CHECKED, mesh=mesh, out_specs=out)
    for start in (-3, 0, 2, 5, 100):
        at = min(max(start, 0), 2)
        np.testing.assert_array_equal(step(x, np.int32(start)), x[at : at + 8])


def test_a_local_slice_of_what_a_loop_sliced() -> None:
    """XLA inlines a loop of one trip."""
    mesh = spmd.Mesh(None, (2,), ("a",))

    def fn(x: Any, start: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            spmd.mark_sharding(carry, mesh, ("a",))
            return lax.dynamic_slice(x, (carry[0],), (4,))

        return lax.fori_loop(0, 1, body, start)

    x, step = np.arange(9), spmd.jit(fn, options=CHECKED, mesh=mesh, out_specs=(...,))
    np.testing.assert_array_equal(step(x, np.full(4, 8)), x[5:])


def test_a_local_slice_of_a_gather() -> None:
    dims = lax.GatherDimensionNumbers((0,), (), (0,))

    def fn(x: Any, i: Any) -> Any:
        return lax.gather(x, i, dims, (8,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    x, mesh = numbers(10), spmd.Mesh(None, (4,), ("a",))
    step = spmd.jit(fn, options=CHECKED, mesh=mesh, out_specs=("a",))
    for start in (-3, 1, 5):
        at = min(max(start, 0), 2)
        np.testing.assert_array_equal(step(x, np.asarray([start], np.int32)), x[at : at + 8])


@pytest.mark.parametrize("op", ["add", "max", "min", "mul"])
def test_reductions_with_an_initial_value(op: str) -> None:
    """XLA drops the initial value where the reduced dims have size 1, as a local piece's may."""
    x = np.asarray([[1, 2], [3, 1], [-4, 8]], np.float32)
    init = {"add": 5, "max": 2, "min": 2, "mul": 3}[op]
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}[op]

    def fn(*xs: Any) -> Any:
        reduce = getattr(lax, op)
        return [lax.reduce(x, np.asarray(init, x.dtype), reduce, (1,)).astype("f4") for x in xs]

    xs = [jnp.asarray(x, dtype) for dtype in ("float32", "bfloat16", "int32")]
    mesh = spmd.Mesh(None, (2,), ("a",))
    want = [combine(combine.reduce(x, 1), init)] * 3
    check(fn, *xs, want=want, mesh=mesh, in_specs=((None, "a"),) * 3)


def test_a_merged_dim_whose_parts_are_split_alike() -> None:
    """Both claims on (j k) are for one axis: it was proposed twice for one dim."""

    def fn(x: Any, y: Any) -> Any:
        return jnp.concatenate([x.reshape(6, 32), y], 0)

    specs = ((None, None, "a"), (None, "a"))
    check(fn, numbers(6, 2, 16), numbers(6, 32), mesh=spmd.Mesh(None, (2,), ("a",)), in_specs=specs)


@pytest.mark.parametrize("op", ["add", "set", "max"])
def test_one_update_of_a_locally_sliced_value(op: str) -> None:
    """XLA reads what a single update replaces at its index in the value before it was sliced."""
    dims = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    scatter = {"add": lax.scatter_add, "set": lax.scatter, "max": lax.scatter_max}[op]

    def fn(x: Any, y: Any, z: Any, i: Any, u: Any) -> Any:
        table = lax.broadcast_in_dim(jnp.concatenate([x, y, z]), (4, 12), (1,))
        return scatter(table, i, u, dims, mode=lax.GatherScatterMode.FILL_OR_DROP).min(0)

    x, u = numbers(12), np.asarray([-5.0 if op != "max" else 5.0], np.float32)
    step = spmd.jit(fn, options=CHECKED, mesh=spmd.Mesh(None, (2,), ("a",)), out_specs=("a",))
    for index in ((3, 7), (3, 2), (0, 11), (3, 12), (-1, 0), (5, 5)):
        want = np.broadcast_to(x, (4, 12)).copy()
        if 0 <= index[0] < 4 and 0 <= index[1] < 12:
            new = {"add": want[index] + u[0], "set": u[0], "max": max(want[index], u[0])}[op]
            want[index] = new
        got = step(x[:3], x[3:4], x[4:], np.asarray([index], np.int32), u)
        np.testing.assert_allclose(got, want.min(0), rtol=1e-5, err_msg=str(index))


def test_a_value_that_a_product_reads_twice_along_other_dims() -> None:
    """The batch factor is another dim of each operand: both dims of the value got the one axis."""

    def fn(x: Any) -> Any:
        return lax.dot_general(x, x, (((1,), (0,)), ((0,), (1,))))

    check(fn, numbers(4, 4), mesh=spmd.Mesh(None, (2,), ("a",)), out_specs=("a",))
