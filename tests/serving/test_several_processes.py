"""A bundle on several processes: one process's texts, and one end for all, whoever dies."""

import functools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from spmd.launch import EXIT_PEER_LOST, EXIT_PREEMPTED
from spmd.launch.initialize import ENV_COORDINATOR, ENV_PROCESS, ENV_PROCESSES
from spmd.scripts.jobs.local import free_port, with_device_count
from tests.forked import Forked
from tests.serving.conftest import LAYER, write_layer
from tests.serving.http.live import get, post
from tests.waiting import wait_until

MESH = "data=2,model=2"


class Pair:
    """What `Group` is, of two forks without a launcher; they say objects."""

    def __init__(self, folder: Path, bundle: Path, caches: tuple[Path, Path], *flags: str) -> None:
        port, meeting = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        server: list[str | Path] = [bundle, f"--mesh={MESH}", f"--port={port}", *flags]
        server.append("--log_format=json")
        shared = {
            ENV_COORDINATOR: f"127.0.0.1:{meeting}", ENV_PROCESSES: "2",
            "XLA_FLAGS": with_device_count(os.environ["XLA_FLAGS"], 2),
        }  # fmt: skip
        self.processes = [
            Forked(
                "spmd.scripts.serve_bundle",
                [*server, "--cache_dir", caches[rank]],
                folder / f"said{rank}",
                {**shared, ENV_PROCESS: str(rank)},
            )
            for rank in range(2)
        ]

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            process.kill()

    def last_words(self) -> list[str]:
        """The messages with which processes end."""
        said = "".join(process.said for process in self.processes)
        assert "Traceback" not in said and "\nerror: " not in said
        found = [json.loads(line) for line in said.splitlines() if line[:1] == "{"]
        return [line["message"] for line in found if line["level"] == "CRITICAL"]


def test_what_cannot_be_loaded_ends_all(tmp_path: Path) -> None:
    """On any of the processes: with its message, once the others have heard of it."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    with Pair(tmp_path, damaged, (tmp_path / "cache",) * 2) as pair:
        codes = {process.wait() for process in pair.processes}
        assert 1 in codes and codes <= {1, EXIT_PEER_LOST}  # one may hear of it from the other
        assert any("manifest.json" in message for message in pair.last_words())


@pytest.fixture(scope="module")
def layer(tmp_path_factory: Any) -> Path:
    """A bundle of tensors; what is compiled of it lies beside it."""
    folder: Path = tmp_path_factory.mktemp("bundles") / "layer"
    specs = {"x": ("data",), "weights/k": (None, "model"), "outputs/y": ("data", "model")}
    write_layer(folder, specs=specs, platforms=["cpu"])
    return folder


@contextmanager
def serving_tensors(layer: Path, work: Path, second: str = "cache") -> Iterator[Pair]:
    """Two processes that are ready; the `second` one may have a cache of its own."""
    caches = layer.parent / "cache", layer.parent / second
    with Pair(work, layer, caches, "--batch_sizes", "1,4,8") as pair:
        first = pair.processes[0]
        wait_until(lambda: '"ready: ' in first.said or not first.process.is_alive())
        yield pair
        pair.last_words()


def infer(group: Pair, rows: int) -> httpx.Response:
    """An answer, which is right if there is one."""
    x = np.random.default_rng(rows).standard_normal((rows, 8), np.float32)
    body = {"name": "x", "datatype": "FP32", "shape": [rows, 8], "data": x.tolist()}
    answer = post(f"{group.url}/v2/models/bundle/infer", json={"inputs": [body]})
    if answer.status_code == 200:
        found = {one["name"]: one["data"] for one in answer.json()["outputs"]}
        assert found["most"] == x.argmax(-1).tolist()
        y = np.reshape(found["y"], (rows, 4))
        np.testing.assert_allclose(y, np.tanh(x @ LAYER["k"]), rtol=1e-5, atol=1e-6)
    return answer


def wait_for_the_second(group: Pair, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Three who wait for a process that was stopped."""
    group.processes[1].send_signal(signal.SIGSTOP)
    waiting = [threads.submit(infer, group, 4) for _ in range(3)]
    wait_until(lambda: "\nspmd:places_taken 3" in get(f"{group.url}/metrics").text)
    return waiting


@pytest.mark.thorough
def test_a_model_of_tensors(layer: Path, tmp_path: Path) -> None:
    """Rows of several clients in one call; who waits when a process is lost is told."""
    with serving_tensors(layer, tmp_path) as group, ThreadPoolExecutor(8) as threads:
        url = f"{group.url}/v2/models/bundle"
        assert get(f"{url}/config").json()["max_batch_size"] == 8
        answers = list(threads.map(functools.partial(infer, group), [1, 2, 3, 8, 1, 4] * 8))
        assert {answer.status_code for answer in answers} == {200}
        assert post(f"{url}/infer", json={"inputs": []}).status_code == 400
        waiting = wait_for_the_second(group, threads)
        group.processes[1].kill()
        for answer in [one.result() for one in waiting]:
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
            assert "process 1 was lost" in answer.json()["error"]
        group.processes[0].wait()
        (message,) = group.last_words()
        assert message.startswith("process 0 of 2 stops: process 1 was lost: ")


def test_one_that_is_asked_to_end_drains_all(layer: Path, tmp_path: Path) -> None:
    """As when a host is taken away: all end with the code that launchers start again.

    Process 1 finds nothing in its cache, process 0 all, and plans for both.
    """
    with (
        serving_tensors(layer, tmp_path, "another cache") as group,
        ThreadPoolExecutor(3) as threads,
    ):
        waiting = wait_for_the_second(group, threads)
        group.processes[1].send_signal(signal.SIGTERM)
        group.processes[1].send_signal(signal.SIGCONT)
        assert {one.result().status_code for one in waiting} == {200}
        assert [process.wait() for process in group.processes] == [EXIT_PREEMPTED] * 2
    assert (layer.parent / "cache" / "plans").is_dir()
    assert not (layer.parent / "another cache" / "plans").exists()
