"""Whether two results are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-4, "float64": 1e-6, "complex64": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}


def assert_same_trees(got: Any, want: Any, tolerance: float | None = None) -> None:
    """Two pytrees are built alike and have the same leaves.

    Args:
      got, want: pytrees of arrays.
      tolerance: instead of `TOLERANCE` of a leaf's type.
    """
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(want))
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: assert_same(path, a, b, tolerance), got, want
    )


def assert_same(path: Any, got: Any, want: Any, tolerance: float | None = None) -> None:
    """Equal bits where the type is discrete, else close relative to the leaf's largest entry."""
    where = jax.tree_util.keystr(path)
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    assert got.dtype == want.dtype, where
    assert got.shape == want.shape, where
    name = str(want.dtype)
    got, want = np.asarray(got), np.asarray(want)
    if name not in TOLERANCE:
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    wide = np.complex128 if name == "complex64" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 0.0
    rtol = TOLERANCE[name] if tolerance is None else tolerance
    np.testing.assert_allclose(got, want, rtol, rtol / 5 * max(scale, 1e-3), err_msg=where)
