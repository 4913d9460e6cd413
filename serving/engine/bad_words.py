"""Sequences of tokens that must not come up: which tokens may not follow those that were drawn."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from serving.engine.backend import Words
from serving.engine.guide import Guide, GuideError
from serving.engine.masks import Masks, all_words, words_of


class BadWords:
    """Sequences, of which none may be completed.

    Args:
      sequences: token ids; none of them is empty.
      vocabulary: number of token ids.

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

    def from_all(self, masks: Masks) -> tuple[tuple[int, Words], ...]:
        """Masks by count without the sequences of one token.

        Raises:
          GuideError: one of them is empty then.
        """
        return tuple((count, self.leave(mask, ())) for count, mask in masks or ((0, None),))


class WithoutBadWords:
    """A `serving.engine.guide.Guide`: what another one allows, or masks by count, but bad words.

    Args:
      bad: the sequences.
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
