"""Sums over whole tensors, results taken apart, and what is added in place: the same numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from benchmarks.programs.program import small_machine
from benchmarks.programs.remat import CHECKPOINTS, gradient
from spmd.frontend.normalize import accumulate, unflatten
from spmd.ir.description import RESHAPE
from spmd.ir.legality import check_program
from spmd.ir.program import Program
from tests.close import partitioned
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
    kinds = {c.kind for c in partitioned(fn, x, mesh=mesh, options=OPTIONS).collectives}
    assert name == "also read" or "all_gather" not in kinds
    if name == "everything":
        assert RESHAPE not in [op.name for op in after.body.ops]
        np.testing.assert_array_equal(spmd.jit(jax.grad(fn), mesh=mesh)(x), jax.grad(fn)(X))


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_such_sum_stays(name: str) -> None:
    before = program_of(KEPT[name], X)
    assert unflatten(before) is before


# Results taken apart.

ROWS = np.random.default_rng(0).random((8, 16), np.float32)


@pytest.mark.usefixtures("devices8")
def test_each_operand_of_a_barrier_may_have_the_axis() -> None:
    def fn(x: Any, y: Any) -> Any:
        return lax.optimization_barrier((x * 2, y * 3))

    mesh = spmd.make_mesh(data=8)
    specs = (("data", None), (None, "data"))
    compiled = partitioned(fn, ROWS, ROWS.T.copy(), mesh=mesh, in_specs=specs)
    assert not compiled.collectives
    local = compiled.stages.partitioned.program
    barriers = [op for op in local.walk() if op.name == "stablehlo.optimization_barrier"]
    assert [len(op.results) for op in barriers] == [2]


@pytest.mark.parametrize(
    ("stack", "policy"),
    [("scan", "nothing_saveable"), ("scan", "everything_saveable"), ("unrolled", "dots_saveable")],
)
def test_recomputation_sends_what_it_would_without_a_barrier(
    stack: str, policy: str, mesh: spmd.Mesh
) -> None:
    rule = getattr(jax.checkpoint_policies, policy)
    sent = []
    for prevent_cse in (True, False):
        CHECKPOINTS["tested"] = partial(jax.checkpoint, prevent_cse=prevent_cse, policy=rule)
        built = gradient(mesh, "mlp", "tested", stack)
        planner: Any = "greedy" if stack == "scan" else "exact"
        options = spmd.Options(topology=small_machine(), planner=planner)
        lowered = spmd.jit(built.fn, mesh=mesh, options=options).lower(*built.args)
        sent.append(sum(c.bytes * c.count for c in lowered.collectives))
    assert sent[0] == pytest.approx(sent[1], rel=0.02)


# What is added in place.

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


ADDED = {
    "in a loop": jax.grad(in_a_loop),
    "to the left": lambda w: put(w, np.array([0, 2]), w[:2]) + w,
    "to the right": lambda w: w * 2 + put(w, np.array([0, 2]), w[:2]),
}

APART = {
    "updates may fall together": lambda w: w + jnp.zeros_like(w).at[np.array([0, 0])].add(w[:2]),
    "not into zeros": lambda w: w + jnp.ones_like(w).at[0].add(w[1], unique_indices=True),
    "read twice": lambda w: (lambda s: (s + w, s * 2))(put(w, 0, w[1])),
    "twice itself": lambda w: (lambda s: s + s)(put(w, 0, w[1])),
    "two of them": lambda w: put(w, 0, w[1]) + put(w, 1, w[0]),
}


def sums(program: Program) -> int:
    return sum(op.name == "stablehlo.add" for op in program.walk())


@pytest.mark.parametrize("name", ADDED)
def test_sums_are_made_in_place(name: str) -> None:
    program = program_of(ADDED[name], W)
    new = accumulate(program)
    check_program(new)
    assert sums(new) == sums(program) - 1
    mesh = spmd.make_mesh(data=3, devices=jax.devices()[:3])
    partitioned(ADDED[name], W, mesh=mesh, in_specs=(("data", None, None),))


@pytest.mark.parametrize("name", APART)
def test_other_sums_are_kept(name: str) -> None:
    program = program_of(APART[name], W)
    assert sums(accumulate(program)) == sums(program)
