"""An initial value joins a reduction once, however many devices reduce pieces of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from tests.close import partitioned

X = (np.random.RandomState(0).randint(-96, 97, (3, 14)) / 64).astype(np.float32)


def nonzero(a: Any, b: Any) -> Any:
    return jnp.where(b > 0, b, a)  # the last one: the order of terms decides


BODIES: dict[str, tuple[Callable[..., Any], float]] = {
    "add": (lax.add, 3.0),
    "add that is no one op": (lambda a, b: a + b + 0 * a, 3.0),
    "hypot": (lambda a, b: jnp.sqrt(a * a + b * b), 1.0),
    "last above zero": (nonzero, -7.0),
    "logaddexp": (jnp.logaddexp, 0.0),
    "logaddexp from its identity": (jnp.logaddexp, -np.inf),
    "max": (lax.max, 0.5),
    "the last": (lambda a, b: b + 0 * a, 5.0),
}


def program(x: Any) -> Any:
    found = {}
    for name, (body, start) in BODIES.items():
        init = np.float32(start)
        found[f"{name}: all"] = lax.reduce(x, init, body, (0, 1))
        found[f"{name}: rows"] = lax.reduce(x, init, body, (1,))
        windows = (x, init, body, (1, 3), (1, 1), [(0, 0), (1, 1)])
        found[f"{name}: windows"] = lax.reduce_window(*windows)
        running = (x, init, body, (1, 14), (1, 1), [(0, 0), (13, 0)])
        found[f"{name}: running"] = lax.reduce_window(*running)
    pairs = (np.float32(2), np.float32(3))
    found["composed"] = lax.reduce((x, x + 1), pairs, composed, (1,))[1]
    return found


def composed(a: Any, b: Any) -> Any:
    return b[0] * a[0], b[0] * a[1] + b[1]


@pytest.mark.parametrize("size", [2, 5, 7])
def test_an_initial_value_counts_once(size: int) -> None:
    mesh = spmd.Mesh(None, (size,), ("a",))
    specs = {name: None for name in jax.eval_shape(program, X)}

    def marked(x: Any) -> Any:
        return program(spmd.mark_sharding(x, mesh, (None, "a")))

    partitioned(marked, X, plain=program, mesh=mesh, out_specs=specs)
