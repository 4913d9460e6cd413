"""Turns tokens into text while more of them come.

Two things hold text back. A character may be spread over several tokens, and a stop string over
several pieces of text; neither may be shown by half.
"""

import dataclasses
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text. Bytes that are not a whole character become U+FFFD."""

CONTEXT = 5
"""So many tokens of the prompt are decoded together with the first drawn ones: whether the text of
a token begins with a space depends, for some tokenizers, on what comes before it."""

REPLACEMENT = "\ufffd"
CHARACTER_TOKENS = 4
"""A character has at most four bytes, so it is complete, or broken, after four tokens."""


class Detokenizer:
    """Decodes tokens one by one; tokens of an incomplete character wait for the rest of it.

    Joined, the pieces are the text of all tokens. This holds for tokenizers in which the text of a
    token depends only on a few tokens before it.

    Args:
      decode: turns token ids into text.
      context: the tokens before the first one, such as the prompt.

    Example:
      >>> detokenizer = Detokenizer(decode)  # "é" is two tokens, for the bytes C3 and A9
      >>> [detokenizer.push(0xC3), detokenizer.push(0xA9)]
      ['', 'é']
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        # The text of ids[:_read] has been returned. They stay, as context for decoding the rest:
        # `_context` is their text, and what `decode(_ids)` has beyond it is new. Dropping older
        # ids keeps a push from taking longer the longer the completion is.
        self._ids = _last_whole(decode, context)
        self._read = len(self._ids)
        self._context = decode(self._ids)

    def push(self, *tokens: int) -> str:
        """Takes tokens, and returns the text that is certain now; several at once cost as one."""
        self._ids += tokens
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._ids), text)
        if len(tokens) > 1:
            del self._ids[-len(tokens) :]
            return "".join(map(self.push, tokens))
        if len(self._ids) - self._read < CHARACTER_TOKENS:
            return ""
        return self._advance(*self._first_mark())

    def flush(self) -> str:
        """The text of the tokens that wait, now that no more come; U+FFFD for broken bytes."""
        return self._advance(len(self._ids), self._decode(self._ids))

    def _first_mark(self) -> tuple[int, str]:
        """Where the broken character at the beginning of what waits ends, and the text up to there.

        Its bytes are one U+FFFD together. So they end before the first token that changes the text:

            bytes    E2    E2 82    E2 82 41
            text     ?     ?        ?A          the first character is E2 82; ? stands for U+FFFD
        """
        end = self._read + 1
        text = self._decode(self._ids[:end])
        while end < len(self._ids) and self._decode(self._ids[: end + 1]) == text:
            end += 1
        return end, text

    def _advance(self, end: int, text: str) -> str:
        piece = text[len(self._context) :]
        if end > self._read:
            self._ids, self._read = self._ids[self._read :], end - self._read
            self._context = self._decode(self._ids[: self._read])
        return piece


def _last_whole(decode: Decode, tokens: Sequence[int]) -> list[int]:
    """The last few tokens, beginning with a whole character if possible.

    Some tokenizers decode a run of byte tokens all to U+FFFD if it begins inside a character; the
    whole characters behind would be lost.
    """
    for size in (*range(CONTEXT, CONTEXT + CHARACTER_TOKENS), *range(CONTEXT - 1, 0, -1)):
        ids = list(tokens[-size:])
        if REPLACEMENT not in decode(ids):
            return ids
    return list(tokens[-CONTEXT:])


@dataclasses.dataclass
class StopMatcher:
    r"""Ends a text before the first complete stop string, in whatever pieces the text comes.

    The longest end of the text that might begin a stop string is held back.

    Example:
      >>> matcher = StopMatcher(["\n\n"])
      >>> matcher.push("one\n"), matcher.push("two\n"), matcher.push("\nthree")
      (('one', False), ('\ntwo', False), ('', True))
    """

    stops: Sequence[str]  # none of them is empty
    found: str = ""  # the one that has ended the text; empty until then
    _held: str = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text; after a match it must not be called again.

        Returns:
          The text that can be shown, and whether a stop string came behind it.
        """
        if not self.stops:
            return text, False
        held = self._held + text
        found = [(held.find(stop), stop) for stop in self.stops]
        # The stop string that is complete first wins, whichever begins first: so the result is the
        # same whether the text comes in one piece or character by character.
        cuts = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if cuts:
            self._held = ""
            _, start, self.found = min(cuts)
            return held[:start], True
        keep = max((overlap(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`.

    "see EN" and "END" overlap in 2 characters.
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class TokenTexts:
    """The text of single tokens, as they read in the middle of a text; remembers what it decoded.

    Args:
      decode: turns token ids into text.
      before: ids of which the last one ends a word, such as those of a letter. Tokens are decoded
        behind it, as some tokenizers drop a space at the beginning of a text.

    Example:
      >>> Pieces(decode, before=letter)[token]
      ' world'
    """

    def __init__(self, decode: Decode, before: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(before[-1:])
        self._skip = len(decode(self._before))
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([*self._before, token])[self._skip :]
        return self._known[token]
