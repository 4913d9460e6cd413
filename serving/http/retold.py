"""Chats in the words of other APIs: requests become those of chats, answers are made of theirs.

These APIs tell an answer as blocks, one behind the other: a thought, a text, a call of a tool.

    {"content": "Let me"}, {"content": " see."}, {"tool_calls": [...]}     deltas of a chat
    text opened, grown, grown, closed; call opened, grown, closed          what an API tells
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from spmd.serving.engine.choice import Delta
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import Fields, show
from spmd.serving.http.openai_routes import Answer, Json, Names
from spmd.serving.http.protocol import Values, refuse
from spmd.serving.http.requests import event

ONLY_CHATS: Values = {
    **dict.fromkeys(("logprobs", "continue_final_message", "return_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
    **{"n": (1,), "prompt_logprobs": (), "top_logprobs": (0,)},
}
"""Fields of chats for which answers in blocks have no place."""

OF_TOOLS: Values = {
    "allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)
}  # fmt: skip


def rest_of(
    body: Mapping[str, Any], fields: Fields, names: Names, no_effect: Collection[str]
) -> Json:
    """The fields of a request that nobody has read: they mean what they mean in chats.

    Args:
      names: what chats call a field -> what this API calls it, where that is not the same.
      no_effect: fields of this API that change nothing.

    Raises:
      ApiError: a field has no place in this API.
    """
    for name, here in names:
        if body.get(name) is not None:
            raise invalid(f"use {here} instead of {name}", name, "unsupported_parameter")
    refuse(Fields(body), ONLY_CHATS)
    return {name: body[name] for name in fields.left() if name not in no_effect}


def functions(tools: Any, kinds: Sequence[str | None], schema: str) -> Any:
    """Tools as chats have them.

    Args:
      kinds: the types of those that clients call themselves.
      schema: the name of the field with the schema of a tool.
    """
    if not isinstance(tools, list):
        return tools
    made, renamed = [], {"name": "name", "description": "description", "strict": "strict"}
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or kind not in kinds:
            raise invalid(
                f"tools[{i}].type: there are no built-in tools here, such as {show(kind)}; give "
                f"functions that you call yourself, by name and {schema}",
                code="unsupported_parameter",
            )
        refuse(Fields(tool), OF_TOOLS, place=f"tools[{i}].")
        pairs = {**renamed, "parameters": schema}.items()
        function = {key: tool[name] for key, name in pairs if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


Moment = Literal["begin", "opened", "grown", "closed", "end", "broken"]


@dataclasses.dataclass
class AnswerBlock:
    """A part of an answer."""

    kind: Literal["thought", "text", "call"]
    id: str = ""  # of a call
    name: str = ""  # of the function that is called
    text: str = ""  # so far; of a call its arguments
    index: int = 0  # among those of the answer
    is_open: bool = True
    is_cut: bool = False  # whether the answer had no more room


class Retold(Answer):
    """An answer that is told in blocks; what they look like is up to subclasses."""

    finish: str | None = None  # why the chat ended, once it has
    stop = ""  # the stop string that ended it, if one did
    error = ApiError(500, "")  # why it goes no further
    _begun = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.blocks: list[AnswerBlock] = []  # all so far; only the last one may be open

    def tell(self, moment: Moment, block: Any = None, new: str = "") -> list[Json]:
        """The events of a moment: of a block, or before and behind all blocks.

        Args:
          new: the text with which a block has grown.
        """
        raise NotImplementedError

    def told(self) -> Json:
        """The answer in one object, made of all blocks."""
        raise NotImplementedError

    def events(self, delta: Delta) -> Iterator[bytes]:
        """What a stream has of one delta."""
        yield from self._begin()
        self.stop = delta.stop
        for chunk in self.chunks(delta):
            (choice,) = chunk["choices"]
            yield from typed(self._take(choice["delta"]))
            self.finish = choice["finish_reason"]

    def last(self) -> Iterator[bytes]:
        """The end of a stream."""
        yield from typed([*self._close(), *self.tell("end")])

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """The end of a stream that goes no further."""
        yield from self._begin()
        self.error = error
        yield from typed(self.tell("broken"))

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer in one object."""
        (choice,) = super().whole(deltas)["choices"]
        deque(self._take(choice["message"]), 0)
        self.finish, self.stop = choice["finish_reason"], deltas[-1].stop
        self._close()
        return self.told()

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from typed(self.tell("begin"))

    def _take(self, message: Json) -> Iterator[Json]:
        """Takes a chat's message, or a delta of one."""
        if message.get("reasoning_content"):
            yield from self._grow(AnswerBlock("thought"), message["reasoning_content"])
        if message.get("content"):
            yield from self._grow(AnswerBlock("text"), message["content"])
        for call in message.get("tool_calls", ()):
            called = call["function"]
            # Only the first delta of a call has its id.
            block = AnswerBlock("call", call.get("id", ""), called.get("name", ""))
            yield from self._grow(block, called["arguments"])

    def _grow(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """Adds a text to the last block, or to a new one if that is of another kind or call."""
        if not self.blocks or self.blocks[-1].kind != block.kind or block.id:
            yield from self._close()
            block.index = len(self.blocks)
            self.blocks.append(block)
            yield from self.tell("opened", block)
        self.blocks[-1].text += text
        if text:
            yield from self.tell("grown", self.blocks[-1], text)

    def _close(self) -> list[Json]:
        if not self.blocks or not self.blocks[-1].is_open:
            return []
        self.blocks[-1].is_open, self.blocks[-1].is_cut = False, self.finish == "length"
        return self.tell("closed", self.blocks[-1])


def typed(events: Iterable[Json]) -> Iterator[bytes]:
    """Server-sent events whose names are their types."""
    for one in events:
        yield b"event: %b\n%b" % (one["type"].encode(), event(one))
