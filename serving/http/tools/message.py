"""The calls in a model's text as OpenAI's answers have them: whole, or as deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serving.engine.actions import Finish
from serving.http.tools.ask import Tools
from serving.http.tools.formats import Format
from serving.http.tools.reader import (
    Broken,
    CallBegins,
    CallContinues,
    CallsReader,
    ContentText,
    Event,
)

Json = dict[str, Any]


class MessageReader:
    """Reads one message that may have calls.

    Args:
      tools: what may be called.
    """

    def __init__(self, tools: Tools, format: Format) -> None:
        names = [tool.name for tool in tools.callable]
        self._reader = CallsReader(format, names, None if tools.parallel else 1)
        self._format = format
        self._index = -1

    def deltas(self, text: str, finish: Finish | None) -> Iterator[Json]:
        """The deltas of a stream for the next part of the text.

        What turns out to be no call has been sent as one by then: its reader finds arguments that
        are no JSON.
        """
        for event in self._events(text, finish):
            if isinstance(event, ContentText):
                yield {"content": event.text}
            elif isinstance(event, CallBegins):
                self._index += 1
                yield {"tool_calls": [{"index": self._index, **self._call(event.name)}]}
            elif isinstance(event, CallContinues):
                function = {"arguments": event.text}
                yield {"tool_calls": [{"index": self._index, "function": function}]}

    def message(self, text: str, finish: Finish | None) -> Json:
        """The message of a whole text."""
        content, calls = "", list[Json]()
        for event in self._events(text, finish):
            if isinstance(event, CallBegins):
                calls.append(self._call(event.name))
            elif isinstance(event, CallContinues):
                calls[-1]["function"]["arguments"] += event.text
            else:
                if isinstance(event, Broken):
                    calls.pop()
                content += event.text
        self._index = len(calls) - 1
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "content": content or None, "tool_calls": calls} if calls else message

    def finish(self, finish: Finish | None) -> str | None:
        """Why the message ended, once all was read."""
        return "tool_calls" if finish == "stop" and self._index >= 0 else finish

    def _events(self, text: str, finish: Finish | None) -> list[Event]:
        events = self._reader.push(text)
        return events + self._reader.finish(finish == "length") if finish else events

    def _call(self, name: str) -> Json:
        function = {"name": name, "arguments": ""}
        return {"id": self._format.new_id(), "type": "function", "function": function}
