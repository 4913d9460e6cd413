"""Chats as their models are made: thoughts, arguments of templates, defaults, fields not served."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.engine.backend import Sampling
from spmd.serving.engine.thought import Marks, ThoughtSplitter
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.language import sampling_of
from spmd.serving.http.limits import Bounds
from spmd.serving.http.protocol import (
    NO_EFFECT,
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    parse_chat,
    parse_completion,
)
from tests.serving.http.live import MODEL, Live, get, post, serving
from tests.serving.http.test_openai_tools import Scripted
from tests.serving.http.tools.templates import TEMPLATES

ASK = [{"role": "user", "content": "1 + 1?"}]
QWEN = TEMPLATES["qwen3_coder"]  # its prompts begin a thought
GLM = TEMPLATES["glm45"]  # the model begins it
BOUNDS = Bounds(max_length=64, vocab_size=256, top_logprobs=5)
SWITCH: Any = {"chat_template_kwargs": {"enable_thinking": False}}


class Noted(Scripted):
    """Notes how tokens are drawn, and the prompt."""

    def begin(self, slot: int, sampling: Sampling, seen: Any, drawn: Any = ()) -> None:
        self.noted, self.prompt = sampling, ByteTokenizer().decode(seen)
        super().begin(slot, sampling, seen, drawn)


@pytest.fixture(scope="module", params=[QWEN, GLM], ids=["opened", "not opened"])
def live(request: Any) -> Iterator[Live]:
    config = {"temperature": 0.5, "top_k": 7, "do_sample": True, "max_length": 9}
    with serving(Noted(), chat_template=request.param, generation_config=config) as running:
        yield running


def script(live: Live, thought: str, answer: str) -> None:
    is_open = "sop" not in live.service.language().template.render(ASK)
    begin = "" if is_open or not thought else "<think>"
    live.backend.script = f"{begin}{thought}{'</think>' if thought else ''}{answer}".encode()  # type: ignore[attr-defined]


def ask(live: Live, status: Any = 200, **body: Any) -> Any:
    given = {"messages": ASK, "max_tokens": 300, **body}
    response = post(f"{live.url}/v1/chat/completions", json=given)
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()["error"]["message"]
    if body.get("stream"):
        lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
        return [json.loads(line)["choices"][0]["delta"] for line in lines]
    return response.json()["choices"][0]


@pytest.mark.parametrize("form", [{}, {"stop": ["2", "y\nN"]}, {"guided_regex": "[3-9]2?"}])
def test_what_is_asked_of_a_text_is_asked_of_the_answer(live: Live, form: Any) -> None:
    script(live, "\nWhy 2?\n\nNo.\n", "\n42")
    choice = ask(live, **form)
    message, wanted = choice["message"], "4" if "stop" in form else "42"
    assert (message["reasoning_content"], message["content"]) == ("Why 2?\n\nNo.", wanted)
    assert (
        message["reasoning"] == message["reasoning_content"] and choice["finish_reason"] == "stop"
    )
    deltas = ask(live, stream=True, **form)
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert [delta for delta in deltas if delta.get("reasoning")]
    assert "reasoning" not in ask(live, include_reasoning=False, **form)["message"]


def test_thoughts_that_end_early_or_are_not_wanted(live: Live) -> None:
    script(live, "x" * 99, "")
    message = ask(live, max_tokens=40)["message"]
    assert message["content"] is None and set(message["reasoning"]) == {"x"}
    digits: Any = {"guided_regex": "[0-9]{3}"}
    for budget in (0, 5):
        message = ask(live, thinking_token_budget=budget, **digits)["message"]
        assert message.get("reasoning", "") == "x" * budget and len(message["content"]) == 3
        assert (
            len(ask(live, thinking_token_budget=budget)["message"].get("reasoning", "")) == budget
        )
    script(live, "", "42")
    switches: tuple[Any, ...] = (SWITCH, {"enable_thinking": False}, {"reasoning_effort": "none"})
    for off in switches:
        message = ask(live, **off)["message"]
        assert message["content"] == "42" and "reasoning" not in message
    history = [*ASK, {"role": "assistant", "content": None, "reasoning": "Hm."}, *ASK]
    ask(live, messages=history, **SWITCH)
    assert "Hm.\n</think>" in live.backend.prompt.replace("Hm.</think>", "Hm.\n</think>")  # type: ignore[attr-defined]


CHANNELS = """
{%- if messages[0].thinking %}<|channel|>analysis<|message|>{{ messages[0].thinking }}{% endif -%}
{%- for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}{% endfor -%}
<|start|>assistant"""


def test_thoughts_in_a_channel_of_their_own() -> None:
    """As gpt-oss has them; an answer has a channel, too."""
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>42"
    with serving(Noted(), chat_template=CHANNELS) as live:
        for form in ({}, {"guided_regex": "[3-9]2?"}):
            live.backend.script = f"{thought}<|start|>assistant{final}".encode()  # type: ignore[attr-defined]
            message = ask(live, **form)["message"]
            assert (message["reasoning"], message["content"]) == ("Hm.", "42")
        live.backend.script = final.encode()  # type: ignore[attr-defined]
        message = ask(live)["message"]
        assert message["content"] == "42" and "reasoning" not in message


def test_arguments_of_templates(live: Live) -> None:
    said = ask(live, 400, chat_template_kwargs={"thinking": True, "enable_thinking": False})
    assert said.startswith('chat_template_kwargs: "thinking" is no argument of this model\'s chat')
    assert "enable_thinking" in said
    assert "4096" in ask(live, 400, chat_template_kwargs={"enable_thinking": "x" * 5000})
    assert "messages" in ask(live, 400, chat_template_kwargs={"messages": []})
    assert ask(live, 400, reasoning_effort="lots").startswith("reasoning_effort: one of none, ")


def test_a_message_goes_on(live: Live) -> None:
    script(live, "", " 2.")
    begun = {"role": "assistant", "content": "end"}
    choice = ask(live, messages=[*ASK, begun], continue_final_message=True)
    assert choice["message"]["content"] == " 2." and live.backend.prompt.endswith("\nend")  # type: ignore[attr-defined]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "no add_generation_prompt" in ask(live, 400, messages=[*ASK, begun], **both)


def test_ids_of_tokens_and_special_tokens(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    script(live, "", "a q b")
    monkeypatch.setattr(live.service.language(), "special_ids", frozenset(b"q"))
    assert ask(live, skip_special_tokens=False, **SWITCH)["message"]["content"] == "a q b"
    for path in ("chat/completions", "completions"):
        body = {"messages": ASK, "prompt": "x", "return_token_ids": True, "n": 2}
        body |= SWITCH if "chat" in path else {}
        whole = post(f"{live.url}/v1/{path}", json=body).json()
        text = post(f"{live.url}/v1/{path}", json={**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        for choice in whole["choices"]:
            assert choice.get("text", choice.get("message", {}).get("content")) == "a  b"
            mine = [one for one in chunks if one["choices"][0]["index"] == choice["index"]]
            ids = [i for one in mine for i in one["choices"][0].get("token_ids", ())]
            assert bytes(ids) == bytes(choice["token_ids"]) == b"a q b\0"
            prompts = [one if "chat" in path else one["choices"][0] for one in mine]
            told = [one["prompt_token_ids"] for one in prompts if "prompt_token_ids" in one]
            wanted = whole if "chat" in path else choice
            assert told == [wanted["prompt_token_ids"]]
            assert bytes(told[0]).decode() == live.backend.prompt  # type: ignore[attr-defined]


def test_texts_and_ids(live: Live) -> None:
    def told(path: str, **body: Any) -> Any:
        return post(f"{live.url}/{path}", json={"model": MODEL, **body}).json()

    whole = told("v1/chat/completions", messages=ASK, return_token_ids=True, max_tokens=1)
    made = told("tokenize", messages=ASK)
    assert made["tokens"] == whole["prompt_token_ids"] and made["count"] == len(made["tokens"])
    text = told("detokenize", tokens=made["tokens"])["prompt"]
    assert told("tokenize", prompt=text)["tokens"] == made["tokens"]
    assert "prompt: a string is needed" in told("tokenize", prompt=[1])["error"]["message"]
    assert "tokens[1]: token ids" in told("detokenize", tokens=[1, 256])["error"]["message"]
    assert told("tokenize", prompt="a", model="other")["error"]["type"] == "not_found_error"


def test_defaults_of_the_model(live: Live) -> None:
    script(live, "", "2")
    own: Any = {"temperature": 0.5, "top_k": 7}
    card = get(f"{live.url}/v1/models/{MODEL}").json()["generation_config"]
    assert card == {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **own}
    for asked in ({}, {"temperature": 0}, {"top_k": -1}, {"top_p": 0.5}):
        ask(live, seed=0, **asked, **SWITCH)
        top_k = 0 if "top_k" in asked else 7
        assert live.backend.noted == Sampling(**{**own, **asked, "top_k": top_k})  # type: ignore[attr-defined]
    with pytest.raises(ServingError, match="temperature: a number from 0 to 100 is needed, not -1"):
        sampling_of({"temperature": -1})


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<final>", "<", "th", "a", "\n"]))


@given(st.booleans(), st.sampled_from(["", "<final>"]), PIECES, st.data())
def test_thoughts_are_found_however_the_text_is_cut(
    opened: bool, plain: str, parts: list[str], data: Any
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    splitter = ThoughtSplitter(Marks("<think>", "</think>", opened, plain))
    found = {"mark": "", "thought": "", "answer": ""}
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for kind, part in splitter.push(text[a:b]):
            found[kind] += part
    for kind, part in splitter.flush():
        found[kind] += part
    head, mark, rest = text.partition("<think>")
    thinks = opened or (bool(mark) and not head.strip())
    if not mark or head.strip():
        head, mark, rest = "", "", text
        if plain and text.lstrip().startswith(plain):
            head, mark, rest = text.partition(plain)
            thinks = False
    thought, end, answer = rest.partition("</think>") if thinks else ("", "", rest)
    assert found == {"mark": head + mark + end, "thought": thought, "answer": answer}


VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params ignore_eos
include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids
media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_logprobs repetition_detection
return_token_ids skip_special_tokens
repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start session_id spaces_between_special_tokens
stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
"""Fields of vLLM's requests that OpenAI's do not have."""


def test_every_field_of_clients_is_known() -> None:
    """Each is read, refused, or has no effect; none of vLLM's or OpenAI's is ignored."""
    chats = pytest.importorskip("openai.types.chat.completion_create_params")
    texts = pytest.importorskip("openai.types.completion_create_params")
    fields = {*chats.CompletionCreateParamsBase.__annotations__, "stream", *VLLM.split()}
    assert parse_chat({**dict.fromkeys(fields), "messages": ASK}, BOUNDS).ignored == ()
    fields = {*texts.CompletionCreateParamsBase.__annotations__, *VLLM.split()}
    of_chats = {name for name in fields if "template" in name or "final_message" in name}
    of_chats |= {"add_generation_prompt", "include_reasoning"}
    completion = parse_completion({**dict.fromkeys(fields - of_chats), "prompt": "a"}, BOUNDS)
    assert completion.ignored == ()
    page = (Path(__file__).parents[3] / "docs" / "serving_requests.md").read_text()
    tables = (REFUSED, REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS, NO_EFFECT)
    assert [name for table in tables for name in table if f"`{name}`" not in page] == []


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_is_not_served_is_refused_by_name(parse: Any) -> None:
    mine = dict(REFUSED) | dict(REFUSED_IN_CHATS if parse is parse_chat else REFUSED_IN_COMPLETIONS)
    for name, harmless in mine.items():
        body = {"messages": ASK, "prompt": "a"}
        with pytest.raises(ApiError, match=f"^{name}: not served; leave it out"):
            parse({**body, name: "odd"}, BOUNDS)
        for value in harmless:
            parse({**body, name: value}, BOUNDS)
