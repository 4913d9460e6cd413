"""The process: it answers while it loads, ends gently on a signal and at once on two."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.errors import ServingError
from serving.http.server import listen
from serving.http.service import Options
from tests.serving.http.live import wait_until

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, time
from models.training.data.tokenizer import ByteTokenizer
from serving.http.server import serve
from serving.http.service import Loaded, Options
from tests.serving.engine.fake_backend import FakeBackend

def load():
    time.sleep({loading})
    {extra}
    return Loaded("fake", FakeBackend(latency={latency}), ByteTokenizer())

try:
    serve(load, port=0, options=Options(drain_seconds=20))
except (ValueError, RuntimeError) as error:
    sys.exit(f"error: {{error}}")
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, loading: float, latency: float, extra: str) -> None:
        program = PROGRAM.format(loading=loading, latency=latency, extra=extra)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_until(lambda: self.lines != [], 30)
        found = re.search(r"listening on (http://127.0.0.1:\d+), loading", self.lines[0])
        assert found, self.lines
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 200, 30)

    def end(self, seconds: float = 20) -> str:
        """Wait for its end; what it has written."""
        self.process.wait(seconds)
        self.reader.join(5)
        return "".join(self.lines)


@contextmanager
def started(loading: float = 0.0, latency: float = 0.0, extra: str = "") -> Iterator[Process]:
    process = Process(loading, latency, extra)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        process.reader.join(5)
        assert process.process.stderr is not None
        process.process.stderr.close()


def ask(url: str, answers: list[Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "stream": True}
    try:
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30).text)
    except httpx.TransportError as error:
        answers.append(error)


def test_a_gentle_end() -> None:
    with started(loading=0.3, latency=0.08) as process:
        assert httpx.get(f"{process.url}/health").status_code == 503
        process.ready()
        answers: list[Any] = []
        thread = threading.Thread(target=ask, args=(process.url, answers))
        thread.start()
        metrics = f"{process.url}/metrics"
        wait_until(lambda: 'requests_running{model_name="fake"} 1.0' in httpx.get(metrics).text)
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{process.url}/health").status_code == 503)
        thread.join(20)
        assert answers[0].endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in answers[0]
        log = process.end()
        assert process.process.returncode == 0
    assert "ready: fake, 4 slots of 64 tokens, 3 programs compiled, mesh fake" in log
    assert "draining" in log and log.rstrip().endswith("stopped")
    assert "Traceback" not in log
    assert "POST /v1/completions" in log and "/health" not in log
    assert "uvicorn.error" not in log  # what libraries tell of themselves


def test_two_signals_end_at_once() -> None:
    with started(latency=0.3) as process:
        process.ready()
        answers: list[Any] = []
        thread = threading.Thread(target=ask, args=(process.url, answers))
        thread.start()
        metrics = f"{process.url}/metrics"
        wait_until(lambda: 'requests_running{model_name="fake"} 1.0' in httpx.get(metrics).text)
        before = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.process.send_signal(signal.SIGINT)
        process.end(8)
        assert time.monotonic() - before < 8  # forty tokens would take twelve seconds
        thread.join(20)


def test_a_signal_while_it_loads() -> None:
    with started(loading=30) as process:
        process.process.send_signal(signal.SIGTERM)
        log = process.end(10)
        assert process.process.returncode == 0
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("raise ValueError('the weights are gone')", "error: the weights are gone"),
        ("return Loaded('fake')", "error: fake: neither a language model nor one of tensors"),
        (
            "return Loaded('fake', FakeBackend(), ByteTokenizer(), chat_template='a\\n{% if')",
            "error: chat template, line 2: ",
        ),
    ],
)
def test_what_cannot_be_loaded(extra: str, message: str) -> None:
    with started(extra=extra) as process:
        log = process.end()
        assert process.process.returncode == 1
        assert message in log
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


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"max_waiting": -1}, "max_waiting is -1; it has to be at least 0"),
        ({"decode_steps": 0}, "decode_steps is 0; it has to be at least 1"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan; it has to be at least 0"),
    ],
)
def test_options_that_make_no_sense(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ServingError, match=says):
        Options(**option)
