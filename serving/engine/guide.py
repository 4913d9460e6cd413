"""Which tokens may come next: masks, bad words, automata, and the threads on which these think.

A mask is a set of token ids as bits. What depends on nothing but how many tokens were drawn is
known beforehand (`counted_masks`); all else is an automaton (`Guide`), bad words among them.

A mask depends on the token before it, so it is made between two steps of its request. That takes
tens of microseconds mostly, at times milliseconds, in which the engine's thread goes on with steps
for all others. A request has one token under way at most, so each is with one thread at a time.
"""

import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from spmd.serving.engine.backend import Words

WORD = 32
"""Tokens of a word, as in `spmd.models.sampling`, which the devices run."""

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


_LOG = logging.getLogger("serving")


class GuideError(ValueError):
    """What a request asks for is at fault: no token may come next, or finding it out is too hard.

    The message is one line for the client.
    """


class Guide(Protocol):
    """The automaton of one completion; it belongs to nobody else."""

    def allowed(self) -> Words:
        """The tokens that may be drawn next: at least one.

        Raises:
          GuideError: there is none.
          Exception: it is broken. In both cases its request fails, and no other.
        """

    def take(self, token: int) -> None:
        """Goes on behind a token that was drawn; raises what `allowed` does."""


class Guides:
    """Threads that make masks.

    Args:
      made: is called on one of the threads with a request's key and its next mask, or with the
        reason why there is none.
    """

    def __init__(self, made: Callable[[int, Words | Exception], None]) -> None:
        self._made = made
        self._asked: queue.SimpleQueue[tuple[int, Guide, int] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._think, name=f"masks-{i}", daemon=True)
            for i in range(2)  # so many masks are made at a time
        ]

    def ask(self, key: int, guide: Guide, token: int) -> None:
        """Begins to make the mask behind a request's latest token."""
        self._asked.put((key, guide, token))

    def stop(self) -> None:
        """Ends the threads behind what was asked before."""
        for _ in self.threads:
            self._asked.put(None)

    def _think(self) -> None:
        while (item := self._asked.get()) is not None:
            key, guide, token = item
            try:
                guide.take(token)
                self._made(key, guide.allowed())
            except GuideError as error:
                _LOG.info("request %d: %s", key, error)
                self._made(key, error)
            except Exception as error:  # of a thread that ends nobody would get a mask any more
                _LOG.exception("request %d: no mask could be made", key)
                self._made(key, error)


class BadWords:
    """Sequences, of which none may be completed.

    Args:
      sequences: token ids; none of them is empty.

    Attributes:
      reach: how many of the latest tokens decide what may come next.

    Example:
      >>> bad = BadWords([(5,), (7, 8)], vocabulary=10)
      >>> bad.behind([]), bad.behind([1, 7])
      ([5], [5, 8])
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]], vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for one in dict.fromkeys(sequences):
            self._ends[one[:-1]].append(one[-1])
        self._lengths = sorted({len(before) for before in self._ends})
        self.reach = self._lengths[-1] if self._lengths else 0

    def behind(self, drawn: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence behind these."""
        latest, count = tuple(drawn), len(drawn)
        before = (latest[count - length :] for length in self._lengths if length <= count)
        return [token for one in before for token in self._ends.get(one, ())]

    def leave(self, mask: Words | None, drawn: Sequence[int]) -> Words:
        """What of a mask may be drawn behind these tokens; None is a mask of all.

        Raises:
          GuideError: nothing.
        """
        every = all_words(self.vocabulary) if mask is None else mask
        left = every & ~words_of(self.behind(drawn), self.vocabulary)
        if not left.any():
            raise GuideError("bad_words leave no token that may come next")
        return left


class WithoutBadWords:
    """A `Guide` of this module: what another one allows, or masks by count, but bad words.

    Args:
      masks: by how many tokens were drawn; not looked at if there is a guide.
      guide: another one, which becomes this one's own.
    """

    def __init__(self, bad: BadWords, masks: Masks, guide: Guide | None = None) -> None:
        self._bad, self._masks, self._guide = bad, masks, guide
        self._latest: deque[int] = deque(maxlen=bad.reach)
        self._count = 0

    def allowed(self) -> Words:
        """See `Guide.allowed`."""
        if self._guide is not None:
            return self._bad.leave(self._guide.allowed(), self._latest)
        reached = [mask for count, mask in self._masks if count <= self._count]
        return self._bad.leave(reached[-1] if reached else None, self._latest)

    def take(self, token: int) -> None:
        """See `Guide.take`."""
        if self._guide is not None:
            self._guide.take(token)
        self._latest.append(token)
        self._count += 1
