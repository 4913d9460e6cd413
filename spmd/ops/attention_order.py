"""Zigzag order: every device's part of a sequence has as much to attend to as any other's.

Under a causal mask a query sees the keys before it. Of a sequence in eight pieces the first of four
devices gets the pieces 0 and 7, the next one 1 and 6: late queries see what early ones do not. So
does Llama 3's context parallelism (Llama team, *The Llama 3 Herd of Models*, 2024, section 3.3.2).
Brandon et al., *Striped Attention* (2023), balance by single tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError


def zigzag(x: Any, parts: int, dim: int = 1) -> Any:
    """Puts a dim of positions into zigzag order.

    Args:
      x: an array with a dim of positions: numpy's gives numpy's. It may be traced.
      parts: how many devices split the dim, whose size is a multiple of twice as many.
      dim: the dim of positions.

    Returns:
      The same elements. The i-th of `parts` equal parts of the dim has the i-th piece from the
      front, then the i-th from the back.

    Raises:
      ArgumentError: a dim that does not divide.

    Example:
      >>> zigzag(np.arange(8), 2, dim=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    xp, dim, pieces = _in_pieces(x, parts, dim, 2, parts)
    front, back = (xp.take(pieces, half, dim) for half in (0, 1))
    both = xp.stack([front, xp.flip(back, dim)], dim + 1)
    return both.reshape(x.shape)


def from_zigzag(x: Any, parts: int, dim: int = 1) -> Any:
    """Undoes `zigzag`: puts a dim in zigzag order back into the usual one.

    Args:
      x: an array with a dim in zigzag order.
      parts: as for `zigzag`.
      dim: the dim of positions.

    Raises:
      ArgumentError: a dim that does not divide.
    """
    xp, dim, pieces = _in_pieces(x, parts, dim, parts, 2)
    front, back = (xp.take(pieces, half, dim + 1) for half in (0, 1))
    both = xp.stack([front, xp.flip(back, dim)], dim)
    return both.reshape(x.shape)


def positions(size: int, parts: int) -> Any:
    """Returns the usual position of each of `size` elements in zigzag order, integers (size,)."""
    return zigzag(jnp.arange(size), parts, dim=0)


def _in_pieces(x: Any, parts: int, dim: int, *counts: int) -> tuple[Any, int, Any]:
    """Returns numpy or jax.numpy, the dim as a number from 0, and the array cut in pieces."""
    dim %= x.ndim
    size = x.shape[dim]
    if parts < 1 or size % (2 * parts):
        raise ArgumentError(
            f"dim {dim} of {x.shape} has no zigzag order for {parts} parts",
            required=f"a multiple of 2 x {parts}",
            actual=str(size),
            fix="pad the sequence, or ask for another number of parts",
        )
    xp = np if isinstance(x, np.ndarray) else jnp
    piece = size // (2 * parts)
    return xp, dim, x.reshape(*x.shape[:dim], *counts, piece, *x.shape[dim + 1 :])


# Kernels, which know the usual order alone.


def in_usual_order(
    kernel: Callable[..., Any], dims: Sequence[int], results: Sequence[int]
) -> Callable[..., Any]:
    """Makes a kernel take whole sequences in zigzag order, too, by way of the usual one.

    `dims` has the dim of positions of each tensor that it takes, and `results` of each result.
    """
    masks = 0, 1, 1  # positions, segments of queries and of keys

    def run(*operands: Any, **spec: Any) -> Any:
        parts = spec.pop("zigzag", 1)
        if parts == 1:
            return kernel(*operands, **spec)
        if operands[0].shape[1] != spec["length"]:
            return NotImplemented
        usual = [from_zigzag(x, parts, d) for x, d in zip(operands, (*dims, *masks), strict=False)]
        found = kernel(*usual, **spec)
        if found is NotImplemented:
            return found
        return tuple(zigzag(x, parts, d) for x, d in zip(found, results, strict=True))

    return run
