"""Masks for jax's splash kernel that say of a block what the kernel needs, and no more.

jax asks a mask for every block of scores: hidden, seen in part or seen whole. Its own masks write
each block out, 262,144 booleans; here two numbers decide, how far keys lie behind queries. The
kernel computes the scores of a block that is seen in part from positions (`mask_function`).
"""

import math
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks


class _Band(jax_masks.Mask):
    """A mask by which a query sees the keys that lie from `least` to `most` positions behind it."""

    least: float = -math.inf
    most: float = math.inf

    def __getitem__(self, block: tuple[slice, slice]) -> Any:
        """Returns an array [[is any, is all of a block seen]], which jax takes for the block."""
        queries, keys = block
        nearest, furthest = queries.start - keys.stop + 1, queries.stop - 1 - keys.start
        is_any = nearest <= self.most and furthest >= self.least
        return np.array([[is_any, self.least <= nearest and furthest <= self.most]])


class Causal(_Band, jax_masks.CausalMask):
    """Hides the keys after a query."""

    least = 0


class SlidingWindow(_Band, jax_masks.LocalMask):
    """Hides the keys after a query, and those `size` positions or more before it."""

    least = 0

    def __init__(self, shape: tuple[int, int], size: int) -> None:
        super().__init__(shape, (size - 1, 0), offset=0)
        self.most = size - 1


class Full(_Band, jax_masks.FullMask):
    """Hides nothing."""
