"""The partitioned Llama training step equals the unpartitioned `jax.jit` step."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from tests.close import close
from tests.programs import llama, take

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
    state = training.optimizer.init(training.params)
    return take(jax.jit(training.plain_step), training.params, state, training.batch, STEPS)


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
    *trees, losses = llama(make_mesh(shape), optimizer, scan).run(STEPS, planner=planner)
    *wanted, want_losses = reference(optimizer, scan)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    # Adam turns gradients that are pure rounding noise into steps of full size, so single entries
    # near zero say nothing; how many depends on the CPU.
    close(trees, wanted, 2e-4, least=1e-3)
