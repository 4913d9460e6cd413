"""Which errors a launcher need not start a job again for, and what it says to its processes."""

import os
import threading

import pytest

from spmd.errors import LaunchError, MeshError
from spmd.launch import restart
from spmd.launch.restart import (
    ENV_MAX_RESTARTS,
    ENV_NEWS,
    EXIT_REFUSED,
    exit_code,
    hear_news,
    pipe_name,
)


@pytest.fixture(autouse=True)
def nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_begun", threading.Event())


def test_what_the_user_has_to_mend_is_refused(monkeypatch: pytest.MonkeyPatch):
    wrong = MeshError("no such mesh")
    assert exit_code(wrong) == 1  # nobody would start it again
    monkeypatch.setenv(ENV_MAX_RESTARTS, "3")
    assert exit_code(wrong) == exit_code(ValueError("x"), mends=True) == EXIT_REFUSED
    # A host that is late, a disk that is away and a bug may be otherwise the next time.
    assert exit_code(LaunchError("process 1 did not come")) == 1
    assert exit_code(FileNotFoundError("data"), mends=True) == exit_code(ValueError("x")) == 1
    restart.begun()
    assert exit_code(wrong) == 1


def test_only_the_launchers_own_pipe_is_heard(monkeypatch: pytest.MonkeyPatch):
    """A process that a member starts has the variable, and perhaps another file of that number."""
    heard: list[str] = []
    reads, writes = os.pipe()
    monkeypatch.setenv(ENV_NEWS, f"{reads}:1")
    hear_news(heard.append)
    monkeypatch.setenv(ENV_NEWS, "99999:1")
    hear_news(heard.append)
    assert ENV_NEWS not in os.environ
    monkeypatch.setenv(ENV_NEWS, pipe_name(reads))
    is_told = threading.Event()

    def tell(text: str) -> None:
        heard.append(text)
        is_told.set()

    hear_news(tell)
    os.write(writes, b"process 1 was lost\n")
    os.close(writes)
    is_told.wait()
    assert heard == ["process 1 was lost"]
