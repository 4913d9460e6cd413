"""What the slots of a cache hold, and which one a new prompt should take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serving.engine.backend import Ints

COPY_LENGTH = 16
"""Shorter common beginnings are computed again: a copy has costs of its own."""


class Placement(NamedTuple):
    """Where a prompt goes.

    Attributes:
      slot: the one it takes.
      source: the slot that holds its beginning; `slot` itself where it simply goes on there.
      length: tokens of the prompt that are there already.
    """

    slot: int
    source: int
    length: int


class Slots:
    """Slots with the tokens whose keys and values they hold, and their owners.

    What a slot held stays there when its owner leaves, so that a later prompt can go on from it.
    """

    def __init__(self, count: int, max_length: int) -> None:
        self._tokens = np.zeros((count, max_length), np.int32)
        self._lengths = [0] * count
        self._owners: list[int | None] = [None] * count
        self._used = [0] * count
        self._clock = 0

    @property
    def owners(self) -> tuple[int | None, ...]:
        """The owner of each slot; None of free ones."""
        return tuple(self._owners)

    @property
    def any_free(self) -> bool:
        """Whether there is a free slot."""
        return None in self._owners

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._lengths[slot]

    def content(self, slot: int) -> Ints:
        """The tokens that a slot holds."""
        return self._tokens[slot, : self._lengths[slot]]

    def take(self, slot: int, owner: int) -> None:
        """Give a free slot to an owner."""
        if self._owners[slot] is not None:
            raise RuntimeError(f"slot {slot} belongs to {self._owners[slot]}, not to {owner}")
        self._owners[slot] = owner

    def release(self, slot: int) -> None:
        """Free a slot; it keeps what it holds."""
        self._owners[slot] = None
        self._clock += 1
        self._used[slot] = self._clock

    def write(self, slot: int, start: int, tokens: Sequence[int] | Ints) -> None:
        """Note that a slot holds these tokens from `start` on, and nothing behind them."""
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        self._lengths[slot] = end

    def place(self, prompt: Ints, reuse: bool = True) -> Placement:
        """Choose the slot for a prompt; there has to be a free one.

        A slot with much else behind the common beginning is left alone as long as there is one that
        was used longer ago: its beginning is copied there.
        """
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        oldest = min(free, key=lambda slot: (self._lengths[slot] > 0, self._used[slot]))
        if not reuse:
            return Placement(oldest, oldest, 0)
        common = [self._common(slot, prompt) for slot in range(len(self._owners))]
        here = max(free, key=lambda slot: (common[slot], -self._lengths[slot], slot == oldest))
        source = max(range(len(common)), key=lambda slot: (common[slot], slot == here))
        going_on = common[here] and 2 * common[here] >= self._lengths[here]
        if going_on and common[here] + COPY_LENGTH > common[source]:
            return Placement(here, here, common[here])
        if common[source] >= COPY_LENGTH:
            return Placement(oldest, source, common[source])
        return Placement(oldest, oldest, common[oldest])

    def _common(self, slot: int, prompt: Ints) -> int:
        """Tokens that a slot and a prompt begin with, at most all but the prompt's last."""
        length = min(self._lengths[slot], len(prompt) - 1)
        differs = self._tokens[slot, :length] != prompt[:length]
        return int(differs.argmax()) if differs.any() else length
