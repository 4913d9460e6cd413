"""Keeps track of what each slot of the cache holds, and chooses the slot for a new prompt.

A slot keeps its keys and values when its request has ended. A prompt that begins with the same
tokens goes on from there: often the same system prompt, or the same conversation one turn later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serving.engine.backend import Ints

COPY_LENGTH = 16
"""Copying costs a call, so shorter common beginnings are computed again."""


class Placement(NamedTuple):
    """Where a prompt goes.

    Attributes:
      slot: the slot that it gets.
      source: the slot that holds its beginning; `slot` itself if nothing has to be copied.
      length: tokens of the prompt that are there already.
    """

    slot: int
    source: int
    length: int


class Slots:
    """For each slot the tokens whose keys and values it holds, and its owner.

    Args:
      count: number of slots.
      max_length: tokens that a slot can hold.
    """

    def __init__(self, count: int, max_length: int) -> None:
        self._tokens = np.zeros((count, max_length), np.int32)
        self._lengths = [0] * count
        self._owners: list[int | None] = [None] * count
        self._used = [0] * count
        self._clock = 0

    @property
    def owners(self) -> tuple[int | None, ...]:
        """The owner of each slot; None if it is free."""
        return tuple(self._owners)

    @property
    def any_free(self) -> bool:
        """Whether a slot is free."""
        return None in self._owners

    def length(self, slot: int) -> int:
        """How many tokens a slot holds."""
        return self._lengths[slot]

    def content(self, slot: int) -> Ints:
        """The tokens that a slot holds."""
        return self._tokens[slot, : self._lengths[slot]]

    def take(self, slot: int, owner: int) -> None:
        """Gives a free slot to an owner."""
        if self._owners[slot] is not None:
            raise RuntimeError(f"slot {slot} belongs to {self._owners[slot]}, not to {owner}")
        self._owners[slot] = owner

    def release(self, slot: int) -> None:
        """Frees a slot; it keeps its tokens."""
        self._owners[slot] = None
        self._clock += 1
        self._used[slot] = self._clock

    def write(self, slot: int, start: int, tokens: Sequence[int] | Ints) -> None:
        """Notes that a slot holds these tokens from `start` on, and none behind them."""
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        self._lengths[slot] = end

    def place(self, prompt: Ints, reuse: bool = True) -> Placement:
        """Chooses a free slot for a prompt; there has to be one.

        With the prompt 1 2 3 4 and two free slots, of which b is empty:

            a holds 1 2 3             a, going on at position 3
            a holds 1 2 8 8 ... 8     b; 2 tokens are too few to copy, so from position 0

        Going on in `a` the second time would destroy the many tokens that are not the prompt's, and
        another prompt may want them. With 16 tokens or more in common they are copied from a to b.

        Args:
          prompt: token ids.
          reuse: whether tokens that are there already may be used.
        """
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        # Empty slots first, then the one that was released the longest ago.
        oldest = min(free, key=lambda slot: (self._lengths[slot] > 0, self._used[slot]))
        if not reuse:
            return Placement(oldest, oldest, 0)
        common = [self._common(slot, prompt) for slot in range(len(self._owners))]
        here = max(free, key=lambda slot: (common[slot], -self._lengths[slot], slot == oldest))
        source = max(range(len(common)), key=lambda slot: (common[slot], slot == here))
        # Slots of running requests can be copied from, but not gone on in.
        going_on = common[here] and 2 * common[here] >= self._lengths[here]
        if going_on and common[here] + COPY_LENGTH > common[source]:
            return Placement(here, here, common[here])
        if common[source] >= COPY_LENGTH:
            return Placement(oldest, source, common[source])
        return Placement(oldest, oldest, common[oldest])

    def _common(self, slot: int, prompt: Ints) -> int:
        """How many tokens a slot and a prompt have in common at their beginnings.

        At most all but the prompt's last, which has to be run: the first token is drawn from it.
        """
        length = min(self._lengths[slot], len(prompt) - 1)
        differs = self._tokens[slot, :length] != prompt[:length]
        return int(differs.argmax()) if differs.any() else length
