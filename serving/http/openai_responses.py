"""OpenAI's `/v1/responses`, over chats. Nothing is stored: a request has the whole conversation."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from spmd.serving.errors import invalid
from spmd.serving.http.fields import Fields, show
from spmd.serving.http.jobs import chat_work
from spmd.serving.http.limits import Bounds
from spmd.serving.http.messages import Message, parse_content, parse_message
from spmd.serving.http.openai_routes import Dialect, Json
from spmd.serving.http.protocol import ChatAsk, Values, parse_chat, refuse
from spmd.serving.http.retold import AnswerBlock, Moment, Retold, functions, rest_of

NAMES = (
    (".tool_calls[0].id", ".call_id"), (".tool_calls[0].function", ""),
    (".tool_call_id", ".call_id"), (".function", ""), ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"), ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"), ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"), ("verbosity", "text.verbosity"),
)  # fmt: skip

KEPT: Values = {
    **dict.fromkeys(("conversation", "previous_response_id", "prompt"), ()),
    "background": (False,),
}
REFUSED: Values = {"context_management": ([],), "truncation": ("disabled",)}
REFUSED_OF_REASONING: Values = {
    **dict.fromkeys(("context", "generate_summary", "summary"), ("auto",)),
    "mode": ("standard",),
}

NO_EFFECT = ("stream_options", "max_tool_calls")
"""They are about how streams are padded, and about built-in tools."""

ECHOED: Json = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "user": None, "truncation": "disabled", "background": False,
    "previous_response_id": None,
}  # fmt: skip
"""What a response shows again of its request, and what stands there if the request has nothing."""


@dataclasses.dataclass(frozen=True)
class ResponseAsk(ChatAsk):
    """A request to `/v1/responses`."""

    echoed: Mapping[str, Any]  # what the answer shows again


def parse_response(body: Mapping[str, Any], bounds: Bounds) -> ResponseAsk:
    """Checks a request for a response.

    Args:
      bounds: the most that it may ask for.

    Raises:
      ApiError: a field does not fit. The places of some are named as chats name them: see `NAMES`.
    """
    fields = Fields(body)
    refuse(fields, KEPT, "nothing is kept here between requests; send the conversation in input")
    refuse(fields, REFUSED)
    include, choice = fields.get("include") or [], fields.get("tool_choice")
    if not isinstance(include, list) or "message.output_text.logprobs" in include:
        raise invalid("include: log-probabilities are served at /v1/chat/completions")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            kind = show(choice.get("type"))
            raise invalid(f"tool_choice.type: function is served, not {kind}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    text, reasoning = fields.object("text"), fields.object("reasoning")
    refuse(reasoning, REFUSED_OF_REASONING, "not served; thoughts are shown whole", "reasoning.")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    chat = {
        "messages": _messages(fields.get("input"), fields.text("instructions")),
        "max_completion_tokens": fields.get("max_output_tokens"),
        "response_format": form,
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "tools": functions(fields.get("tools"), ("function",), "parameters"),
        "tool_choice": choice,
    }
    ask = parse_chat({**rest_of(body, fields, NAMES, NO_EFFECT), **chat}, bounds)
    shown = {name: body[name] for name in ECHOED if body.get(name) is not None}
    drawn = {name: getattr(ask.sampling, name) for name in ("temperature", "top_p")}
    return ResponseAsk(**vars(ask), echoed={**ECHOED, **drawn, **shown, "store": False})


def _messages(given: Any, instructions: str) -> list[Message]:
    """The messages that a chat would have; what an assistant did in a row is one of them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise invalid(f"input: a string or a list of items is needed, not {show(given)}")
    made: list[Message] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        message = parse_message(_message(item, f"input[{i}]"), f"input[{i}]")
        role, last = message["role"], made[-1] if made else Message(role=None)
        if role in ("system", "developer") and instructions and len(made) == 1:
            last["content"] += f"\n\n{message['content']}"  # many templates take one such message
        elif (
            role != "assistant" or last["role"] != role or (message["content"] and last["content"])
        ):
            made.append(message)
        else:
            for key in ("content", "reasoning_content", "tool_calls"):
                if key in message:
                    last[key] = last[key] + message[key] if last.get(key) else message[key]
    return made


def _message(item: Any, place: str) -> Json:
    """What a chat has for an item, unchecked."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else show(item)
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "reasoning":  # what others have encrypted is passed over
        thought = parse_content(item.get("content") or "", f"{place}.content")
        return {"role": "assistant", "reasoning_content": thought}
    if kind == "function_call":
        function = {key: item.get(key) for key in ("name", "arguments")}
        call = {"id": item.get("call_id"), "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        given = {"role": "tool", "tool_call_id": item.get("call_id")}
        return {**given, "content": item.get("output")}
    raise invalid(
        f"{place}.type: message, function_call, function_call_output and reasoning are served, "
        f"not {show(kind)}; nothing is kept here that another item could refer to"
    )


class ResponseAnswer(Retold):
    """The answer to a request for a response, or its events."""

    _ask: ResponseAsk
    _count = 0  # events that were told

    def tell(self, moment: Moment, block: Any = None, new: str = "") -> list[Json]:
        """The events of a moment."""
        if block is None:
            status = {"begin": "in_progress", "end": self._status(), "broken": "failed"}[moment]
            names = ("created", status) if moment == "begin" else (status,)
            return [self._event(name, response=self._response(status)) for name in names]
        at, is_call, said = {"output_index": block.index}, block.kind == "call", SAID[block.kind]
        item, place = self._item(block), {**at, "item_id": self._item_id(block)}
        place |= {} if is_call else {"content_index": 0}
        if moment == "grown":
            return [self._event(f"{said}.delta", **place, delta=new)]
        if moment == "opened":
            added = [self._event("output_item.added", **at, item=item)]
            part = (
                [] if is_call else [self._event("content_part.added", **place, part=_part(block))]
            )
            return added + part
        key, name = ("arguments", {"name": block.name}) if is_call else ("text", {})
        done = [self._event(f"{said}.done", **place, **name, **{key: block.text})]
        part = [] if is_call else [self._event("content_part.done", **place, part=_part(block))]
        return [*done, *part, self._event("output_item.done", **at, item=item)]

    def told(self) -> Json:
        """The response."""
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def _event(self, event: str, /, **fields: Any) -> Json:
        number, self._count = self._count, self._count + 1
        # Clients want a list of log-probabilities where there is a text.
        fields |= {"logprobs": []} if event.startswith("output_text.") else {}
        return {"type": f"response.{event}", "sequence_number": number, **fields}

    def _response(self, status: str) -> Json:
        usage, error = self.usage(), self.error
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        is_cut, is_broken = status == "incomplete", status == "failed"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": {"code": error.code, "message": error.message} if is_broken else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._head["model"],
            "output": [self._item(block) for block in self.blocks],
            "usage": None if status == "in_progress" else counts,
            **self._ask.echoed,
        }

    def _item_id(self, block: AnswerBlock) -> str:
        return f"{PREFIXES[block.kind]}_{self._id}{block.index:02d}"

    def _item(self, block: AnswerBlock) -> Json:
        status = "incomplete" if block.is_cut else "completed"
        item = {"id": self._item_id(block), "status": "in_progress" if block.is_open else status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        content = [_part(block)] if block.text else []
        if block.kind == "thought":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}


SAID = {"call": "function_call_arguments", "text": "output_text", "thought": "reasoning_text"}
PREFIXES = {"call": "fc", "text": "msg", "thought": "rs"}


def _part(block: AnswerBlock) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": SAID[block.kind], "text": block.text, **more}


DIALECT = Dialect(parse_response, chat_work, ResponseAnswer, NAMES)

ROUTES = [Route("/v1/responses", DIALECT.complete, methods=["POST"])]
