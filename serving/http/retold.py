"""Chats in the words of other APIs: requests become those of chats, answers are made of theirs.

These APIs tell an answer as blocks, one behind the other: a thought, a text, a call of a tool.

    {"content": "Let me"}, {"content": " see."}, {"tool_calls": [...]}     deltas of a chat
    text opened, grown, grown, closed; call opened, grown, closed          what an API tells
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from spmd.serving.engine.choice import Delta
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import Fields
from spmd.serving.http.openai_routes import Answer, Json
from spmd.serving.http.protocol import Values, refuse
from spmd.serving.http.requests import event

ONLY_CHATS: Values = {
    **dict.fromkeys(("logprobs", "continue_final_message", "return_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
    "n": (1,),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
}
"""Fields of chats for which answers in blocks have no place."""


def rest_of(body: Json, taken: Collection[str], instead: Mapping[str, str]) -> Json:
    """The fields of a request that mean what they mean in chats.

    Args:
      taken: fields that the API has in its own way.
      instead: fields of chats -> what this API has for them.

    Raises:
      ApiError: a field has no place in this API.
    """
    fields = Fields(body)
    for name, here in instead.items():
        if fields.get(name) is not None:
            raise invalid(f"use {here} instead of {name}", name, "unsupported_parameter")
    refuse(fields, ONLY_CHATS)
    return {name: value for name, value in body.items() if name not in taken}


@dataclasses.dataclass
class AnswerBlock:
    """A part of an answer."""

    kind: Literal["thought", "text", "call"]
    index: int  # among those of the answer
    id: str = ""  # of a call
    name: str = ""  # of the function that is called
    pieces: list[str] = dataclasses.field(default_factory=list)
    is_open: bool = True
    is_cut: bool = False  # whether the answer had no more room

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.pieces)


class Retold(Answer):
    """An answer that is told in blocks; what they look like is up to subclasses.

    Attributes:
      blocks: all so far; only the last one may be open.
      finish: why the chat ended, once it has.
      stop: the stop string that ended it, if one did.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.blocks: list[AnswerBlock] = []
        self.finish: str | None = None
        self.stop = ""
        self._begun = False

    def begin(self) -> Iterator[Json]:
        """The events before all blocks."""
        raise NotImplementedError

    def opened(self, block: AnswerBlock) -> Iterator[Json]:
        """The events with which a block begins, which is empty still."""
        raise NotImplementedError

    def grown(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """The events for a next piece of a block."""
        raise NotImplementedError

    def closed(self, block: AnswerBlock) -> Iterator[Json]:
        """The events with which a block ends."""
        raise NotImplementedError

    def end(self) -> Iterator[Json]:
        """The events behind all blocks."""
        raise NotImplementedError

    def broken(self, error: ApiError) -> Iterator[Json]:
        """The last events of an answer that goes no further."""
        raise NotImplementedError

    def told(self) -> Json:
        """The answer in one object, made of all blocks."""
        raise NotImplementedError

    def events(self, delta: Delta) -> Iterator[bytes]:
        """What a stream has of one delta."""
        for one in (*self._first(), *self._retell(delta)):
            yield event(one, typed=True)

    def last(self) -> Iterator[bytes]:
        """The end of a stream."""
        for one in (*self._close(), *self.end()):
            yield event(one, typed=True)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """The end of a stream that goes no further."""
        for one in (*self._first(), *self.broken(error)):
            yield event(one, typed=True)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer in one object."""
        (choice,) = super().whole(deltas)["choices"]
        deque(self._take(choice["message"]), 0)
        self.finish, self.stop = choice["finish_reason"], deltas[-1].stop
        deque(self._close(), 0)
        return self.told()

    def _first(self) -> Iterator[Json]:
        if not self._begun:
            self._begun = True
            yield from self.begin()

    def _retell(self, delta: Delta) -> Iterator[Json]:
        self.stop = delta.stop
        for chunk in self.chunks(delta):
            (choice,) = chunk["choices"]
            yield from self._take(choice["delta"])
            self.finish = choice["finish_reason"]

    def _take(self, message: Json) -> Iterator[Json]:
        """Takes a chat's message, or a delta of one."""
        if message.get("reasoning_content"):
            yield from self._grow(
                AnswerBlock("thought", len(self.blocks)), message["reasoning_content"]
            )
        if message.get("content"):
            yield from self._grow(AnswerBlock("text", len(self.blocks)), message["content"])
        for call in message.get("tool_calls", ()):
            function = call["function"]
            # Only the first delta of a call has its id.
            block = AnswerBlock(
                "call", len(self.blocks), call.get("id", ""), function.get("name", "")
            )
            yield from self._grow(block, function["arguments"])

    def _grow(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """Adds a text to the last block, or to a new one if that is of another kind or call."""
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != block.kind or block.id:
            yield from self._close()
            self.blocks.append(block)
            yield from self.opened(block)
            last = block
        if text:
            last.pieces.append(text)
            yield from self.grown(last, text)

    def _close(self) -> Iterator[Json]:
        if self.blocks and self.blocks[-1].is_open:
            last = self.blocks[-1]
            last.is_open, last.is_cut = False, self.finish == "length"
            yield from self.closed(last)
