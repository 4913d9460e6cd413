"""Chat templates: the same texts as transformers makes, and no way out of the sandbox."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be  kind."},
    {"role": "user", "content": " Hé <b>&amp;</b> {{ 1 + 1 }} "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And?\n"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA_3, CHATML = (
    Path(__file__).parent.joinpath("templates", f"{name}.jinja").read_text()
    for name in ("llama_3", "chatml")
)
"""One as it comes with the model, and one with tags and a loop that is gone on with early."""


def test_the_plain_template() -> None:
    template = ChatTemplate()
    assert template.render(MESSAGES) == (
        "System: Be  kind.\n\nUser: Hé <b>&amp;</b> {{ 1 + 1 }}\n\nAssistant: Yes.\n\n"
        "User: And?\n\nAssistant:"
    )
    assert template.render(MESSAGES[:1], generation_prompt=False) == "System: Be  kind.\n\n"
    assert "\nUser:" in template.stops
    assert ChatTemplate(CHATML).stops == ()


@pytest.mark.parametrize("source", [LLAMA_3, CHATML])
@pytest.mark.parametrize("generation", [True, False])
def test_texts_are_those_of_transformers(source: str, generation: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    ours = ChatTemplate(source, TOKENS).render(MESSAGES, generation)
    (theirs,), _ = render(
        [MESSAGES], chat_template=source, add_generation_prompt=generation, **TOKENS
    )
    assert ours == theirs
    assert "{{ 1 + 1 }}" in ours and "<b>" in ours


def test_the_date() -> None:
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert f"Today Date: {today}" in ChatTemplate(LLAMA_3, TOKENS).render(MESSAGES)


def test_messages_that_a_template_refuses() -> None:
    with pytest.raises(ApiError, match="refuses them: Only user and assistant!"):
        ChatTemplate(LLAMA_3, TOKENS).render([*MESSAGES, MESSAGES[0]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.nothing }}",
    ],
)
def test_templates_that_go_wrong_or_too_far(source: str) -> None:
    with pytest.raises(ApiError, match="the chat template fails: "):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", ["{% if", "{% endif %}", "{{ a | nothing }}", "\n\n{% what %}"])
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ServingError, match=r"^chat template, line \d: .+"):
        ChatTemplate(source)
