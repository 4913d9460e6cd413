"""The partitioned Llama training step equals the unpartitioned `jax.jit` step."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.programs import Training, llama

STEPS = 3
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
OPTIMIZERS = ("adamw", "adafactor")
QUICK = (((4, 2), "adafactor", False), ((2, 4), "adamw", True))


def make_mesh(shape: tuple[int, int]) -> spmd.Mesh:
    return spmd.make_mesh(data=shape[0], model=shape[1])


@lru_cache(maxsize=4)
def reference(optimizer: str, scan: bool) -> tuple[Any, Any, list[float]]:
    """Parameters, optimizer state and losses of a few unpartitioned steps."""
    training = llama(make_mesh((1, 1)), optimizer, scan)
    step = jax.jit(training.plain_step)
    params, state = training.params, training.optimizer.init(training.params)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, training.batch)
        losses.append(float(loss))
    return params, state, losses


def run_partitioned(training: Training, planner: str) -> tuple[Any, Any, list[float]]:
    compiled = training.compile(planner=planner)
    params = training.marked_params
    state = compiled.init(1, training.optimizer.init, params)
    losses = []
    for _ in range(STEPS):
        params, state, loss = compiled(params, state, training.marked_batch)
        losses.append(float(loss))
    return params, state, losses


def assert_trees_close(actual: Any, expected: Any) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        # Relative to the leaf's largest entry: Adam turns gradients that are pure rounding noise
        # into steps of full size, so single entries near zero say nothing; how many depends on the
        # CPU.
        scale = float(jnp.max(jnp.abs(b))) if jnp.size(b) else 0.0
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-4 * max(scale, 1e-3),
            err_msg=jax.tree_util.keystr(path),
        )  # fmt: skip

    jax.tree_util.tree_map_with_path(check, actual, expected)


def cases() -> Iterator[Any]:
    """Meshes, optimizers and forms; all but two of them together if heavy."""
    for shape, optimizer, scan in product(MESHES, OPTIMIZERS, (True, False)):
        name = f"{shape[0]}x{shape[1]}-{optimizer}-{'scan' if scan else 'unrolled'}"
        marks: Any = () if (shape, optimizer, scan) == QUICK[0] else pytest.mark.thorough
        if (shape, optimizer, scan) not in QUICK:
            marks = pytest.mark.heavy
        yield pytest.param(shape, optimizer, scan, id=name, marks=marks)


@pytest.mark.parametrize(("shape", "optimizer", "scan"), list(cases()))
def test_partitioned_step_equals_unpartitioned(
    shape: tuple[int, int], optimizer: str, scan: bool
) -> None:
    planner = "exact" if scan else "greedy"
    params, state, losses = run_partitioned(llama(make_mesh(shape), optimizer, scan), planner)
    want_params, want_state, want_losses = reference(optimizer, scan)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_trees_close(params, want_params)
    assert_trees_close(state, want_state)
