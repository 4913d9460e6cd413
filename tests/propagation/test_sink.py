"""Carries that a loop does not change and could make itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.frontend.importer.module import import_module
from spmd.ir.legality import check_program
from spmd.ir.program import Program
from spmd.propagation.sink import sink_invariants


def imported(fn: Any, *args: Any) -> Program:
    module: Any = jax.jit(fn).lower(*args).compiler_ir()
    return import_module(module, ()).program


def carries(program: Program) -> list[int]:
    return [len(op.results) for op in program.walk() if op.name == "stablehlo.while"]


def shapes(program: Program) -> list[tuple[int, ...]]:
    """The shapes that the program's only loop carries."""
    (loop,) = (op for op in program.walk() if op.is_loop)
    return [t.shape for t in loop.kind.results]


X = jnp.arange(32.0).reshape(4, 8)


def masked_scan(x: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((4, 8), bool))
    zeros = jnp.zeros((4, 8))

    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.fori_loop(0, 2, lambda _, y: jnp.where(mask, y + row, zeros), carry), None

    return jax.lax.scan(body, x, jnp.stack([x, x]))[0]


def test_masks_are_made_inside() -> None:
    before = imported(masked_scan, X)
    after = sink_invariants(before)
    check_program(after)
    assert sum(carries(after)) < sum(carries(before))
    assert sink_invariants(after) == after


def test_of_what_depends_on_a_scalar_argument_the_scalar_is_carried() -> None:
    def scaled(x: jax.Array, s: jax.Array) -> jax.Array:
        ramp = jnp.broadcast_to(s, (4, 8))
        return jax.lax.fori_loop(0, 3, lambda _, y: y * ramp, x)

    before = imported(scaled, X, jnp.float32(2))
    after = sink_invariants(before)
    check_program(after)
    assert sorted(shapes(before)) == [(), (4, 8), (4, 8)]
    assert sorted(shapes(after)) == [(), (), (4, 8)]


@pytest.mark.usefixtures("devices8")
def test_values_are_the_same(mesh: spmd.Mesh) -> None:
    marked = spmd.mark_sharding(X, mesh, ("data", "model"))
    step = spmd.jit(masked_scan, mesh=mesh, options=spmd.Options(check=True))
    np.testing.assert_allclose(step(marked), masked_scan(X), rtol=1e-6)
