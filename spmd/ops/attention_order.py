"""Zigzag order: an order of a sequence in which equal parts are equal work of causal attention.

Under a causal mask a late query sees more keys than an early one. So of a sequence in eight pieces
the first of four devices gets the pieces 0 and 7, the next one 1 and 6, and so on, as in Llama 3's
context parallelism (Llama team, *The Llama 3 Herd of Models*, 2024, section 3.3.2). Brandon et al.,
*Striped Attention* (2023), balance by single tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError


def zigzag(x: Any, parts: int, dim: int = 1) -> Any:
    """Returns an array with the positions of a sequence in zigzag order.

    Args:
      x: a numpy array, for which the result is one, too, or a jax array, which may be traced.
      parts: into how many parts devices split the dim, whose size is a multiple of 2 * parts.
      dim: the dim of positions.

    Returns:
      The same elements in another order. The dim is cut into 2 * parts pieces; part `i` of the
      result has the i-th piece from the front, then the i-th from the back.

    Raises:
      ArgumentError: the size of the dim is no multiple of 2 * parts, or `parts` is less than 1.

    Example:
      >>> zigzag(np.arange(8), 2, dim=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _reordered(x, parts, dim, 0)


def from_zigzag(x: Any, parts: int, dim: int = 1) -> Any:
    """Undoes `zigzag`: returns an array with its positions in the usual order again.

    Args:
      x: an array with a dim in zigzag order.
      parts: as for `zigzag`.
      dim: the dim of positions.

    Raises:
      ArgumentError: the size of the dim is no multiple of 2 * parts, or `parts` is less than 1.
    """
    return _reordered(x, parts, dim, 1)


def positions(size: int, parts: int) -> Any:
    """Returns (size,): for each element in zigzag order, its position in the usual order."""
    return zigzag(jnp.arange(size), parts, dim=0)


def _reordered(x: Any, parts: int, dim: int, halves: int) -> Any:
    """Cuts positions into (2, parts) pieces, or (parts, 2) if `halves`, the index of 2, is 1.

    Returns `x` with the pieces the other way, the ones from the back in reversed order.
    """
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
    cut = (parts, 2) if halves else (2, parts)
    pieces = x.reshape(*x.shape[:dim], *cut, size // (2 * parts), *x.shape[dim + 1 :])
    front, back = (xp.take(pieces, half, dim + halves) for half in (0, 1))
    return xp.stack([front, xp.flip(back, dim)], dim + 1 - halves).reshape(x.shape)


# Kernels, which know the usual order alone.


def in_usual_order(
    kernel: Callable[..., Any], dims: Sequence[int], results: Sequence[int]
) -> Callable[..., Any]:
    """Returns `kernel` for both orders: what is in zigzag order is reordered before and after it.

    `dims` has the dim of positions of each operand but masks, and `results` that of each result.
    The result returns NotImplemented if `kernel` does, or for zigzag order of a part of a sequence.
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
