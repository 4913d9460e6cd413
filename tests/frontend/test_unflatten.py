"""Sums over flattened tensors: nothing is gathered for them, and they are what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from benchmarks.programs.conditions import small_machine
from spmd.frontend.normalize import unflatten
from spmd.ir.description import RESHAPE
from spmd.ir.legality import check_program
from tests.ir.examples import program_of

OPTIONS = spmd.Options(topology=small_machine(), check=True)
X = np.random.default_rng(0).random((8, 6, 4), np.float32)

SUMS = {
    "everything": lambda x: x.ravel().sum(),
    "two of three": lambda x: x.reshape(48, 4).max(0),
    "what is left is split anew": lambda x: x.reshape(48, 2, 2).sum(0),
    "ones between": lambda x: x.reshape(8, 1, 24, 1).sum((2, 3)),
    "product": lambda x: jnp.vdot(x, 2 * x),
    "also read": lambda x: (x.ravel().sum(), x.ravel()[:5]),
    "in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, s: s + (x * s).ravel().sum(), 0.1),
}

KEPT = {
    "a part of a group": lambda x: x.reshape(48, 4).reshape(12, 16).sum(1),
    "nothing flattened": lambda x: x.sum(0),
    "shapes that differ": lambda x: jnp.vdot(x.ravel(), x.transpose(2, 1, 0).ravel()),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_split_tensor_is_summed_where_it_is(name: str, mesh: spmd.Mesh) -> None:
    fn = SUMS[name]
    after = unflatten(program_of(fn, X))
    check_program(after)
    x = spmd.mark_sharding(X, mesh, ("data", "model"))
    compiled = spmd.jit(fn, mesh=mesh, options=OPTIONS).compile(x)
    got, want = compiled(x), fn(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    kinds = {c.kind for c in compiled.collectives}
    assert name == "also read" or "all_gather" not in kinds
    if name == "everything":
        grad = spmd.jit(jax.grad(fn), mesh=mesh)(x)
        np.testing.assert_array_equal(grad, jax.grad(fn)(X))


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_such_sum_stays(name: str) -> None:
    before = program_of(KEPT[name], X)
    assert unflatten(before) is before


def test_a_reshape_that_nobody_reads_goes() -> None:
    after = unflatten(program_of(SUMS["everything"], X))
    assert [op.name for op in after.body.ops if op.name == RESHAPE] == []
