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

SURE = 8
"""So many last tokens have to stand earlier where a draft model could guess instead."""

KEPT, KEPT_UNTRIED = 0.95, 0.99
"""How much a guess counts one step later, that tries some more, or none."""


class Said:
    """Where a growing text says the same: its places, chained by the two tokens that end there."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # two tokens -> the last place where they end
        self._before = array("i", [-1])  # place -> the one before that ends with the same two

    def guess(self, tokens: array[int], least: int, most: int) -> tuple[int, ...]:
        """Returns up to `most` tokens that may come next; none if nothing of them was said before.

        Args:
          tokens: of the text so far; it begins with those of the last call.
          least: how many of its last tokens have to stand earlier, too: two or more.

        Example:
          >>> Said().guess(array("i", [5, 6, 7, 8, 9, 5, 6]), 2, 3)
          (7, 8, 9)
          >>> Said().guess(array("i", [1, 2, 1, 2, 1]), 2, 5)  # it goes round
          (2, 1, 2, 1, 2)
        """
        before, latest, last = self._before, self._latest, len(tokens) - 1
        for place in range(len(before), last + 1):
            pair = tokens[place - 1], tokens[place]
            before.append(latest.get(pair, -1))
            latest[pair] = place
        if most < 1 or last < least:
            return ()
        found, back, place = -1, least - 1, before[last]
        while place >= back and back < LONGEST:  # do `back` + 1 tokens agree there?
            if tokens[place - back] != tokens[last - back] or (
                tokens[place - back : place] != tokens[last - back : last]
            ):
                place = before[place]
            else:
                found, back = place, back + 1
        if found < 0:
            return ()
        return tuple([tokens[found + 1 + i % (last - found)] for i in range(most)])


@dataclasses.dataclass(slots=True)
class Agreement:
    """How often a draft model was right about a request lately."""

    right: float = 0.0  # guesses
    judged: float = 0.0  # guesses of which it is known: the right ones, and the first wrong one

    def note(self, right: int, tried: int) -> None:
        """Notes a step that tried some guesses, or none: what came before counts less then."""
        kept = KEPT if tried else KEPT_UNTRIED
        self.right = kept * self.right + right
        self.judged = kept * self.judged + min(right + 1, tried)

    def worth(self, cost: float, most: int) -> int:
        """Returns how many guesses make tokens come fastest; 0 if none do.

        Args:
          cost: what a guess takes, in steps without guesses; waiting for them takes twice as much.

        Example:
          >>> Agreement(right=80, judged=100).worth(cost=0.2, most=7)
          5
          >>> Agreement(right=20, judged=100).worth(cost=0.2, most=7)
          0
        """
        chance = (self.right + 1) / (self.judged + 1)  # of what is not known all: so it is tried
        tokens, speeds = 1.0, [1.0]
        for count in range(1, most + 1):
            tokens += chance**count
            speeds.append(tokens / (1 + (count + 2) * cost))
        return speeds.index(max(speeds))
