"""API keys with limits, from a file that is read again."""

import os
from pathlib import Path
from typing import Any

import openai
import pytest

from spmd.serving.errors import ServingError
from spmd.serving.http import keys as keys_module
from spmd.serving.http.keys import ApiKey, Keys
from spmd.serving.http.limits import ServerOptions
from tests.serving.http.live import Live, begin, serving
from tests.waiting import wait_until

TEXT = """
few: {key: a, requests_per_second: 1.0e-6}
short: {key: b, tokens_per_minute: 5}
narrow: {key: c, at_once: 1}
free: {key: d}
"""


def ask(live: Live, key: str, **body: Any) -> Any:
    given = {"prompt": "hello", "max_tokens": 3, **body}
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)
    return client.completions.create(model=live.service.require().name, **given)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keys_module, "LOOK_SECONDS", 0.0)
    file = tmp_path / "keys.yaml"
    file.write_text(TEXT)
    return file


def test_each_key_has_its_limits(file: Path) -> None:
    with serving(options=ServerOptions(api_keys=("other",), api_key_file=file)) as live:
        for key, what in (("a", "1e-06 requests a second"), ("b", "5 tokens a minute")):
            ask(live, key)
            with pytest.raises(openai.RateLimitError, match=what) as refused:
                while True:  # its tokens count when its answer has ended, which may be soon
                    ask(live, key)
            assert refused.value.code == "rate_limit_exceeded"
            assert int(refused.value.response.headers["retry-after"]) >= 1
        live.backend.gate.close()
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        with begin(live, "/v1/completions", body, key="c"):
            wait_until(lambda: live.service.admission.places.taken)
            with pytest.raises(openai.RateLimitError, match="1 requests at once"):
                ask(live, "c")
            live.backend.gate.open()
            for key in ("d", "d", "other"):
                ask(live, key)
        wait_until(lambda: _answers(live, "c"))  # once the stream has ended


def _answers(live: Live, key: str) -> bool:
    try:
        return bool(ask(live, key))
    except openai.RateLimitError:
        return False


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(file: Path, caplog: Any) -> None:
    keys = Keys(("z",), file)
    assert [keys.find(key) for key in (b"d", b"z", b"new")] == ["free", "0", None]
    file.write_text("fresh: {key: new, at_once: 2}\n")
    assert [keys.find(key) for key in (b"d", b"z", b"new")] == [None, "0", "fresh"]
    file.write_text("0: {key: new}\n")
    assert keys.find(b"new") == "fresh" and "choose another name" in caplog.text
    file.write_text("fresh: [")
    os.utime(file, ns=(1, 1))
    assert keys.find(b"new") == "fresh" and "the keys from before stay" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: {key: x, at_once: -1}", "limits are numbers"), ("a: {key: 7}", "no key in quotes"),
        ("a: {key: x, speed: 1}", "speed"), ("a: {key: x}\nb: {key: x}", "a key twice"),
        ("- x", "write lines such as"), ("{}", "no keys"),
    ],
)  # fmt: skip
def test_what_a_file_may_say(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ServingError, match=says):
        ApiKey.read(tmp_path / "keys.yaml")
