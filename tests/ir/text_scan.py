"""The words of the text form (names, strings, constants), taken from a text one by one."""

from __future__ import annotations

import re
from typing import NoReturn

from spmd.errors import FrontendError
from spmd.ir.text import ESCAPES, element_bytes
from spmd.ir.types import Dense, TensorType, numpy_dtype

WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
TICKED = re.compile(r"`(?:[^`\\\n]|\\.)*`")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SPACE = re.compile(r"(?:\s|//[^\n]*)*")
_UNESCAPES = {escape: char for char, escape in ESCAPES.items()}


def _unquote(quoted: str) -> str:
    def char(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else _UNESCAPES[match[0]]

    return re.sub(r"\\u\{([0-9a-f]+)\}|\\.", char, quoted[1:-1])


class Scanner:
    """Takes one token after another from a text; what is not as expected is an error there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> NoReturn:
        """Raises an error that shows the line, and what stands there."""
        line = self.text.count("\n", 0, self.at) + 1
        rest = self.text[self.at :].partition("\n")[0]
        raise FrontendError(
            f"line {line} of the text is not a program: expected {expected}",
            actual=rest[:80] or "the end of the text",
        )

    def skip(self) -> None:
        """Takes white space and comments."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def peek(self, literal: str) -> bool:
        """Whether a literal comes next, not just as the start of a longer word."""
        self.skip()
        if not self.text.startswith(literal, self.at):
            return False
        following = self.text[self.at + len(literal) : self.at + len(literal) + 1]
        return not (literal[-1].isalnum() and (following.isalnum() or following in ("_", ".")))

    def take(self, literal: str) -> bool:
        """Takes a literal if it comes next; whether it did."""
        found = self.peek(literal)
        if found:
            self.at += len(literal)
        return found

    def expect(self, literal: str) -> None:
        """Takes a literal, which must come next."""
        if not self.take(literal):
            self.fail(f"`{literal}`")

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """Takes what a pattern matches, which must be something."""
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(expected)
        self.at = match.end()
        return match[0]

    def until(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes the one just taken; takes that too."""
        depth, start = 1, self.at
        for found in re.compile(f"[{opening}{closing}\n]").finditer(self.text, start):
            depth += {opening: 1, closing: -1}.get(found[0], 0)
            if found[0] == "\n":
                break
            if depth == 0:
                self.at = found.end()
                return self.text[start : found.start()]
        self.fail(f"text that ends in `{closing}`")

    def quoted(self, pattern: re.Pattern[str] = _QUOTED) -> str:
        """Takes a string with its marks; the text inside."""
        start = self.at
        raw = self.match(pattern, "a string")
        try:
            return _unquote(raw)
        except (KeyError, ValueError, OverflowError):
            self.at = start
            self.fail("a string with escapes that exist")

    def name(self, pattern: re.Pattern[str], expected: str) -> str:
        """Takes a name, in marks where the pattern does not allow it bare."""
        return self.quoted() if self.peek('"') else self.match(pattern, expected)


def parse_dense(elements: str, type_: TensorType) -> Dense:
    """Reads what `dense_text` writes.

    Raises:
      ValueError, OverflowError, KeyError: that is not it.
    """
    word, _, digits = elements.partition(" ")
    if word in ("hex", "splat") or elements == "hex":
        return Dense(type_, bytes.fromhex(digits), word == "splat")
    dtype = numpy_dtype(type_.dtype)
    texts = re.findall(r"[^\s,\[\]]+", elements)
    splat = not elements.startswith("[")
    if len(texts) != (1 if splat else type_.size):
        raise ValueError("not as many elements as the type has")
    return Dense(type_, b"".join([element_bytes(text, dtype) for text in texts]), splat)
