"""Finds the calls in a model's text, in whatever pieces it comes.

    content "Let me see.", call "add", arguments '{"a": ', arguments "1}"

A call begins for its reader once its name is known, is a tool's, and its arguments have begun.
What looks like a call and is none becomes text.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from spmd.serving.engine.actions import Finish
from spmd.serving.engine.text import StopMatcher
from spmd.serving.engine.thought import Kind, Marks, ThoughtSplitter
from spmd.serving.http.tools.ask import Tool, Tools
from spmd.serving.http.tools.formats import PLAIN, Format
from spmd.serving.http.tools.values import kinds_of, property_of, typed

# Reads one call letter by letter: its name, and its arguments as they come.

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


class CallState:
    """How far a call has been read."""

    name: str | None = None  # once it is known
    done = False  # whether it is complete
    broken = False  # whether it is none


class JsonCall(CallState):
    """A call as an object with `name` and arguments.

    Args:
      key: of the arguments.
    """

    def __init__(self, key: str) -> None:
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
            self.done = True
            self.broken = self.broken or not isinstance(_loads(self._raw), dict)
            if not self._complete and not self.broken:
                self._held = "{}"
        elif was_inside or scanner.in_string or len(scanner.open) > 1:
            self._member += letter
            # Only an object's letters: whatever else the value is, it is looked at when whole.
            if self._present == self._key and self._member.lstrip().startswith("{"):
                self._held += letter
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


class NamedCall(CallState):
    """A call as a name, a mark and an object.

    Args:
      mark: between the two.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._head = ""
        self._scanner = Scanner()
        self._body = ""

    def push(self, letter: str) -> str:
        """Takes the next letter; returns what is certain of the arguments now."""
        if self.name is None:
            self._head += letter
            if self._head.endswith(self._mark):
                # Some versions have the id of the call, and its mark, in between.
                self.name = self._head.removesuffix(self._mark).partition("[")[0].strip()
            self.broken = "{" in self._head or len(self._head) > 200
            return ""
        if not self._body and letter.isspace():
            return ""
        self._body += letter
        self._scanner.push(letter)
        self.broken = self._scanner.broken or (not self._scanner.open and self._body[0] != "{")
        self.done = not self._scanner.open
        self.broken = self.broken or (self.done and _loads(self._body) is None)
        return "" if self.broken else letter


class TaggedCall(CallState):
    """A call whose arguments stand between tags.

    Args:
      schemas: of the arguments, by function.
    """

    def __init__(self, format: Format, schemas: Mapping[str, Any]) -> None:
        assert format.tags is not None
        self._tags, self._schemas = format.tags, schemas
        self._end = format.tags.end or format.end
        self._held = ""  # of what is between values
        self._matcher: StopMatcher | None = None  # in a value
        self._kinds: set[str] = set()  # the types that the value may have
        self._joint = "{"

    def push(self, letter: str) -> str:
        """Takes the next letter; returns what is certain of the arguments now."""
        if self._matcher is not None:
            return self._in_value(self._matcher, letter)
        self._held += letter
        held = self._held.lstrip()
        if self.name is None:
            if found := self._tags.named.fullmatch(held):
                self.name, self._held = found[1].strip(), found[2]
            self.broken = self.name is None and ("\n" in held or len(held) > 200)
        elif held == self._end:
            self.done = True
            return "{}" if self._joint == "{" else "}"
        elif found := self._tags.opens.fullmatch(held):
            return self._begin_value(found[1])
        else:
            begin = self._tags.key[0]
            self.broken = not held.startswith(begin) and not begin.startswith(held)
            self.broken = self.broken and not self._end.startswith(held)
        return ""

    def _begin_value(self, key: str) -> str:
        self._held, self._skips = "", self._tags.value[0].endswith("\n")
        self._kinds = kinds_of(property_of(self._schemas.get(self.name or ""), key))
        # A value may have, or lack, the line breaks of its tags.
        end = self._tags.value[1]
        self._matcher = StopMatcher([end, end.strip()])
        head = f"{self._joint}{json.dumps(key, ensure_ascii=False)}: "
        self._joint = ", "
        return head + ('"' if self._kinds == {"string"} else "")

    def _in_value(self, matcher: StopMatcher, letter: str) -> str:
        skips, self._skips = self._skips and letter == "\n", False
        text, stopped = matcher.push("" if skips else letter)
        self._held += text
        if stopped:
            self._matcher = None
        if self._kinds == {"string"}:  # shown as it comes
            self._held = ""
            return json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if stopped else "")
        if not stopped:
            return ""
        value, self._held = self._held, ""
        return json.dumps(typed(value, self._kinds), ensure_ascii=False)


def _loads(text: str) -> Any:
    """The value of JSON; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


class MessageEvent(NamedTuple):
    """What was read: a piece of the content, of the thought before it, or of a call's arguments.

    The text of `call` is the name of one that begins. What began as a call may be none: that of
    `broken` is all that the model wrote of it.
    """

    kind: Literal["content", "thought", "call", "arguments", "broken"]
    text: str


class CallsReader:
    """Reads one message.

    Args:
      schemas: function -> schema of its arguments.
      most: so many calls are read; more are dropped.

    Attributes:
      calls: how many have begun.
    """

    def __init__(self, format: Format, schemas: Mapping[str, Any], most: int | None) -> None:
        self._format = format
        self._names = schemas
        self._most = most
        self._matcher = StopMatcher([format.begin])
        self._mode: Callable[[str], Iterator[MessageEvent]] = self._outside
        self._blank = ""  # of the content, held back until more of it comes
        self._raw = ""  # of what may be a call
        self._call: JsonCall | NamedCall | TaggedCall | None = None
        self._shown = False  # whether the call has begun for the reader
        self.calls = 0
        self._texts = 0

    def push(self, text: str) -> list[MessageEvent]:
        """Takes the next piece of the text."""
        events: list[MessageEvent] = []
        for letter in text:
            events += self._mode(letter)
        return _joined(events)

    def finish(self, cut: bool) -> list[MessageEvent]:
        """Ends the text.

        Args:
          cut: whether it was cut off, not ended by the model: a call that had begun is one.
        """
        events: list[MessageEvent] = []
        if self._mode == self._inside and not (cut and self._shown):
            events += self._give_up()
        elif self._mode == self._before:
            events += self._content(self._raw)
        events += self._content(self._matcher.flush())
        if self._blank and not self.calls:
            events.append(MessageEvent("content", self._blank))
        return _joined(events)

    # Where the next letter is; each takes it.

    def _outside(self, letter: str) -> Iterator[MessageEvent]:
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

    def _before(self, letter: str) -> Iterator[MessageEvent]:
        """Behind `begin`, or between the calls of a list."""
        format = self._format
        if ((format.named or format.tags) and not letter.isspace()) or letter == "{":
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

    def _inside(self, letter: str) -> Iterator[MessageEvent]:
        call = self._call
        assert call is not None
        self._raw += letter
        piece = call.push(letter)
        if call.broken or (call.name is not None and call.name not in self._names):
            yield from self._give_up()
            return
        is_one_too_many = self._most is not None and not self._shown and self.calls >= self._most
        if piece and not is_one_too_many:
            if not self._shown:
                self._shown = True
                self.calls += 1
                yield MessageEvent("call", call.name or "")
            yield MessageEvent("arguments", piece)
        if call.done:
            if not is_one_too_many and not self._shown:  # there is nothing that could be its name
                yield from self._give_up()
                return
            self._close()

    def _behind(self, letter: str) -> Iterator[MessageEvent]:
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

    def _open(self) -> None:
        format = self._format
        if format.tags is not None:
            self._call = TaggedCall(format, self._names)
        else:
            self._call = NamedCall(format.named) if format.named else JsonCall(format.key)
        self._shown = False
        self._mode = self._inside

    def _close(self) -> None:
        self._raw = ""
        self._texts += 1
        if self._format.listed:
            self._mode = self._before
        elif self._format.tags is not None and not self._format.tags.end:
            self._mode = self._outside
        else:
            self._mode = self._behind if self._format.end or self._format.bare else self._outside

    def _give_up(self) -> Iterator[MessageEvent]:
        raw, self._raw = self._raw, ""
        self._mode = self._outside
        if self._shown:
            self.calls -= 1
            blank, self._blank = self._blank, ""
            yield MessageEvent("broken", blank + raw)
        else:
            yield from self._content(raw)

    def _content(self, text: str) -> Iterator[MessageEvent]:
        """Content; blanks at its end wait for more of it, as those beside calls mean nothing."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._texts += 1
            yield MessageEvent("content", shown)


def _joined(events: list[MessageEvent]) -> list[MessageEvent]:
    """The same with neighbours of one kind as one."""
    groups = itertools.groupby(events, lambda one: one.kind)
    return [MessageEvent(kind, "".join(one.text for one in some)) for kind, some in groups]


# The calls in a model's text as OpenAI's answers have them: whole, or as deltas of a stream.

Json = dict[str, Any]


def _thought(text: str) -> Json:
    """A thought under the name that clients know, and the one that vLLM has given it since."""
    return {"reasoning_content": text, "reasoning": text}


class MessageReader:
    """Reads one message that may have a thought before it, and calls.

    Args:
      tools: what may be called, if anything.
      format: how calls are written; None if nothing may be called.
      thought: what is around the thought, if one may come.
      shows: whether the thought is shown.
    """

    def __init__(
        self,
        tools: Tools | None,
        format: Format | None,
        thought: Marks | None = None,
        shows: bool = True,
    ) -> None:
        self._reader: CallsReader | None = None
        if tools is not None and format is not None:
            schemas = {tool.name: tool.schema for tool in tools.callable}
            self._reader = CallsReader(format, schemas, None if tools.parallel else 1)
        self._splitter = None if thought is None else ThoughtSplitter(thought)
        self._shows = shows
        self._format = format or PLAIN
        self._index = -1
        # Line breaks at the ends of a thought, and before the answer, are not shown.
        self._breaks: str | None = None  # held back of the thought; None at its beginning
        self._thought = False  # whether there was a thought, and none of the answer yet

    def deltas(self, text: str, finish: Finish | None) -> Iterator[Json]:
        """The deltas of a stream for the next part of the text.

        What turns out to be no call has been sent as one by then: its reader finds arguments that
        are no JSON.
        """
        for kind, said in self._events(text, finish):
            if kind == "content":
                yield {"content": said}
            elif kind == "thought":
                yield _thought(said)
            elif kind == "call":
                self._index += 1
                yield {"tool_calls": [{"index": self._index, **self._call(said)}]}
            elif kind == "arguments":
                function = {"arguments": said}
                yield {"tool_calls": [{"index": self._index, "function": function}]}

    def message(self, text: str, finish: Finish | None) -> Json:
        """The message of a whole text."""
        content, thought, calls = "", "", list[Json]()
        for kind, said in self._events(text, finish):
            if kind == "call":
                calls.append(self._call(said))
            elif kind == "arguments":
                calls[-1]["function"]["arguments"] += said
            elif kind == "thought":
                thought += said
            else:
                if kind == "broken":
                    calls.pop()
                content += said
        self._index = len(calls) - 1
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls or thought:
            message["content"] = content or None
        message |= _thought(thought) if thought else {}
        return {**message, "tool_calls": calls} if calls else message

    def finish(self, finish: Finish | None) -> str | None:
        """Why the message ended, once all was read."""
        return "tool_calls" if finish == "stop" and self._index >= 0 else finish

    def _events(self, text: str, finish: Finish | None) -> list[MessageEvent]:
        parts: list[tuple[Kind, str]] = [("answer", text)]
        if self._splitter is not None:
            parts = self._splitter.push(text) + (self._splitter.flush() if finish else [])
        events: list[MessageEvent] = []
        for kind, part in parts:
            if kind == "answer":
                part = part.lstrip("\n") if self._thought else part
                self._thought = self._thought and not part
                read = [MessageEvent("content", part)] if part and self._reader is None else []
                events += read if self._reader is None else self._reader.push(part)
            elif kind == "thought":
                part = part.lstrip("\n") if self._breaks is None else self._breaks + part
                shown = part.rstrip("\n")
                if shown or self._breaks is not None:
                    self._breaks = part[len(shown) :]
                events += [MessageEvent("thought", shown)] if shown and self._shows else []
            else:
                self._thought = True
        if finish and self._reader is not None:
            events += self._reader.finish(finish == "length")
        return events

    def _call(self, name: str) -> Json:
        function = {"name": name, "arguments": ""}
        return {"id": self._format.new_id(), "type": "function", "function": function}


def reads(format: Format, text: str, call: Mapping[str, Any]) -> bool:
    """Whether a text has this call in a format, and no other one.

    Args:
      call: `name`, and `arguments` as an object.
    """
    tool = Tool(call["name"], {}, False, {})
    # What stands before the call may be anything that a template puts before messages.
    text = text[text.find("{") :] if format.bare else text
    reader = MessageReader(Tools((tool,), (tool,), False, True), format)
    made = [one["function"] for one in reader.message(text, "stop").get("tool_calls", ())]
    return [(one["name"], _loads(one["arguments"])) for one in made] == [
        (call["name"], call["arguments"])
    ]
