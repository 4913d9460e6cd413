"""What is scattered into zeros and added to a sum is scattered into the sum: the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.frontend.normalize import accumulate
from spmd.ir.legality import check_program
from spmd.ir.program import Program
from tests.ir.examples import program_of

W = np.random.default_rng(0).random((3, 4, 5), np.float32)


def piece(w: Any, i: Any) -> Any:
    """A piece of each of the 3 rows, at a place of its own."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(w, i)


def in_a_loop(w: Any) -> Any:
    """The gradient adds up what each step leaves in zeros."""
    places = (jnp.arange(6)[:, None] + jnp.arange(3)) % 4
    zero = jnp.zeros(())
    return jax.lax.scan(lambda s, i: (s + jnp.sin(piece(w, i)).sum(), None), zero, places)[0]


def put(w: Any, at: Any, value: Any) -> Any:
    return jnp.zeros_like(w).at[at].add(value, unique_indices=True)


SUMS = {
    "in a loop": jax.grad(in_a_loop),
    "to the left": lambda w: put(w, np.array([0, 2]), w[:2]) + w,
    "to the right": lambda w: w * 2 + put(w, np.array([0, 2]), w[:2]),
}

KEPT = {
    "updates may fall together": lambda w: w + jnp.zeros_like(w).at[np.array([0, 0])].add(w[:2]),
    "not into zeros": lambda w: w + jnp.ones_like(w).at[0].add(w[1], unique_indices=True),
    "read twice": lambda w: (lambda s: (s + w, s * 2))(put(w, 0, w[1])),
    "twice itself": lambda w: (lambda s: s + s)(put(w, 0, w[1])),
    "two of them": lambda w: put(w, 0, w[1]) + put(w, 1, w[0]),
}


def sums(program: Program) -> int:
    return sum(op.name == "stablehlo.add" for op in program.walk())


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_made_in_place(name: str) -> None:
    program = program_of(SUMS[name], W)
    new = accumulate(program)
    check_program(new)
    assert sums(new) == sums(program) - 1
    mesh = spmd.make_mesh(data=3, devices=jax.devices()[:3])
    w = spmd.mark_sharding(W, mesh, ("data", None, None))
    options = spmd.Options(check=True)
    found = spmd.jit(SUMS[name], mesh=mesh, options=options)(w)
    np.testing.assert_allclose(found, jax.jit(SUMS[name])(W), rtol=1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_other_sums_are_kept(name: str) -> None:
    program = program_of(KEPT[name], W)
    assert sums(accumulate(program)) == sums(program)
