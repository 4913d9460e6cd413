"""The automaton of one completion: a grammar, and how far the text has come in it."""

import llguidance
import numpy as np

from spmd.serving.engine.backend import Words
from spmd.serving.engine.guide import GuideError


class GrammarError(GuideError):
    """A grammar that cannot be used; the message is one line."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.replace("<non-verbose/>", "").split())
        super().__init__(line if len(line) <= 240 else f"{line[:236]}...")


class TooHard(GrammarError):
    """A grammar that takes too much of the machine."""


class GrammarGuide:
    """A `serving.engine.guide.Guide`.

    Where the grammar may end the stop ids are allowed, elsewhere they are not: so a text that ends
    with one of them fits. Where nothing else can follow the stop ids alone are allowed.

    Args:
      matcher: at the beginning; it becomes the guide's own.
      ends: the ids that the matcher takes for an end.
      stops: all ids that end the completion.
      min_tokens: the end comes behind so many tokens, if the grammar allows anything else.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, ends: Words, stops: Words, min_tokens: int
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._stops = stops
        self._missing = min_tokens
        self._mask: Words | None = None

    def allowed(self) -> Words:
        """See `Guide.allowed`."""
        if self._mask is None:
            self._mask = self._make()
        return self._mask

    def take(self, token: int) -> None:
        """See `Guide.take`."""
        self._mask = None
        self._missing -= 1
        if not self._matcher.consume_token(token):
            raise GrammarError(self._matcher.get_error())

    def _make(self) -> Words:
        # The matcher may have a word more or less than the model's vocabulary.
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._stops)]
        mask: Words = np.zeros_like(self._stops)
        mask[: len(found)] = found
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            is_empty = reason.startswith("NoExtension")
            raise GrammarError("no text fits it" if is_empty else reason)
        text = mask & ~self._stops
        may_end = bool((mask & self._ends).any())
        if text.any() and (self._missing > 0 or not may_end):
            return text
        return text | self._stops if may_end else mask
