from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton

from tests.serving.http.live import Live, serving
from tests.serving.http.process import Process, Start
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as running:
        yield running


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts servers, with one process each and with two; at the end none is left."""
    started: list[Process] = []

    def start(extra: str = "", serve: str = "") -> Process:
        started.append(Process(tmp_path, extra, f"apart={request.param}, {serve}"))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.end()
        assert process.process.stderr is not None
        process.process.stderr.close()


def triton_client(live: Live) -> Any:
    """Triton's own client; one belongs to one thread."""
    host = live.url.removeprefix("http://")
    return triton.InferenceServerClient(host, network_timeout=PATIENCE, connection_timeout=PATIENCE)
