"""The process: it answers while it loads, ends gently on a signal and at once on two."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spmd.serving.errors import ServingError
from spmd.serving.http.server import listen
from tests.serving.http.live import get, post
from tests.serving.http.process import Start
from tests.waiting import wait_until


@contextmanager
def asking(url: str) -> Iterator[list[Any]]:
    """While a request is under way; in the list is what came of it, when it is over."""
    answers: list[Any] = []

    def ask() -> None:
        body = {"prompt": "hello", "max_tokens": 40, "stream": True}
        try:
            answers.append(post(f"{url}/v1/completions", json=body).text)
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: 'requests_running{model_name="fake"} 1.0' in get(f"{url}/metrics").text)
    yield answers
    thread.join()


@pytest.mark.thorough
def test_a_gentle_end(start: Start) -> None:
    process = start()
    assert get(f"{process.url}/health").status_code == 503
    process.let("load")
    process.wait_health(200)
    assert get(f"{process.url}/health", headers={"Host": "evil.example"}).status_code == 421
    with asking(process.url) as answers:
        process.process.send_signal(signal.SIGTERM)
        process.wait_health(503)
        process.let("run")
    assert answers[0].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in answers[0]
    log = process.end()
    assert process.process.returncode == 0
    assert "ready: fake, 4 slots of 64 tokens, 64 pages of 4, 3 programs compiled, mesh fake" in log
    assert "draining" in log and log.rstrip().endswith("stopped")
    assert "Traceback" not in log
    (line,) = (line for line in log.splitlines() if "serving.access" in line)
    assert re.search(
        r'127\.0\.0\.1 "POST /v1/completions" 200, \d+\.\d{3} s, 5 \+ 40 tokens \[\w{32}\]$', line
    )
    assert "uvicorn.error" not in log  # what libraries tell of themselves


@pytest.mark.thorough
def test_two_signals_end_at_once(start: Start) -> None:
    process = start()
    process.let("load")
    process.wait_health(200)
    with asking(process.url) as answers:
        process.process.send_signal(signal.SIGTERM)
        process.wait_health(503)
        process.process.send_signal(signal.SIGINT)
        process.end()  # though the request never would
    assert isinstance(answers[0], httpx.TransportError) or "[DONE]" not in answers[0]


def test_a_signal_while_it_loads(start: Start) -> None:
    process = start()
    process.process.send_signal(signal.SIGTERM)
    log = process.end()
    assert process.process.returncode == 0
    assert "Traceback" not in log


@pytest.mark.thorough
def test_what_cannot_be_loaded(start: Start) -> None:
    process = start("return Loaded('fake', FakeBackend(), ByteTokenizer(), chat_template='{% if')")
    process.let("load")
    log = process.end()
    assert process.process.returncode == 1
    assert "error: chat template, line 1: " in log
    assert "Traceback" not in log


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"on 127\.0\.0\.1:{port}: Address already in use$"):
            listen("127.0.0.1", port)
    with pytest.raises(ServingError, match="cannot listen on no such host:1"):
        listen("no such host", 1)
    with pytest.raises(ServingError, match="ports are below 65536"):
        listen("127.0.0.1", 99999)


@pytest.mark.parametrize("start", [True], indirect=True, ids=["apart"])
@pytest.mark.parametrize("who", ["model", "clients"])
def test_one_of_two_processes_is_killed(start: Start, who: str) -> None:
    process = start()
    process.let("load")
    process.wait_health(200)
    number = process.process.pid
    (child,) = map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())
    with asking(process.url) as answers:
        os.kill(number if who == "model" else child, signal.SIGKILL)
        log = process.end()  # of both: they share it
    if who == "model":
        assert "the process that runs the model has ended" in answers[0]
    else:
        assert process.process.returncode == 1
        assert "the process that answers clients has ended with status -9" in log
    listen("127.0.0.1", int(process.url.rpartition(":")[2])).close()
