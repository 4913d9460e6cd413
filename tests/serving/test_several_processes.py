"""A bundle on several processes: one process's texts, and one end for all, whoever dies."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.decode import ServingShape
from models.llama.config import named_config
from models.llama.weights.sources import fresh_source
from models.training.data.tokenizer import ByteTokenizer
from serving.llama_bundle import write_llama_bundle
from spmd.launch import EXIT_PREEMPTED
from tests.serving.http.live import get, post
from tests.waiting import wait_until
from tools.serving_kills import Group

SHAPE = ServingShape(4, 64, (2, 32), (64,), 16, 2, 0, "float32")
PROMPT = "def f("
MESH = "data=2,model=2"
FLAGS = ("--stall_seconds", "0.5")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: Any) -> Path:
    """A tiny Llama of bytes, with a golden text that one process made."""
    folder: Path = tmp_path_factory.mktemp("bundles") / "tiny"
    with fresh_source(named_config("tiny"), 0) as source:
        write_llama_bundle(
            source, folder, SHAPE, dtype="float32", golden_prompts=[list(PROMPT.encode())]
        )
    return folder


@pytest.fixture
def start(bundle: Path, tmp_path: Path) -> Callable[..., Any]:
    def start(processes: int, max_restarts: int) -> Any:
        cache = tmp_path / "cache"
        return Group(tmp_path, bundle, processes, MESH, cache, max_restarts, FLAGS)

    return start


def golden(bundle: Path) -> str:
    (found,) = json.loads((bundle / "manifest.json").read_text())["goldens"]
    return ByteTokenizer().decode(found["tokens"])


def ask(group: Group, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return post(f"{group.url}/v1/completions", json=body)


@contextmanager
def asking(group: Group, stopped: int, restart: int) -> Iterator[list[httpx.Response]]:
    """A stream and a whole answer, which wait for a stopped process; afterwards what they got."""
    group.signal(stopped, signal.SIGSTOP, restart)
    answers: dict[bool, httpx.Response] = {}

    def run(stream: bool) -> None:
        answers[stream] = ask(group, stream=stream)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_until(lambda: "\nspmd:places_taken 2" in get(f"{group.url}/metrics").text)
    told: list[httpx.Response] = []
    yield told
    for thread in threads:
        thread.join()
    told += [answers[True], answers[False]]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_all_end_together(start: Callable[..., Any], bundle: Path, processes: int) -> None:
    """Kills in the midst of answers, restarts with the same texts, and a gentle end."""
    text, last = golden(bundle), processes - 1
    with start(processes, max_restarts=2) as group:
        group.wait_for(" ready: ")
        assert ask(group).json()["choices"][0]["text"] == text
        with asking(group, last, 0) as told:
            wait_until(lambda: "a call of the model has been" in get(f"{group.url}/health").text)
            group.signal(last, signal.SIGKILL)
        stream, whole = told
        why = f"process {last} was lost"
        assert why in stream.text and stream.text.endswith("data: [DONE]\n\n")
        assert whole.status_code == 503 and why in whole.text
        assert int(whole.headers["Retry-After"]) > 0

        group.wait_for(" ready: ", 2)
        assert ask(group).json()["choices"][0]["text"] == text
        group.signal(0, signal.SIGKILL, restart=1)
        group.wait_for(" ready: ", 3)
        for process in range(1, processes):
            assert f"error: process {process} of {processes} stops: process 0" in group.log

        with asking(group, last, 2) as told:
            group.process.terminate()
            group.wait_for("draining: ")
            group.signal(last, signal.SIGCONT, 2)
        assert '"finish_reason":"length"' in told[0].text
        assert told[1].json()["choices"][0]["text"] == text
        assert group.process.wait() == 0
        assert "Traceback" not in group.log


def test_one_that_is_asked_to_end_drains_all(start: Callable[..., Any], bundle: Path) -> None:
    """As when a host is taken away: all end with the code that launchers start again."""
    with start(2, max_restarts=0) as group:
        group.wait_for(" ready: ")
        with asking(group, 1, 0) as told:
            group.signal(1, signal.SIGTERM)
            group.signal(1, signal.SIGCONT)
        assert told[1].json()["choices"][0]["text"] == golden(bundle)
        assert group.process.wait() == EXIT_PREEMPTED
        assert "Traceback" not in group.log


def test_what_cannot_be_loaded_ends_all(bundle: Path, tmp_path: Path) -> None:
    """On any of the processes: with its message, once the others have heard of it."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    with Group(tmp_path, damaged, 2, MESH, tmp_path / "cache", 0) as group:
        assert group.process.wait() == 1
        assert "error: " in group.log and "manifest.json" in group.log
        assert "Traceback" not in group.log
