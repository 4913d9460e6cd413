"""Trees of numbers compared by the largest entry of each leaf: single ones near zero say little."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd


def close(found: Any, wanted: Any, tolerance: float = 2e-5, least: float = 1.0) -> None:
    """Holds that entries differ by so large a share of their own, and of the leaf's largest, size.

    Args:
      found, wanted: trees of the same structure.
      tolerance: the share.
      least: what counts as the largest entry where all are smaller.
    """

    def check(path: Any, a: Any, b: Any) -> None:
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        atol = tolerance * max(least, np.abs(b).max(initial=0))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=atol, err_msg=name)

    jax.tree_util.tree_map_with_path(check, found, wanted)


def partitioned(
    fn: Any, *args: Any, plain: Any = None, tolerance: float = 2e-5,
    options: spmd.Options = spmd.Options(check=True), **how: Any,  # noqa: B008
) -> spmd.Compiled:  # fmt: skip
    """Compiles a function by `spmd.jit`, and holds that it computes what `jax.jit` does.

    Args:
      plain: another function for `jax.jit`.
      how: of `spmd.jit`.
    """
    compiled = spmd.jit(fn, options=options, **how).compile(*args)
    close(compiled(*args), jax.jit(plain or fn)(*args), tolerance)
    return compiled


TOLERANCE = {"float32": 1e-4, "float64": 1e-6, "complex64": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}


def assert_same_trees(got: Any, want: Any) -> None:
    """Two pytrees of arrays are built alike and have the same leaves."""
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(want))
    jax.tree_util.tree_map_with_path(assert_same, got, want)


def assert_same(path: Any, got: Any, want: Any) -> None:
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
    rtol = TOLERANCE[name]
    np.testing.assert_allclose(got, want, rtol, rtol / 5 * max(scale, 1e-3), err_msg=where)
