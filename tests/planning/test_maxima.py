"""Maxima stay terms for as long as they are only moved or compared, and are exchanged once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd


def largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x)).reshape(1, 1)


def test_maxima_over_different_axes_are_joined_before_they_are_exchanged(devices8: Any) -> None:
    """Beside them lies what is whole: it stands for each device's term."""
    mesh = spmd.make_mesh(data=4, model=2, devices=devices8)

    def history(x: Any, y: Any, before: Any) -> Any:
        first = jnp.concatenate([largest(x), largest(y), jnp.maximum(largest(x), largest(y))])
        return jnp.concatenate([first, before[:, :-1]], axis=1)

    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2))
    before = rng.standard_normal((3, 5)).astype(np.float32)
    specs = (("data", None), ("data", "model"), (None, None))
    jitted = spmd.jit(
        history, mesh=mesh, in_specs=specs, out_specs=(None, None), options=spmd.Options(check=True)
    )
    compiled = jitted.compile(x, y, before)
    np.testing.assert_array_equal(compiled(x, y, before), history(x, y, before))
    exchanged = [(c.kind, c.axes, c.count) for c in compiled.collectives]
    assert exchanged == [("all_reduce", ("data", "model"), 1)]


def test_maxima_of_a_loop_are_exchanged_behind_it(devices8: Any) -> None:
    mesh = spmd.make_mesh(data=4, model=2, devices=devices8)

    def run(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return jnp.maximum(carry, largest(row)), largest(row)

        return jax.lax.scan(body, jnp.zeros((1, 1)), x)

    x = np.random.default_rng(0).standard_normal((6, 16, 8)).astype(np.float32)
    jitted = spmd.jit(
        run, mesh=mesh, in_specs=((None, "data", "model"),), options=spmd.Options(check=True)
    )
    compiled = jitted.compile(x)
    jax.tree.map(np.testing.assert_array_equal, compiled(x), run(x))
    assert {c.count for c in compiled.collectives} == {1}  # neither in each iteration
