"""Anthropic's `/v1/messages`, over chats."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spmd.serving.errors import invalid
from spmd.serving.grammar.compiler import Grammar
from spmd.serving.http.fields import Fields, check_text, show
from spmd.serving.http.jobs import Work, chat_work
from spmd.serving.http.language import Language
from spmd.serving.http.limits import Bounds
from spmd.serving.http.messages import Message, parse_call, parse_message
from spmd.serving.http.openai_routes import Dialect, Json, run_on_text
from spmd.serving.http.protocol import ChatAsk, Values, parse_chat, refuse
from spmd.serving.http.requests import message_error
from spmd.serving.http.retold import AnswerBlock, Moment, Retold, functions, rest_of

NAMES = (
    (".function.parameters", ".input_schema"), (".function.arguments", ".input"), (".function", ""),
    (".tool_call_id", ".tool_use_id"), ("continue_final_message", "messages"),
    ("max_completion_tokens", "max_tokens"), ("reasoning_effort", "output_config.effort"),
    ("response_format.json_schema", "output_config.format"), ("stop", "stop_sequences"),
    ("response_format", "output_config.format"), ("user", "metadata.user_id"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
)  # fmt: skip

REFUSED: Values = {
    **dict.fromkeys(("container", "context_management", "output_format"), ()),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
NO_EFFECT = (
    "cache_control", "diagnostics", "inference_geo", "stream_options", "user_profile_id",
    "workspace_id",
)  # fmt: skip
"""Prompts are cached whatever `cache_control` says."""

CHOICES = {None: None, "auto": "auto", "any": "required", "none": "none", "tool": "tool"}


@dataclasses.dataclass(frozen=True)
class MessageAsk(ChatAsk):
    """A request to `/v1/messages`."""

    thinks: bool | None  # what it says of thoughts; None if nothing


def parse_request(body: Mapping[str, Any], bounds: Bounds, counts: bool = False) -> MessageAsk:
    """Checks a request for a message.

    Args:
      bounds: the most that it may ask for.
      counts: whether only its tokens are counted, so that it needs no `max_tokens`.

    Raises:
      ApiError: a field does not fit. The places of some are named as chats name them: see `NAMES`.
    """
    fields = Fields(body)
    refuse(fields, REFUSED)
    if fields.get("max_tokens") is None and not counts:
        raise invalid("max_tokens: an integer is needed, not nothing")
    thinking, output = fields.object("thinking"), fields.object("output_config")
    kind, form, effort = thinking.get("type"), output.get("format"), output.get("effort")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise invalid(f"thinking.type: enabled, disabled or adaptive, not {show(kind)}")
    thinks = None if kind is None else kind != "disabled"
    if effort is not None and not thinks:
        raise invalid("output_config.effort: only with thinking")
    refuse(output, dict.fromkeys(output.left(), ()), place="output_config.")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    given = fields.object("tool_choice")
    choice: Any = given.get("type")
    if choice not in tuple(CHOICES):
        raise invalid(f"tool_choice.type: auto, any, tool or none, not {show(choice)}")
    if choice == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    else:
        choice = CHOICES[choice]
    messages = _messages(fields.get("system"), fields.get("messages"))
    chat = {
        "messages": messages,
        # An answer that the request begins goes on.
        "continue_final_message": messages[-1]["role"] == "assistant",
        "max_completion_tokens": fields.get("max_tokens"),
        "stop": fields.get("stop_sequences"),
        "tools": functions(fields.get("tools"), (None, "custom"), "input_schema"),
        "tool_choice": choice,
        "parallel_tool_calls": not given.flag("disable_parallel_tool_use"),
        "response_format": form,
        "reasoning_effort": effort,
        "thinking_token_budget": thinking.get("budget_tokens"),
        "include_reasoning": bool(thinks) and thinking.get("display") != "omitted",
        "user": fields.object("metadata").get("user_id"),
    }
    ask = parse_chat({**rest_of(body, fields, NAMES, NO_EFFECT), **chat}, bounds)
    return MessageAsk(**vars(ask), thinks=thinks)


def message_work(ask: MessageAsk, language: Language, grammar: Grammar | None = None) -> Work:
    """Makes the job of a request; without `thinking` there are no thoughts where they can be off.

    Raises:
      ApiError: as of `chat_work`, or the model has no thoughts, or none that can be off.
    """
    template = language.template
    if "enable_thinking" in template.arguments:
        arguments = {"enable_thinking": bool(ask.thinks), **ask.arguments}
        ask = dataclasses.replace(ask, arguments=arguments)
    elif ask.thinks and not template.thinks:
        raise invalid("thinking: this model has no thoughts; leave it out")
    elif ask.thinks is False and template.thinks:
        raise invalid("thinking: this model always thinks; left out, it does not show")
    return chat_work(ask, language, grammar)


def _messages(system: Any, given: Any) -> list[Message]:
    """The messages that a chat would have: results of tools are messages of their own there."""
    if not isinstance(given, list) or not given:
        raise invalid(f"messages: a list of messages is needed, not {show(given)}")
    made: list[Message] = []
    if system:
        made.append(parse_message({"role": "system", "content": system}, "system"))
    for i, message in enumerate(given):
        place = f"messages[{i}]"
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            made += _unfolded(message.get("role"), content, place)
        else:
            made.append(parse_message(message, place))
    return made


def _unfolded(role: Any, blocks: list[Any], place: str) -> Iterator[Message]:
    """The messages of a chat for one of which the content is a list of blocks."""
    texts, calls, thought = list[str](), list[Json](), ""
    for j, block in enumerate(blocks):
        where = f"{place}.content[{j}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(check_text(block.get("text"), f"{where}.text"))
        elif kind == "thinking" and role == "assistant":
            thought += check_text(block.get("thinking"), f"{where}.thinking")
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append(parse_call({"id": block.get("id"), "function": function}, where))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
            texts = []
            given = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            message = parse_message({**given, "content": block.get("content") or ""}, where)
            if block.get("is_error"):
                message["content"] = f"Error: {message['content']}"
            yield message
        elif kind != "redacted_thinking" or role != "assistant":
            raise invalid(
                f"{where}: text, and of users tool_result, of assistants tool_use and thinking are "
                f"served, not {show(kind or block)}"
            )
    if role == "assistant":
        said = {"content": "\n".join(texts), "reasoning_content": thought or None}
        yield parse_message({"role": role, **said, "tool_calls": calls}, place)
    elif texts or not blocks:
        yield parse_message({"role": role, "content": "\n".join(texts)}, place)


class MessageAnswer(Retold):
    """The answer to a request for a message, or its events."""

    def tell(self, moment: Moment, block: Any = None, new: str = "") -> list[Json]:
        """The events of a moment."""
        if moment == "begin":
            return [{"type": "message_start", "message": self.told()}, {"type": "ping"}]
        if moment == "end":
            end = {"type": "message_delta", "delta": self._reason(), "usage": self._counts()}
            return [end, {"type": "message_stop"}]
        if moment == "broken":
            return [message_error(self.error)]
        at: Json = {"index": block.index}
        if moment == "opened":
            return [{"type": "content_block_start", **at, "content_block": _told(block)}]
        kind, key = DELTAS[block.kind]
        grown = {"type": kind, key: new}
        if moment == "closed":  # nobody signs thoughts here
            grown = {"type": "signature_delta", "signature": ""}
        delta = {"type": "content_block_delta", **at, "delta": grown}
        stop = {"type": "content_block_stop", **at}
        return (
            [delta] if moment == "grown" else [delta, stop] if block.kind == "thought" else [stop]
        )

    def told(self) -> Json:
        """The message."""
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [_told(block) for block in self.blocks],
            **self._reason(),
            "usage": self._counts(),
        }

    def _reason(self) -> Json:
        reason = REASONS.get(self.finish or "")
        stop = self.stop if reason == "end_turn" and self.stop in self._ask.stops else None
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}

    def _counts(self) -> Json:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    "call": ("input_json_delta", "partial_json"),
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
}


def _told(block: AnswerBlock) -> Json:
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        json.loads(block.text, parse_constant=int)  # which takes no NaN
        arguments: Any = orjson.Fragment(block.text)
    except (ValueError, RecursionError):  # there was no room for the rest, as `stop_reason` says
        arguments = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


DIALECT = Dialect(parse_request, message_work, MessageAnswer, NAMES)


async def count_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`: how many tokens a conversation has."""

    def work(body: Mapping[str, Any], language: Language) -> Json:
        made = message_work(parse_request(body, language.bounds, counts=True), language)
        return {"input_tokens": len(made.prompts[0].ids)}

    async with DIALECT.naming():
        return await run_on_text(request, work)


ROUTES = [
    Route("/v1/messages", DIALECT.complete, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
