"""Trees of numbers compared by the largest entry of each leaf: single ones near zero say little."""

from typing import Any

import jax
import numpy as np


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
