"""Guesses what a text goes on with: with what followed where it said the same before.

Code, summaries and answers about a text repeat much of what stands before them. After

    for i in range(10): print(i)   for i in ran|

the last tokens, ` i in ran`, stand earlier in it, and `ge(10): print(` followed there. This is
prompt lookup (Saxena 2023). Where a text says nothing twice, a smaller model can guess: a *draft
model* (`spmd.serving.engine.draft_model`). Guesses are tried in rows of a step that has room for
them, and no guess changes what is drawn. What a guess costs is that its step waits for the results
of the one before, and for the draft model.
"""

from __future__ import annotations

import dataclasses
from array import array

LONGEST = 32
"""Of several places that say the same the one counts that does so for most tokens, up to these."""

REPLACED = 4
"""Behind a token that differs from the one said before, so many that agreed count as one."""

SURE = 8
"""So many last tokens have to stand earlier where a draft model could guess instead."""

KEPT, KEPT_UNTRIED = 0.95, 0.99
"""How much a guess counts one step later, that tries some more, or none."""


class Said:
    """Where a growing text says the same: its places, chained by the two tokens that end there."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # two tokens -> the last place where they end
        self._before = array("i", [-1])  # place -> the one before that ends with the same two
        # The place that agrees with the last tokens most, and with how many of them.
        self._place, self._agreed = -1, 0

    def unread(self, tokens: array[int]) -> int:
        """How many tokens of a text have been added since the last guess."""
        return len(tokens) - len(self._before)

    def guess(self, tokens: array[int], most: int) -> tuple[int, tuple[int, ...]]:
        """Returns how many last tokens stand earlier, too, and `most` that may come next.

        Where one was replaced it goes on behind it, and a fourth of those before it count.

        Args:
          tokens: of the text so far; it begins with those of the last call.

        Example:
          >>> Said().guess(array("i", [5, 6, 7, 8, 9, 5, 6]), 3)
          (2, (7, 8, 9))
          >>> Said().guess(array("i", [1, 2, 1, 2, 1]), 5)  # it goes round
          (3, (2, 1, 2, 1, 2))
          >>> Said().guess(array("i", [1, 2, 3]), 5)
          (0, ())
        """
        before, latest, last = self._before, self._latest, len(tokens) - 1
        is_new = not self._agreed
        for place in range(len(before), last + 1):
            pair = tokens[place - 1], tokens[place]
            before.append(latest.get(pair, -1))
            latest[pair] = place
            # What agreed most agrees most as long as it goes on.
            self._place += 1
            if self._agreed and tokens[self._place] == tokens[place]:
                self._agreed = min(self._agreed + 1, LONGEST)
            else:
                self._agreed, is_new = self._agreed // REPLACED, True
        if is_new and last > 0:
            back, place = max(self._agreed, 1), before[last]
            while place >= back and back < LONGEST:  # do `back` + 1 tokens agree there?
                if tokens[place - back] != tokens[last - back] or (
                    tokens[place - back : place] != tokens[last - back : last]
                ):
                    place = before[place]
                else:
                    self._place, self._agreed, back = place, back + 1, back + 1
        if self._agreed < 2:
            return 0, ()
        behind, span = self._place + 1, last - self._place
        return self._agreed, tuple([tokens[behind + i % span] for i in range(most)])


@dataclasses.dataclass(slots=True)
class Agreement:
    """How often guesses about a request were right lately."""

    right: float = 0.0  # guesses
    judged: float = 0.0  # guesses of which it is known: the right ones, and the first wrong one

    def note(self, right: int, tried: int) -> None:
        """Notes a step that tried some guesses, or none: what came before counts less then."""
        kept = KEPT if tried else KEPT_UNTRIED
        self.right = kept * self.right + right
        self.judged = kept * self.judged + min(right + 1, tried)

    def chance(self, agreed: int | None = None) -> float:
        """Returns how likely a guess is right; of what is not known all is, so it is tried.

        Args:
          agreed: so many tokens before the guess stand earlier, too, if that is where it is from.
            About 3 of them are right once in two times (code and prose of this repository).

        Example:
          >>> Agreement(right=6, judged=8).chance(agreed=3)
          0.7
        """
        if agreed is None:
            return (self.right + 1) / (self.judged + 1)
        return (self.right + 2 * agreed / (agreed + 3)) / (self.judged + 2)

    def worth(self, cost: float, most: int) -> int:
        """Returns how many guesses of a draft model make tokens come fastest; 0 if none do.

        Args:
          cost: what a guess takes, in steps without guesses; waiting for them takes twice as much.

        Example:
          >>> Agreement(right=80, judged=100).worth(cost=0.2, most=7)
          5
          >>> Agreement(right=20, judged=100).worth(cost=0.2, most=7)
          0
        """
        tokens, speeds = 1.0, [1.0]
        for count in range(1, most + 1):
            tokens += self.chance() ** count
            speeds.append(tokens / (1 + (count + 2) * cost))
        return speeds.index(max(speeds))
