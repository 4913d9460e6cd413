"""The process: it answers while it loads, ends gently on a signal and at once on two."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.errors import ServingError
from serving.http.server import listen
from serving.http.service import Options
from tests.serving.http.live import get, post
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from pathlib import Path
from models.training.data.tokenizer import ByteTokenizer
import serving.http.service
from serving.http.server import serve
from serving.http.service import Loaded, Options
from tests.serving.engine.fake_backend import FakeBackend
from tests.waiting import PATIENCE, wait_until

FOLDER = Path(sys.argv[1])
serving.http.service.STOP_SECONDS = 0.1  # not ten for a held result

def load():
    wait_until((FOLDER / "load").exists)
    {extra}
    backend = FakeBackend()
    backend.gate.wait = lambda: wait_until((FOLDER / "run").exists)
    return Loaded("fake", backend, ByteTokenizer())

try:
    serve(load, port=0, options=Options(drain_seconds=PATIENCE))
except (ValueError, RuntimeError) as error:
    sys.exit(f"error: {{error}}")
"""


class Process:
    """A server in a process of its own: it loads, and the model runs, when we say so."""

    def __init__(self, folder: Path, extra: str = "") -> None:
        command = [sys.executable, "-c", PROGRAM.format(extra=extra), str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.folder = folder
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_until(lambda: self.lines != [])
        found = re.search(r"listening on (http://127.0.0.1:\d+), loading", self.lines[0])
        assert found, self.lines
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def let(self, what: str) -> None:
        """Let it `load`, or its model `run`."""
        (self.folder / what).touch()

    def wait_health(self, status: int) -> None:
        wait_until(lambda: get(f"{self.url}/health").status_code == status)

    def end(self) -> str:
        """Wait for its end; what it has written."""
        self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return "".join(self.lines)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(extra: str = "") -> Process:
        started.append(Process(tmp_path, extra))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.end()
        assert process.process.stderr is not None
        process.process.stderr.close()


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


def test_a_gentle_end(start: Callable[..., Process]) -> None:
    process = start()
    assert get(f"{process.url}/health").status_code == 503
    process.let("load")
    process.wait_health(200)
    with asking(process.url) as answers:
        process.process.send_signal(signal.SIGTERM)
        process.wait_health(503)
        process.let("run")
    assert answers[0].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in answers[0]
    log = process.end()
    assert process.process.returncode == 0
    ready = "ready: fake, 4 slots of 64 tokens, 64 pages of 4, 3 programs compiled, mesh fake"
    assert ready in log
    assert "draining" in log and log.rstrip().endswith("stopped")
    assert "Traceback" not in log
    assert "POST /v1/completions" in log and "/health" not in log
    assert "uvicorn.error" not in log  # what libraries tell of themselves


def test_two_signals_end_at_once(start: Callable[..., Process]) -> None:
    process = start()
    process.let("load")
    process.wait_health(200)
    with asking(process.url) as answers:
        process.process.send_signal(signal.SIGTERM)
        process.wait_health(503)
        process.process.send_signal(signal.SIGINT)
        process.end()  # though the request never would
    assert isinstance(answers[0], httpx.TransportError) or "[DONE]" not in answers[0]


def test_a_signal_while_it_loads(start: Callable[..., Process]) -> None:
    process = start()
    process.process.send_signal(signal.SIGTERM)
    log = process.end()
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
def test_what_cannot_be_loaded(start: Callable[..., Process], extra: str, message: str) -> None:
    process = start(extra)
    process.let("load")
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
        ({"token_budget": 0}, "token_budget is 0; it has to be at least 1"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan; it has to be at least 0"),
    ],
)
def test_options_that_make_no_sense(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ServingError, match=says):
        Options(**option)
