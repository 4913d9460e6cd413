"""Guesses what a text goes on with: with what followed where it said the same before.

Code, summaries and answers about a text repeat much of what stands before them. After

    for i in range(10): print(i)   for i in ran|

the last tokens, ` i in ran`, stand earlier in it, and `ge(10): print(` followed there. No second
model guesses (prompt lookup; Saxena 2023). Guesses are tried in rows of a step that has room for
them, and no guess changes what is drawn. What a guess costs is that its step waits for the results
of the one before.
"""

from __future__ import annotations

from array import array

import numpy as np

LONGEST = 32
"""Of several places that say the same the one counts that does so for most tokens, up to these."""


def guess(tokens: array[int], least: int, most: int) -> tuple[int, ...]:
    """Returns up to `most` tokens that may come next; none if nothing of them was said before.

    Args:
      tokens: of the text so far.
      least: how many of its last tokens have to stand earlier, too.

    Example:
      >>> guess(array("i", [5, 6, 7, 8, 9, 5, 6]), 2, 3)
      (7, 8, 9)
      >>> guess(array("i", [1, 2, 1, 2, 1]), 2, 5)  # it goes round
      (2, 1, 2, 1, 2)
    """
    said = np.frombuffer(tokens.tobytes(), np.int32)
    last = len(said) - 1
    if most < 1 or last < least:
        return ()
    places = np.flatnonzero(said[:last] == said[last])
    for back in range(1, LONGEST):
        longer = places[places >= back]
        longer = longer[said[longer - back] == said[last - back]]
        if not len(longer):
            break
        places = longer
    else:
        back = LONGEST
    if back < least or not len(places):
        return ()
    place = int(places[-1])
    behind = place + 1 + np.arange(most) % (last - place)
    return tuple(said[behind].tolist())
