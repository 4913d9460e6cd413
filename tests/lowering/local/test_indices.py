"""Look-ups whose indices are of other types than i32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

ROWS = lax.GatherDimensionNumbers((), (0,), (0,))
UPDATES = lax.ScatterDimensionNumbers((), (0,), (0,))


@pytest.mark.usefixtures("exact_plans")
def test_indices_past_the_range_of_i32_are_past_the_table() -> None:
    def program(x: Any, *indices: Any) -> Any:
        found = []
        for each in indices:
            each = each[:, None]
            found.append(lax.gather(x, each, ROWS, (1,), mode="clip"))
            found.append(lax.scatter_add(x, each, jnp.ones(4, x.dtype), UPDATES, mode="drop"))
        return found

    step = spmd.jit(program, mesh=spmd.make_mesh(m=2), in_specs=(("m",), (None,), (None,)))
    with jax.enable_x64(True):
        args = [
            np.arange(8, dtype=np.float32),
            np.array([1, 2**31 + 5, 6, 2**32 - 1], np.uint32),
            np.array([1, 2**32 + 3, 6, 2**63 + 1], np.uint64),
        ]
        jax.tree.map(np.testing.assert_array_equal, step(*args), jax.jit(program)(*args))
