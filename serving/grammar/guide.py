"""The automaton of one completion: a grammar, and how far the text has come in it."""

import dataclasses

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


@dataclasses.dataclass(eq=False)
class GrammarGuide:
    """A `spmd.serving.engine.guide.Guide`.

    Where the grammar may end the stop ids are allowed, elsewhere they are not: so a text that ends
    with one of them fits. Where nothing else can follow the stop ids alone are allowed.
    """

    matcher: llguidance.LLMatcher  # at the beginning; it becomes the guide's own
    ends: Words  # the ids that the matcher takes for an end
    stops: Words  # all ids that end the completion
    missing: int  # the end comes behind so many tokens, if the grammar allows anything else
    _mask: Words | None = dataclasses.field(default=None, init=False)

    def allowed(self) -> Words:
        """See `Guide.allowed`."""
        if self._mask is None:
            self._mask = self._make()
        return self._mask

    def take(self, token: int) -> None:
        """See `Guide.take`."""
        self._mask = None
        self.missing -= 1
        if not self.matcher.consume_token(token):
            raise GrammarError(self.matcher.get_error())

    def _make(self) -> Words:
        # The matcher may have a word more or less than the model's vocabulary.
        found = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[: len(self.stops)]
        mask: Words = np.zeros_like(self.stops)
        mask[: len(found)] = found
        if self.matcher.is_error():
            reason = self.matcher.get_error()
            is_empty = reason.startswith("NoExtension")
            raise GrammarError("no text fits it" if is_empty else reason)
        text = mask & ~self.stops
        may_end = bool((mask & self.ends).any())
        if text.any() and (self.missing > 0 or not may_end):
            return text
        return text | self.stops if may_end else mask
