"""Reads one call letter by letter: its name, and its arguments as they come."""

from __future__ import annotations

import json
from typing import Any

CLOSING = {"{": "}", "[": "]"}


class Scanner:
    """Follows JSON: how deep it is, and whether a letter is in a string."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.in_string = False
        self.broken = False
        self._escaped = False

    def push(self, letter: str) -> None:
        """Takes the next letter."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self.in_string = False
        elif letter == '"':
            self.in_string = True
        elif letter in CLOSING:
            self.open.append(CLOSING[letter])
        elif letter in CLOSING.values() and (not self.open or self.open.pop() != letter):
            self.broken = True


class JsonCall:
    """A call as an object with `name` and arguments.

    Args:
      key: of the arguments.

    Attributes:
      name: once it is known.
      done: whether the object is complete.
      broken: whether this is no such object.
    """

    def __init__(self, key: str) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._key = key
        self._scanner = Scanner()
        self._raw = ""
        self._member = ""  # the text of the present key or value
        self._present: str | None = None  # the present key, once its colon was there
        self._held = ""  # of the arguments, until the name is known
        self._complete = False  # whether the arguments are

    def push(self, letter: str) -> str:
        """Takes the next letter; returns what is certain of the arguments now."""
        scanner = self._scanner
        self._raw += letter
        was_inside = scanner.in_string or len(scanner.open) > 1
        scanner.push(letter)
        self.broken = scanner.broken
        if self.broken:
            return ""
        if not scanner.open:
            self._end_member()
            self._end()
        elif was_inside or scanner.in_string or len(scanner.open) > 1:
            self._member += letter
            self._take_argument(letter)
        elif letter == ":":
            self._present, self._member = _loads(self._member), ""
        elif letter == ",":
            self._end_member()
        elif len(self._raw) > 1:
            self._member += letter
        if self.name is None or self.broken:
            return ""
        piece, self._held = self._held, ""
        return piece

    def _take_argument(self, letter: str) -> None:
        # Only an object's letters: whatever else the value is, it is looked at when it is whole.
        if self._present == self._key and self._member.lstrip().startswith("{"):
            self._held += letter

    def _end_member(self) -> None:
        """Looks at a member that is complete."""
        key, text = self._present, self._member
        self._present, self._member = None, ""
        if key == "name":
            name = _loads(text)
            self.name, self.broken = (name, False) if isinstance(name, str) else (None, True)
        elif key == self._key:
            self._complete = True
            if not text.lstrip().startswith("{"):
                # Some models write the arguments as a string, or leave them out.
                value = _loads(text)
                value = _loads(value) if isinstance(value, str) else value
                self._held = json.dumps({} if value is None else value, ensure_ascii=False)
                self.broken = not isinstance({} if value is None else value, dict)

    def _end(self) -> None:
        self.done = True
        self.broken = self.broken or not isinstance(_loads(self._raw), dict)
        if not self._complete and not self.broken:
            self._held = "{}"


class NamedCall:
    """A call as a name, a mark and an object; attributes as those of `JsonCall`.

    Args:
      mark: between the two.
    """

    def __init__(self, mark: str) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._mark = mark
        self._head = ""
        self._scanner = Scanner()
        self._body = ""

    def push(self, letter: str) -> str:
        """Takes the next letter; returns what is certain of the arguments now."""
        if self.name is None:
            self._push_head(letter)
            return ""
        if not self._body and letter.isspace():
            return ""
        self._body += letter
        self._scanner.push(letter)
        self.broken = self._scanner.broken or (not self._scanner.open and self._body[0] != "{")
        self.done = not self._scanner.open
        self.broken = self.broken or (self.done and _loads(self._body) is None)
        return "" if self.broken else letter

    def _push_head(self, letter: str) -> None:
        self._head += letter
        if self._head.endswith(self._mark):
            # Some versions have the id of the call, and its mark, in between.
            self.name = self._head.removesuffix(self._mark).partition("[")[0].strip()
        self.broken = "{" in self._head or len(self._head) > 200


def _loads(text: str) -> Any:
    """The value of JSON; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
