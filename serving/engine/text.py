"""Tokens -> text that can be shown while more tokens come: whole characters, no part of a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Ids -> text, with U+FFFD for bytes that are no character (yet)."""

CONTEXT = 5
"""Tokens of the prompt that the first tokens are decoded with: some begin with a space or not
depending on what is before them."""

REPLACEMENT = "\ufffd"
CHARACTER_TOKENS = 4
"""A character has four bytes at most, so after as many tokens the first one's text is certain."""


class Detokenizer:
    """Text of tokens that come one by one; what is half a character waits for the other half.

    The pieces joined are the text of all tokens, as far as the tokenizer's text of a token does not
    depend on those far before it.

    Args:
      decode: the tokenizer's.
      context: the tokens before the first one.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        # Ids up to `_read` have been returned as text and stay as context for those behind.
        self._ids = _last_whole(decode, context)
        self._read = len(self._ids)
        self._context = decode(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._ids), text)
        if len(self._ids) - self._read < CHARACTER_TOKENS:
            return ""
        return self._advance(*self._first_mark())

    def flush(self) -> str:
        """The text of what waits, as it is."""
        return self._advance(len(self._ids), self._decode(self._ids))

    def _first_mark(self) -> tuple[int, str]:
        """The end of the first tokens that wait and are no character, and the text up to there.

        A character that was broken off is one mark, as its first byte alone is.
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
    """The last tokens, from the beginning of a character on where there is one.

    To some tokenizers bytes in a row are no text at all if the first of them is half a character.
    """
    for size in (*range(CONTEXT, CONTEXT + CHARACTER_TOKENS), *range(CONTEXT - 1, 0, -1)):
        ids = list(tokens[-size:])
        if REPLACEMENT not in decode(ids):
            return ids
    return list(tokens[-CONTEXT:])


class Matched(NamedTuple):
    """Text that can be shown, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopMatcher:
    """Cuts a text before the stop string that is complete first, however the text is cut in pieces.

    What could be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Matched:
        """The text that can be shown now; nothing must come after a stop."""
        held = self._held + text
        found = [(held.find(stop), len(stop)) for stop in self._stops]
        cuts = [(start + length, start) for start, length in found if start >= 0]
        if cuts:
            self._held = ""
            return Matched(held[: min(cuts)[1]], True)
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return Matched(held[: len(held) - keep], False)

    def flush(self) -> str:
        """What was held back, since no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop string begins with but is not."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class Pieces:
    """The text of single tokens, as they would read in the middle of a text.

    Args:
      decode: the tokenizer's.
      before: any token that ends a word, such as a letter.
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
