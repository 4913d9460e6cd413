"""States without positions: rows of many slots in one scan are what a loop over each makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.models.decode.recurrence import linear_recurrence

A, B, R, N, W = 2, 3, 7, 4, 5
RECUR = jax.jit(linear_recurrence)

counts = st.lists(st.integers(0, 3), min_size=B, max_size=B).filter(lambda c: sum(c) <= R)


@given(
    rows_of=st.lists(counts, min_size=A, max_size=A),
    begins=st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=A, max_size=A),
    spoilt=st.integers(-1, B - 1),
    seed=st.integers(0, 99),
)
def test_it_is_a_loop_over_each_slot(
    rows_of: list[list[int]], begins: list[list[bool]], spoilt: int, seed: int
) -> None:
    """Whichever slots have rows, begin anew or go on; NaN in one sequence stays in it."""
    rng = np.random.default_rng(seed)
    pool = rng.normal(size=(A, N, W)).astype(np.float32)
    decay, new = rng.normal(size=(2, A, R, W)).astype(np.float32)
    table = np.stack([rng.permutation(N)[:B] for _ in range(A)])[..., None].astype(np.int32)
    first = np.pad(np.cumsum(rows_of, axis=1), ((0, 0), (1, 0))).astype(np.int32)
    slots, positions = np.zeros((A, R), np.int32), np.full((A, R), -1, np.int32)
    for a in range(A):
        for b in range(B):
            mine = slice(first[a, b], first[a, b + 1])
            slots[a, mine] = b
            positions[a, mine] = np.arange(rows_of[a][b]) + (0 if begins[a][b] else 4)
            if b == spoilt:
                pool[a, table[a, b]] = np.nan
    rows = {"slots": slots, "positions": positions, "first": first, "table": table}
    found, after = RECUR(jnp.array(pool), decay, new, rows)
    for a in range(A):
        for b in range(B):
            state = pool[a, table[a, b, 0]]
            if begins[a][b] and rows_of[a][b]:
                state = np.zeros(W, np.float32)
            for r in range(first[a, b], first[a, b + 1]):
                state = decay[a, r] * state + new[a, r]
                np.testing.assert_allclose(found[a, r], state, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(after[a, table[a, b, 0]], state, rtol=1e-4, atol=1e-4)
        others = np.setdiff1d(np.arange(N), table[a])
        np.testing.assert_array_equal(after[a, others], pool[a, others])


def test_several_pages_a_sequence_are_refused() -> None:
    rows = {"table": jnp.zeros((A, B, 2), jnp.int32), "first": jnp.zeros((A, B + 1), jnp.int32)}
    rows |= dict.fromkeys(("slots", "positions"), jnp.zeros((A, R), jnp.int32))
    with pytest.raises(spmd.ArgumentError, match="max_length"):
        linear_recurrence(jnp.zeros((A, N, W)), jnp.ones((A, R, W)), jnp.ones((A, R, W)), rows)
