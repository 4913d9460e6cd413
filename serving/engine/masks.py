"""Sets of token ids as bits, and how they follow from a request: which tokens may be drawn when."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from serving.engine.backend import Words

WORD = 32
"""Tokens of a word, as in `models.sampling`, which the devices run."""

Masks = tuple[tuple[int, Words | None], ...]
"""(count, mask), ascending: from the token on before which `count` ones were drawn, these may be
drawn; None are all, as before the first count."""


def words_of(ids: Iterable[int], vocabulary: int) -> Words:
    """The set of these ids, of a vocabulary of so many.

    Example:
      >>> words_of([0, 33], 40).tolist()
      [1, 2]
    """
    bits = np.zeros(-(-vocabulary // WORD) * WORD, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def all_words(vocabulary: int) -> Words:
    """The set of all ids of a vocabulary of so many."""
    bits = np.zeros(-(-vocabulary // WORD) * WORD, np.bool_)
    bits[:vocabulary] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def counted_masks(
    vocabulary: int, allowed: Iterable[int], stop_ids: Iterable[int], min_tokens: int
) -> Masks:
    """The masks of a request that depend on nothing but how many tokens were drawn.

    Args:
      vocabulary: number of token ids.
      allowed: the ids that may be drawn at all; none are all.
      stop_ids: may be drawn behind `min_tokens` tokens only.
      min_tokens: so many tokens are drawn at least.

    Returns:
      The masks; one of them is empty if what is asked for cannot be.
    """
    ids = frozenset(allowed)
    base = words_of(ids, vocabulary) if ids else None
    later: Masks = () if base is None else ((0, base),)
    stops = frozenset(stop_ids)
    if not min_tokens or not stops:
        return later
    every = all_words(vocabulary) if base is None else base
    return ((0, every & ~words_of(stops, vocabulary)), (min_tokens, base))
