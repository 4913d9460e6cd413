"""Tools and structured outputs with OpenAI's client: round trips, streams, schemas, refusals."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.http.limits import ServerOptions
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import MODEL, Live, serving
from tests.serving.http.tools.templates import NONE, TEMPLATES
from tests.waiting import PATIENCE

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")

LARGE = dataclasses.replace(LIMITS, slots=16, max_length=8192, rows=(16, 512), page=64, pages=1024)
ASK: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
CHOICES = ["yes", "no", "na\nja 😀"]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def tool(name: str, strict: bool | None = None) -> Any:
    schema = {
        "type": "object", "properties": {"a": NUMBER, "b": {"$ref": "#/$defs/number"}},
        "required": ["a", "b"], "additionalProperties": False, "$defs": {"number": NUMBER},
    }  # fmt: skip
    function: Any = {"name": name, "description": "Computes.", "parameters": schema}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def only(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def form(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


TOOLS = [tool("add"), tool("mul")]


class Scripted(FakeBackend):
    """Writes `script`, as long as it may, and then the end."""

    script = b""

    def __init__(self) -> None:
        super().__init__(LARGE, budget=512)

    def _next(self, known: Any, seed: int, seen: set[int], counted: Counter[int]) -> int:
        at = counted.total()
        return self.script[at] if at < len(self.script) else 0


@contextmanager
def chatting(backend: FakeBackend, **more: Any) -> Iterator[tuple[Live, Any]]:
    with (
        serving(backend, **more) as live,
        openai.OpenAI(
            base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE
        ) as client,
    ):
        yield live, client


def chat(client: Any, **more: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 2000, **more}
    return client.chat.completions.create(**given)


SHORT: Any = {"extra_body": {"thinking_token_budget": 9}}
"""Models that write anything would hardly ever end a thought."""

THOUGHTS = {"qwen3_coder": "Sums?\n</think>\n\n", "glm45": "\n<think>Sums?</think>\n"}
"""What models write before their answer; a template may have written the beginning."""


def random_model() -> FakeBackend:
    return FakeBackend(LARGE, budget=512, letters=False)


@pytest.mark.parametrize("format", TEMPLATES)
def test_a_round_trip(format: str) -> None:
    """The model calls, the client answers, and the template gets both."""
    backend = Scripted()
    with chatting(backend, chat_template=TEMPLATES[format]) as (live, client):
        made = live.service.language().template.tool_format
        thought = THOUGHTS.get(format, "")
        backend.script = (thought + made.written("add", {"a": 1, "b": 2})).encode()
        (choice,) = chat(client, stop="?").choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        thoughts = {
            getattr(choice.message, name, "") for name in ("reasoning_content", "reasoning")
        }
        assert thoughts == {"Sums?" if thought else ""}
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        backend.script = f"{thought}It is 3.".encode()
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        answer = chat(client, messages=[*ASK, choice.message.model_dump(exclude_none=True), result])
        assert answer.choices[0].message.content == "It is 3."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens > len("What is 1 + 2?")
        written = made.written("add", {"a": 1, "b": 2})
        backend.script = (thought + written).encode()
        (choice,) = chat(client, tool_choice="none").choices
        assert choice.message.tool_calls is None and choice.message.content == written


@pytest.mark.parametrize("format", TEMPLATES)
@pytest.mark.parametrize("must", ["required", "mul"])
def test_calls_that_have_to_be(format: str, must: str) -> None:
    """However the model draws: every call fits its tool."""
    choice = only(must) if must == "mul" else must
    with chatting(random_model(), chat_template=TEMPLATES[format]) as (_, client):
        answer = chat(client, tool_choice=choice, n=4, seed=3, **SHORT)
        alone = chat(client, tool_choice=choice, parallel_tool_calls=False, n=4, seed=3, **SHORT)
    assert len(answer.choices) == 4
    for one in (*answer.choices, *alone.choices):
        check_calls(one.message, ("mul",) if must == "mul" else ("add", "mul"))
        # Many calls may reach the limit.
        assert one.finish_reason == "tool_calls" or len(one.message.tool_calls) > 9
    assert all(len(one.message.tool_calls) == 1 for one in alone.choices)


def check_calls(message: Any, names: tuple[str, ...]) -> None:
    assert message.content is None and message.tool_calls
    for call in message.tool_calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])


@pytest.mark.parametrize("format", TEMPLATES)
def test_streams_say_the_same(format: str) -> None:
    with chatting(random_model(), chat_template=TEMPLATES[format]) as (_, client):
        more = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 5, "n": 2}
        more |= SHORT
        whole = chat(client, **more)
        chunks = list(chat(client, stream=True, logprobs=True, **more))
    for index, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        parts = [part for c in mine for part in c.delta.tool_calls or ()]
        assert {part.index for part in parts} == {0}
        assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
        called = choice.message.tool_calls[0].function
        assert (parts[0].type, parts[0].function.name) == ("function", called.name)
        assert "".join(part.function.arguments for part in parts) == called.arguments
        assert len(parts) > 1  # as they are drawn; more at a time where the machine is busy
        assert mine[-1].finish_reason == "tool_calls"
        assert not any(c.delta.content for c in mine)
        assert any(c.logprobs for c in mine)


def test_strict_tools_bind_calls_as_soon_as_they_begin() -> None:
    """What the model would write in a call is not what it may: so it writes something else."""
    backend = Scripted()
    with chatting(backend, chat_template=TEMPLATES["hermes"]) as (_, client):
        backend.script = b'Well: <tool_call>\n{"name": "nobody", "arguments": {"a": 1, "b": 2}}'
        message = chat(client, tools=[tool("add", True)], max_tokens=200).choices[0].message
        assert message.content == "Well:"
        assert {call.function.name for call in message.tool_calls} == {"add"}
        loose = chat(client).choices[0].message
        assert loose.content == backend.script.decode() and not loose.tool_calls


def test_a_call_or_an_answer_of_some_form() -> None:
    backend = Scripted()
    with chatting(backend, chat_template=TEMPLATES["hermes"]) as (_, client):
        backend.script = '"é"'.encode()
        message = chat(client, response_format=form({"const": "é"})).choices[0].message
        assert message.content == '"é"' and message.tool_calls is None
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        backend.script = call.encode()
        more = {"response_format": form({"const": "é"}), "parallel_tool_calls": False}
        message = chat(client, **more).choices[0].message
        assert message.content is None and len(message.tool_calls) == 1


def test_texts_of_other_forms() -> None:
    """vLLM's fields, in completions, streams, and with several completions."""
    forms: list[tuple[Any, Any]] = [
        ({"structured_outputs": {"regex": "[a-c]{3,9}"}}, lambda t: re.fullmatch("[a-c]{3,9}", t)),
        ({"guided_regex": r"\d{4}"}, lambda t: len(t) == 4 and t.isdecimal()),
        ({"structured_outputs": {"choice": CHOICES}}, lambda t: t in CHOICES),
        ({"guided_choice": ["one"]}, lambda t: t == "one"),
        ({"guided_grammar": 'start: "a" b\nb: "(" b ")" | "x"'}, lambda t: "x" in t),
        ({"guided_grammar": 'root ::= "q" [0-9]'}, lambda t: t[0] == "q" and t[1:].isdecimal()),
        ({"guided_json": json.dumps(NUMBER)}, lambda t: 0 <= json.loads(t) <= 99),
        ({"structured_outputs": {"json": {"enum": [None, 7]}}}, lambda t: t in ("null", "7")),
        ({"response_format": {"type": "json_object"}}, lambda t: isinstance(json.loads(t), dict)),
    ]  # fmt: skip
    with chatting(random_model()) as (_, client):
        for body, fits in forms:
            more = {"prompt": "x", "model": MODEL, "max_tokens": 3000, "seed": 0, "n": 3}
            whole = client.completions.create(**more, extra_body=body)
            texts = [choice.text for choice in whole.choices]
            assert all(map(fits, texts)), (body, texts)
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            streamed = ["", "", ""]
            for chunk in client.completions.create(**more, extra_body=body, stream=True):
                streamed[chunk.choices[0].index] += chunk.choices[0].text
            assert streamed == texts


def test_how_a_text_of_a_form_ends() -> None:
    with chatting(random_model()) as (_, client):

        def ask(regex: str, **more: Any) -> Any:
            body = {"guided_regex": regex, **more.pop("extra", {})}
            answer = client.completions.create(
                model=MODEL, prompt="x", seed=1, max_tokens=50, extra_body=body, **more
            )
            return answer.choices[0].text, answer.choices[0].finish_reason

        assert ask("ab|abc", extra={"min_tokens": 3}) == ("abc", "stop")
        assert ask("ab|abc", extra={"ignore_eos": True}) == ("abc", "stop")
        assert ask("abc", extra={"min_tokens": 9}) == ("abc", "stop")  # there is nothing else
        assert ask("abcabc", stop="ca") == ("ab", "stop")
        assert ask("(abc){20}") == (("abc" * 17)[:50], "length")
        # A stop id ends a text where that is whole.
        assert ask("[ab]{5}", extra={"stop_token_ids": [ord("a")]}) == ("bbbbb", "stop")


def test_what_is_refused_says_where() -> None:
    with chatting(random_model(), options=ServerOptions(grammar_bytes=3000)) as (_, client):

        def refused(**more: Any) -> str:
            with pytest.raises(openai.BadRequestError) as found:
                chat(client, **more)
            return str(found.value.body["message"])

        bad = {"properties": {"a/b": {"items": {"type": "array", "uniqueItems": True}}}}
        place = "response_format.json_schema.schema/properties/a~1b/items: "
        said = refused(tools=[], response_format=form(bad))
        assert said == place + 'Unimplemented keys: ["uniqueItems"]'
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, max_tokens=900, response_format=form(bad, strict=False)
        )
        assert raw.headers["warning"] == '299 spmd "not enforced: Unimplemented keys: uniqueItems"'
        assert "no text fits" in refused(tools=[], response_format=form({"$ref": "#"}))
        assert "3000 are the most" in refused(tools=[], response_format=form({"const": "x" * 4000}))
        assert refused(tools=[tool("a b")]).startswith("tools[0].function.name: 1 to 64 letters")
        assert refused(tools=[tool("a"), tool("a")]) == "tools: two have the same name"
        assert refused(tool_choice=only("no")).startswith("tool_choice: no tool")
        assert refused(tools=[], tool_choice="required").startswith("tool_choice:")
        assert refused(extra_body={"guided_regex": "a"}) == "guided_regex: not together with tools"
        worse = tool("f", True)
        worse["function"]["parameters"]["properties"]["a"] = {"not": {}}
        answer = refused(tools=[worse], tool_choice="required")
        assert answer.startswith("tools[0].function.parameters/properties/a: Unimplemented keys")
        del worse["function"]["strict"]  # of others what cannot be enforced is left out
        assert chat(client, tools=[worse], tool_choice="required").choices[0].message.tool_calls
    unknown = pytest.raises(openai.BadRequestError, match="chat template knows no tools")
    with chatting(random_model(), chat_template=NONE) as (_, client), unknown:
        chat(client)


Schema = dict[str, Any]

NAMES = st.sampled_from(("name", "age", "tags", "é", 'a "b"', "x/y", "$ref", "items", ""))
PATTERNS = ("^[a-c]{2,4}$", r"^\d{1,3}-[A-F]{2}$", "^(yes|no)$", "[0-9]$", r"^a\.b?c{0,3}$")
VALUES = st.sampled_from(
    [1, -2.5, True, None, "a\nb", "日本", [1, "x"], {"k": [None]}, [], {}, ""]
)  # fmt: skip
LOW, MORE, FEW = st.integers(-1000, 1000), st.integers(1, 50), st.integers(0, 3)
PLAIN: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p, "maxLength": 12}),
    st.builds(lambda n, k: {"type": "string", "minLength": n, "maxLength": n + k}, FEW, FEW),
    st.builds(lambda n, k: {"type": "integer", "minimum": n, "maximum": n + k}, LOW, MORE),
    st.builds(lambda n, k: {"type": "integer", "exclusiveMinimum": n, "maximum": n + k}, LOW, MORE),
    LOW.map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 100, "multipleOf": 7}),
    st.builds(lambda n, k: {"type": "number", "minimum": n / 10, "maximum": n / 10 + k}, LOW, MORE),
    st.sampled_from(["boolean", "null", ["boolean", "null"]]).map(lambda kind: {"type": kind}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=json.dumps).map(lambda x: {"enum": x}),
)


@st.composite
def holding(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """A schema that has others in it."""
    kind = draw(st.sampled_from(["object", "array", "anyOf"]))
    if kind == "object":
        properties = draw(st.dictionaries(NAMES, inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        others = draw(st.just(False) | PLAIN)
        made = {"properties": properties, "required": required, "additionalProperties": others}
        return {"type": "object", **made}
    several = draw(st.lists(inner, min_size=1, max_size=3))
    if kind == "anyOf":
        return {"anyOf": several}
    least = draw(FEW)
    array: Schema = {"type": "array", "minItems": least, "maxItems": least + draw(FEW)}
    return {**array, "items": several[0], "prefixItems": several[1:]}


def linked(value: Schema) -> Schema:
    """A list of nodes, each with a value and maybe a next one."""
    properties = {"value": value, "next": {"$ref": "#/$defs/node"}}
    node = {"title": "Node", "type": "object", "properties": properties, "required": ["value"]}
    nodes = {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}}
    return {"$defs": {"node": {**node, "additionalProperties": False}}, **nodes}


SCHEMAS = st.recursive(PLAIN, holding, max_leaves=9) | PLAIN.map(linked)


@pytest.mark.thorough
def test_texts_fit_their_schemas() -> None:
    """Of completions and chats, several at once; few are so long that they have to be cut."""
    finishes: list[str] = []
    with chatting(random_model()) as (_, client):

        @given(SCHEMAS, st.integers(0, 99))
        def fit(schema: Schema, seed: int) -> None:
            asked: Any = {"model": MODEL, "seed": seed, "n": 2, "max_tokens": 4000}
            asked["extra_body"] = {"response_format": form(schema, strict=True)}
            chats = client.chat.completions.create(**asked, messages=ASK).choices
            texts = [(choice.finish_reason, choice.message.content) for choice in chats]
            for choice in client.completions.create(**asked, prompt="x").choices:
                texts.append((choice.finish_reason, choice.text))
            for finish, text in texts:
                finishes.append(finish)
                if finish == "stop":
                    jsonschema.Draft202012Validator(schema).validate(json.loads(text))

        fit()
    assert finishes.count("stop") > 0.95 * len(finishes)
