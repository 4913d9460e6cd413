"""Request ids in every answer, and lines of the log."""

import json
import logging
import re
import signal
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import Live, get, post, serving
from tests.serving.http.process import Process, Start
from tests.waiting import PATIENCE, wait_until

ASK = {"prompt": "hello", "max_tokens": 8, "seed": 0}
OURS = re.compile("[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/no/such", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", ASK, 200),
        ("POST", "/v1/completions", {**ASK, "stream": True}, 200),
        ("POST", "/v1/completions", {"prompt": 1.5}, 400),
        ("POST", "/v2/models/none/infer", {}, 404),
    ],
)
def test_every_answer_has_an_id(live: Live, method: str, path: str, body: Any, status: int) -> None:
    for name, pattern in (("my-request.7", re.compile("my-request.7")), (None, OURS)):
        headers = {"X-Request-Id": name} if name else {}
        request = httpx.request(
            method, live.url + path, json=body, headers=headers, timeout=PATIENCE
        )
        assert request.status_code == status
        assert pattern.fullmatch(request.headers["X-Request-Id"])


def test_a_mistake_of_ours_has_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as live:
        monkeypatch.delattr(live.service, "created")
        answer = get(f"{live.url}/v1/models", headers={"X-Request-Id": "abc"})
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "abc")


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200))
def test_ids_are_bounded_and_harmless(live: Live, text: str) -> None:
    said = get(f"{live.url}/health", headers={"X-Request-Id": text}).headers["X-Request-Id"]
    if re.fullmatch(r"[\w.:/+=@~-]{1,128}", text.strip()):
        assert said == text.strip()
    else:
        assert OURS.fullmatch(said)


def lines(process: Process) -> list[Any]:
    return [json.loads(line) for line in process.lines]


@pytest.mark.thorough
def test_the_log_as_json(start: Start) -> None:
    process = start(serve="log_format='json'")
    process.let("load")
    process.let("run")
    process.wait_health(200)
    headers = {"X-Request-Id": "abc"}
    usage = post(f"{process.url}/v1/completions", json=ASK, headers=headers).json()["usage"]
    post(f"{process.url}/v1/completions", json={**ASK, "n": 2, "stream": True})
    get(f"{process.url}/no%0asuch?secret=1")
    process.process.send_signal(signal.SIGTERM)
    process.end()
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines(process))
    assert {line["level"] for line in lines(process)} == {"INFO"}
    messages = [line["message"] for line in lines(process) if line["logger"] == "serving"]
    assert messages[0].startswith("listening on ") and messages[-1] == "stopped"
    whole, stream, missing = (x for x in lines(process) if x["logger"] == "serving.access")
    assert whole.pop("seconds") > 0
    assert '"POST /v1/completions" 200' in whole.pop("message")
    assert whole.pop("time") <= stream["time"]
    assert whole == {
        "level": "INFO", "logger": "serving.access", "request_id": "abc", "method": "POST",
        "path": "/v1/completions", "status": 200, "client": "127.0.0.1",
        "prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"],
        "finish_reason": "length",
    }  # fmt: skip
    assert (stream["prompt_tokens"], stream["completion_tokens"]) == (5, 16)
    assert OURS.fullmatch(stream["request_id"])
    assert (missing["path"], missing["status"]) == ("/no%0asuch", 404)
    assert "completion_tokens" not in missing


@pytest.mark.thorough
def test_failures_in_json(start: Start) -> None:
    """A traceback is a field of the line, and a line of a request has its id."""
    process = start("FakeBackend.step = None", serve="log_format='json'")
    process.let("load")
    process.wait_health(200)
    headers = {"X-Request-Id": "abc"}
    assert post(f"{process.url}/v1/completions", json=ASK, headers=headers).status_code == 500
    wait_until(lambda: any("exception" in line for line in lines(process)))
    (failure,) = (line for line in lines(process) if "exception" in line)
    assert failure["level"] == "ERROR" and "Traceback" in failure["exception"]
    wait_until(lambda: lines(process)[-1]["logger"] == "serving.access")
    access = lines(process)[-1]
    assert (access["status"], access["request_id"]) == (500, "abc")
    assert access["finish_reason"] == "error"


def test_a_client_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.gate.close(after=3)
    with caplog.at_level(logging.INFO, "serving.access"), serving(backend) as live:
        body = {**ASK, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE) as it:
            next(it.iter_lines())
        wait_until(lambda: caplog.records)
        fields = caplog.records[0].fields  # type: ignore[attr-defined]
        assert fields["finish_reason"] == "abort"
        assert 1 <= fields["completion_tokens"] < 40
        backend.gate.open()
