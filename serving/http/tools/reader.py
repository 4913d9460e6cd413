"""Finds the calls in a model's text, in whatever pieces it comes.

    Text("Let me see."), Begin("add"), Piece('{"a": '), Piece("1}")

A call begins for its reader once its name is known, is a tool's, and its arguments have begun.
What looks like a call and is none becomes text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from serving.engine.text import StopMatcher
from serving.http.tools.formats import Format
from serving.http.tools.json_call import JsonCall, NamedCall


class ContentText(NamedTuple):
    """A part of the message's content."""

    text: str


class CallBegins(NamedTuple):
    """A call begins."""

    name: str


class CallContinues(NamedTuple):
    """More of the call's arguments."""

    text: str


class Broken(NamedTuple):
    """The call that began is none; `text` is all that the model wrote of it."""

    text: str


Event = ContentText | CallBegins | CallContinues | Broken


class CallsReader:
    """Reads one message.

    Args:
      most: so many calls are read; more are dropped.
    """

    def __init__(self, format: Format, names: Collection[str], most: int | None = None) -> None:
        self._format = format
        self._names = names
        self._most = most
        self._matcher = StopMatcher([format.begin])
        self._mode: Callable[[str], Iterator[Event]] = self._outside
        self._blank = ""  # of the content, held back until more of it comes
        self._raw = ""  # of what may be a call
        self._call: JsonCall | NamedCall | None = None
        self._shown = False  # whether the call has begun for the reader
        self._calls = 0
        self._texts = 0

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._calls

    def push(self, text: str) -> list[Event]:
        """Takes the next piece of the text."""
        events: list[Event] = []
        for letter in text:
            events += self._mode(letter)
        return _joined(events)

    def finish(self, cut: bool) -> list[Event]:
        """Ends the text.

        Args:
          cut: whether it was cut off, not ended by the model: a call that had begun is one.
        """
        events: list[Event] = []
        if self._mode == self._inside and not (cut and self._shown):
            events += self._give_up()
        elif self._mode == self._before:
            events += self._content(self._raw)
        events += self._content(self._matcher.flush())
        if self._blank and not self._calls:
            events.append(ContentText(self._blank))
        return _joined(events)

    # -----------------------------------------------------------------------------------------
    # Where the next letter is; each takes it.

    def _outside(self, letter: str) -> Iterator[Event]:
        """In the content."""
        text, found = self._matcher.push(letter)
        if text == "{" and self._format.bare and not self._texts:
            self._raw = ""
            self._open()
            yield from self._inside(letter)
            return
        yield from self._content(text)
        if found:
            self._matcher = StopMatcher([self._format.begin])
            self._raw = self._format.begin
            self._mode = self._before

    def _before(self, letter: str) -> Iterator[Event]:
        """Behind `begin`, or between the calls of a list."""
        format = self._format
        if (format.named and not letter.isspace()) or letter == "{":
            self._open()
            yield from self._inside(letter)
        elif format.listed and letter == "]" and self._raw.rstrip()[-1:] != "[":
            self._mode = self._outside
        elif letter.isspace() or (format.listed and letter in "[,"):
            self._raw += letter
        else:
            self._mode = self._outside
            yield from self._content(self._raw)
            self._raw = ""
            yield from self._outside(letter)

    def _inside(self, letter: str) -> Iterator[Event]:
        """In a call."""
        call = self._call
        assert call is not None
        self._raw += letter
        piece = call.push(letter)
        if call.broken or (call.name is not None and call.name not in self._names):
            yield from self._give_up()
            return
        if piece and not self._dropped:
            if not self._shown:
                self._shown = True
                self._calls += 1
                yield CallBegins(call.name or "")
            yield CallContinues(piece)
        if call.done:
            if not self._dropped and not self._shown:  # there is nothing that could be its name
                yield from self._give_up()
                return
            self._close()

    def _behind(self, letter: str) -> Iterator[Event]:
        """Behind a call that has an `end` or may be followed by another one."""
        self._raw += letter
        end = self._format.end
        if end and self._raw.strip() == end:
            self._mode = self._outside
        elif self._format.bare and letter == "{" and self._raw[:-1].strip() in ("", ";"):
            self._raw = ""
            self._open()
            yield from self._inside(letter)
        elif not (end or ";").startswith(self._raw.strip()):
            raw, self._raw = self._raw, ""
            self._mode = self._outside
            for one in raw:
                yield from self._mode(one)

    # -----------------------------------------------------------------------------------------

    @property
    def _dropped(self) -> bool:
        """Whether the call is one too many."""
        return self._most is not None and not self._shown and self._calls >= self._most

    def _open(self) -> None:
        format = self._format
        self._call = NamedCall(format.named) if format.named else JsonCall(format.key)
        self._shown = False
        self._mode = self._inside

    def _close(self) -> None:
        self._raw = ""
        self._texts += 1
        if self._format.listed:
            self._mode = self._before
        else:
            self._mode = self._behind if self._format.end or self._format.bare else self._outside

    def _give_up(self) -> Iterator[Event]:
        raw, self._raw = self._raw, ""
        self._mode = self._outside
        if self._shown:
            self._calls -= 1
            blank, self._blank = self._blank, ""
            yield Broken(blank + raw)
        else:
            yield from self._content(raw)

    def _content(self, text: str) -> Iterator[Event]:
        """Content; blanks at its end wait for more of it, as those beside calls mean nothing."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._texts += 1
            yield ContentText(shown)


def _joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + event.text)
        elif isinstance(event, CallContinues) and isinstance(last, CallContinues):
            joined[-1] = CallContinues(last.text + event.text)
        else:
            joined.append(event)
    return joined
