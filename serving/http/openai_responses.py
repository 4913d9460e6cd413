"""OpenAI's `/v1/responses`, over chats. Nothing is stored: a request has the whole conversation."""

import dataclasses
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.fields import Fields, check_text, show
from spmd.serving.http.jobs import chat_work
from spmd.serving.http.limits import Bounds
from spmd.serving.http.messages import Message, parse_message
from spmd.serving.http.openai_routes import Dialect, Json, complete
from spmd.serving.http.protocol import ChatAsk, Values, parse_chat, refuse
from spmd.serving.http.retold import AnswerBlock, Retold, rest_of

INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

NAMES = (
    (".tool_calls[0].id", ".call_id"),
    (".tool_calls[0].function", ""),
    (".tool_call_id", ".call_id"),
    (".function", ""),
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
)

KEPT: Values = {
    **dict.fromkeys(("conversation", "previous_response_id", "prompt"), ()),
    "background": (False,),
}
"""What would need answers of before."""

REFUSED: Values = {"context_management": ([],), "truncation": ("disabled",)}

REFUSED_OF_REASONING: Values = {
    **dict.fromkeys(("context", "generate_summary", "summary"), ("auto",)),
    "mode": ("standard",),
}

TAKEN = (
    "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "reasoning",
    "include", "stream_options", "max_tool_calls", *KEPT, *REFUSED,
)  # fmt: skip
"""`max_tool_calls` is about built-in tools, and `stream_options` about how streams are padded."""

TEXTS = ("input_text", "output_text", "text")


@dataclasses.dataclass(frozen=True)
class ResponseAsk(ChatAsk):
    """A request to `/v1/responses`."""

    echoed: Mapping[str, Any]  # fields that the answer shows again


def parse_response(body: Json, bounds: Bounds) -> ResponseAsk:
    """Checks a request for a response.

    Args:
      bounds: the most that it may ask for.

    Raises:
      ApiError: a field does not fit. The places of some are named as chats name them: see `NAMES`.
    """
    fields = Fields(body)
    refuse(fields, KEPT, "nothing is kept here between requests; send the conversation in input")
    refuse(fields, REFUSED)
    chat = rest_of(body, TAKEN, INSTEAD)
    include = fields.get("include") or []
    if not isinstance(include, list) or "message.output_text.logprobs" in include:
        raise invalid("include: log-probabilities are served at /v1/chat/completions", "include")
    text, reasoning = fields.object("text"), fields.object("reasoning")
    refuse(reasoning, REFUSED_OF_REASONING, "not served; thoughts are shown whole", "reasoning.")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    chat |= {
        "messages": _messages(fields.get("input"), fields.text("instructions")),
        "max_completion_tokens": fields.get("max_output_tokens"),
        "response_format": form,
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "tools": _tools(fields.get("tools")),
        "tool_choice": _choice(fields.get("tool_choice")),
    }
    ask = parse_chat(chat, bounds)
    echoed = {
        "instructions": body.get("instructions"),
        "max_output_tokens": ask.max_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "reasoning": {"effort": ask.effort, "summary": None},
        "temperature": ask.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }
    return ResponseAsk(**vars(ask), echoed=echoed)


def _messages(given: Any, instructions: str) -> list[Message]:
    """The messages that a chat would have; what an assistant did in a row is one of them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        found = "nothing" if given is None else show(given)
        raise invalid(f"input: a string or a list of items is needed, not {found}", "input")
    made: list[Message] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    thought = ""
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "reasoning":
            thought += _thought(item.get("content") or [], f"{place}.content")
            continue
        message = parse_message(_message(item, kind, place), place)
        last = made[-1] if made else {}
        if message["role"] == "assistant" and thought:
            message["reasoning_content"] = thought
        thought = ""
        if message["role"] in ("system", "developer") and instructions and len(made) == 1:
            last["content"] += f"\n\n{message['content']}"  # many templates take one such message
        elif message["role"] == last.get("role") == "assistant" and (
            not message["content"] or not last["content"]
        ):
            for key, value in message.items():
                last[key] = last.get(key, type(value)()) + value if key != "role" else value
        else:
            made.append(message)
    return made


def _thought(parts: Any, place: str) -> str:
    """What a model thought; what others have encrypted is passed over."""
    if not isinstance(parts, list) or any(not isinstance(part, dict) for part in parts):
        raise invalid(f"{place}: a list of parts is needed, not {show(parts)}", "input")
    return "".join(check_text(part.get("text"), f"{place}[{i}]") for i, part in enumerate(parts))


def _message(item: Any, kind: str | None, place: str) -> Json:
    if kind == "message":
        return {"role": item.get("role"), "content": _texts(item.get("content"))}
    if kind == "function_call":
        function = {key: item.get(key) for key in ("name", "arguments")}
        call = {"id": item.get("call_id"), "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _texts(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise invalid(
        f"{place}.type: message, function_call, function_call_output and reasoning are served, "
        f"not {show(kind or item)}; nothing is kept here that another item could refer to",
        "input",
    )


def _texts(content: Any) -> Any:
    """A content with its parts as chats have them; others are left for chats to refuse."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in TEXTS
        else part
        for part in content
    ]


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function":
            raise invalid(
                f"tools[{i}].type: there are no built-in tools here, such as {show(kind)}; "
                "describe what you call yourself as type function",
                "tools",
                "unsupported_parameter",
            )
    wanted = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in wanted if key in tool}}
        for tool in tools
    ]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise invalid(
            'tool_choice: "none", "auto", "required" or {"type": "function", "name": ...} is '
            f"needed, not type {show(choice.get('type'))}",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


class ResponseAnswer(Retold):
    """The answer to a request for a response, or its events."""

    def __init__(self, model: str, ask: ResponseAsk, *given: Any) -> None:
        super().__init__(model, ask, *given)
        self._model, self._echoed = model, ask.echoed
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._count = 0

    def begin(self) -> Iterator[Json]:
        """The events before all blocks."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def opened(self, block: AnswerBlock) -> Iterator[Json]:
        """The events with which a block begins."""
        yield self._event("output_item.added", output_index=block.index, item=self._item(block))
        if block.kind != "call":
            yield self._event("content_part.added", **self._place(block), part=_part(block))

    def grown(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """The event for a next piece of a block."""
        yield self._event(f"{_SAID[block.kind]}.delta", **self._place(block), delta=text)

    def closed(self, block: AnswerBlock) -> Iterator[Json]:
        """The events with which a block ends."""
        key = "arguments" if block.kind == "call" else "text"
        name = {"name": block.name} if block.kind == "call" else {}
        said = {**name, key: block.text}
        yield self._event(f"{_SAID[block.kind]}.done", **self._place(block), **said)
        if block.kind != "call":
            yield self._event("content_part.done", **self._place(block), part=_part(block))
        yield self._event("output_item.done", output_index=block.index, item=self._item(block))

    def end(self) -> Iterator[Json]:
        """The last event."""
        response = self.told()
        yield self._event(response["status"], response=response)

    def broken(self, error: ApiError) -> Iterator[Json]:
        """The last event of an answer that goes no further."""
        said = {"code": error.code, "message": error.message}
        yield self._event("failed", response={**self._response("failed"), "error": said})

    def told(self) -> Json:
        """The response."""
        return self._response("incomplete" if self.finish == "length" else "completed")

    def _event(self, name: str, /, **fields: Any) -> Json:
        number, self._count = self._count, self._count + 1
        if name.startswith("output_text."):
            fields["logprobs"] = []
        return {"type": f"response.{name}", "sequence_number": number, **fields}

    def _response(self, status: str) -> Json:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "model": self._model,
            "output": [self._item(block) for block in self.blocks],
            "previous_response_id": None,
            "store": False,
            "usage": None if status == "in_progress" else self._counts(),
            **self._echoed,
        }

    def _counts(self) -> Json:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _place(self, block: AnswerBlock) -> Json:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item_id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}{block.index:02d}"

    def _item(self, block: AnswerBlock) -> Json:
        status = "incomplete" if block.is_cut else "completed"
        item = {"id": self._item_id(block), "status": "in_progress" if block.is_open else status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        content = [_part(block)] if block.pieces else []
        if block.kind == "thought":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}


_SAID = {"call": "function_call_arguments", "text": "output_text", "thought": "reasoning_text"}
_PREFIXES = {"call": "fc", "text": "msg", "thought": "rs"}


def _part(block: AnswerBlock) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


async def responses(request: Request) -> Response:
    """`POST /v1/responses`: answers a conversation, in items."""
    return await complete(request, Dialect(parse_response, chat_work, ResponseAnswer, NAMES))


ROUTES = [Route("/v1/responses", responses, methods=["POST"])]
