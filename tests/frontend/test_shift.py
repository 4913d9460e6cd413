"""A head is chosen, not joined, where that sends less; and values stay the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from tests.close import partitioned


def joins_of(fn: Callable[..., Any], x: Any) -> list[int]:
    """How many rows the concatenations of a program make, as it is planned."""
    mesh = spmd.Mesh(None, (8,), ("seq",))
    ops = spmd.jit(fn, mesh=mesh, in_specs=(("seq",),)).lower(x).stages.program.walk()
    return [op.kind.results[0].shape[0] for op in ops if op.label == "concatenate"]


def linear(x: Any, y: Any) -> Any:
    return x[0] * y[0], y[0] * x[1] + y[1]


def combined(x: Any, y: Any) -> Any:
    """Reads the head in two places, and a scalar and a row that are the same for all elements."""
    return jnp.where(y > 0, x, x * 0.5 + y) + jnp.arange(4.0)


@pytest.mark.parametrize(("size", "reverse"), [(64, False), (61, True), (9, False), (2, True)])
def test_scans_along_a_split_dim(mesh: spmd.Mesh, size: int, reverse: bool) -> None:
    a = np.random.default_rng(0).uniform(0.5, 1, (size, 4)).astype(np.float32)
    b = np.random.default_rng(1).standard_normal((size, 4), np.float32)

    def scan(a: Any, b: Any) -> Any:
        split = spmd.mark_sharding(a * 2, mesh, (("data", "model"), None))
        one = lax.associative_scan(linear, (split, b), reverse=reverse)
        return one, lax.associative_scan(combined, b, reverse=reverse)

    partitioned(scan, a, b, mesh=mesh, tolerance=1e-5)


@pytest.mark.thorough
def test_gradients_along_a_split_dim(mesh: spmd.Mesh) -> None:
    a = np.random.default_rng(0).uniform(0.5, 1, (16, 4)).astype(np.float32)

    def loss(a: Any) -> Any:
        return (lax.associative_scan(linear, (a, a + 1))[1] ** 2).sum()

    partitioned(jax.grad(loss), a, mesh=mesh, in_specs=((("data", "model"), None),))


def test_a_level_sends_one_row() -> None:
    """To the right neighbour, of each value that it combines; and small levels are exchanged."""
    mesh = spmd.Mesh(None, (8,), ("seq",))
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((1, 65536, 1024), np.float32), mesh, (None, "seq"))
    scan = lambda a, b: lax.associative_scan(linear, (a, b), axis=1)[1]  # noqa: E731
    jitted = spmd.jit(scan, mesh=mesh, out_specs=(None, "seq"))
    found = jitted.lower(x, x, topology=spmd.Topology("h200:8")).collectives
    permutes = [c for c in found if c.kind == "collective_permute"]
    assert {c.bytes for c in permutes} == {4 * 1024}
    whole = x.size * 4
    assert sum(c.bytes * c.count for c in found) < whole / 16  # all-to-alls at the top: whole / 3


def test_heads_are_chosen() -> None:
    x = np.ones((64, 4), np.float32)
    assert set(joins_of(lambda x: lax.associative_scan(combined, x), x)) <= {1, 2}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.concatenate([x[:1], x[:-1]]),  # nothing is computed
        lambda x: jnp.concatenate([x[:1], x[:-1] * 2]),  # the head is not what comes before
        lambda x: jnp.concatenate([x[:2], x[2:] * 2]),  # two elements
        lambda x: (jnp.concatenate([x[:1], t := x[1:] * x[:-1]]), t),  # read as it was, too
    ],
)
def test_others_are_left(fn: Callable[..., Any]) -> None:
    x = np.arange(256, dtype=np.float32).reshape(64, 4)
    assert joins_of(fn, x) == [64]


def test_what_is_made_of_padding_is_not_seen(mesh: spmd.Mesh) -> None:
    x = np.arange(1, 65, dtype=np.int32)
    fn = lambda x: jnp.concatenate([x[:1], x[1:] // x[:-1] + (x[1:] % x[:-1])])  # noqa: E731
    np.testing.assert_array_equal(spmd.jit(fn, mesh=mesh, in_specs=(("data",),))(x), fn(x))
