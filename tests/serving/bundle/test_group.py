"""Followers repeat what a bundle runs, strangers are not listened to; jobs behind what runs."""

import contextlib
import io
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from spmd.errors import LaunchError
from spmd.serving.bundle import group
from spmd.serving.bundle.bundle import Behind
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.group import Leader, Message, encode, read, repeat
from spmd.serving.bundle.read import load_bundle
from tests.waiting import PATIENCE, wait_until

ARRAYS = numpy_st.arrays(
    st.sampled_from(["bool", "int8", "uint32", "int64", "float32", "float64", "bfloat16"]).map(
        np.dtype
    ),
    numpy_st.array_shapes(min_dims=0, min_side=0),
    elements=st.integers(0, 1),
)


@given(st.lists(ARRAYS, max_size=4), st.lists(st.text(), max_size=3), st.integers(0, 10**6))
def test_messages_arrive_as_they_were(arrays: list[Any], names: list[str], cut: int) -> None:
    """Several in a row; one that is not whole is none."""
    sent = encode(Message("run", names, arrays))
    file = io.BytesIO(sent * 2 + sent[: cut % len(sent)])
    for _ in range(2):
        found = read(file)
        assert found is not None and (found.kind, found.names) == ("run", names)
        for a, b in zip(arrays, found.arrays, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)
    assert read(file) is None


def test_calls_of_many_threads_are_repeated_in_their_order(folder: Path, mesh_of: Any) -> None:
    """The state depends on the order: both bundles end with the same one."""
    first, second = (
        load_bundle(folder, mesh_of(1, 2), functions=("step", "peek")) for _ in range(2)
    )
    ours, theirs = socket.socketpair()
    leader = Leader({1: ours})
    first.told = leader.tell
    inputs = np.random.default_rng(0).normal(size=(4, 6, 4, 8)).astype(np.float32)
    first.put_state({"state/h": np.ones((4, 16), np.float32)})

    def run(mine: Any) -> None:
        for x in mine:
            first.run("step", x)

    with ThreadPoolExecutor(len(inputs)) as threads:
        list(threads.map(run, inputs))
    with theirs.makefile("rb") as file:
        for _ in range(1 + inputs[..., 0, 0].size):
            call = read(file)
            assert call is not None
            repeat(second, call)
        states = [{p: np.asarray(x) for p, x in b.state.items()} for b in (first, second)]
        jax.tree.map(np.testing.assert_array_equal, *states)
        assert states[0]["state/steps"] == inputs[..., 0, 0].size
        first.reset_state()
        call = read(file)
        assert call is not None and call.kind == "reset"
    leader._ending.set()  # now the connection may close
    theirs.close()
    wait_until(leader._alone.is_set)


class FakeStore:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        return wait_until(lambda: self.values.get(key))


def test_who_does_not_know_the_secret_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = FakeStore()
    monkeypatch.setattr(group, "connected_to", lambda: "localhost:1")
    lines: dict[int, socket.socket] = {}
    thread = threading.Thread(
        target=lambda: lines.update(group.welcome(store, 2, PATIENCE)), daemon=True
    )
    thread.start()
    port, _, secret = store.get(group.KEY).partition(" ")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 200, b"0 1\n", f"{secret} one\n".encode()):
        with socket.create_connection(("localhost", int(port))) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # reset, with bytes that nobody read
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
    mine = group.connect(store, 1, PATIENCE)
    thread.join()
    assert [*lines] == [1]
    mine.sendall(b"t")
    assert lines[1].recv(1) == b"t"
    for line in (mine, lines[1]):
        line.close()
    with pytest.raises(LaunchError, match=r"process 1 cannot reach process 0 at localhost"):
        group.connect(store, 1, PATIENCE)
    with pytest.raises(LaunchError, match=r"process 1 did not connect to process 0 within 0\.01 s"):
        group.welcome(store, 2, 0.01)


def test_a_call_that_fails_on_the_devices_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client got wrong does not, whatever words are in it."""

    class Ended(Exception):
        pass

    def stop_now(verdict: str, code: int) -> None:
        raise Ended(verdict, code)

    monkeypatch.setattr(group, "stop_now", stop_now)
    monkeypatch.setattr(group, "CAUSE_SECONDS", 0)
    leader = Leader({})
    leader.heed(BundleError("the unknown input 'gloo: connection closed'"))
    failure = BundleError("step failed on the devices: out of memory")
    failure.__cause__ = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(Ended) as ended:
        leader.heed(failure)
    assert ended.value.args == ("process 0 failed: step failed on the devices: out of memory", 1)


def test_jobs_are_done_once_and_waited_for() -> None:
    gate, made, ended = threading.Event(), list[str](), threading.Event()

    def slow() -> None:
        assert gate.wait(PATIENCE)
        made.append("slow")

    def end() -> None:
        made.append("end")
        ended.set()

    behind = Behind({"quick": lambda: made.append("quick"), "slow": slow}, 2, end)
    assert behind.wait("quick") and not behind.wait("another")
    done = behind.done()
    assert next(done) == "quick"
    assert not ended.is_set()
    gate.set()
    assert list(done) == ["slow"]
    assert ended.wait(PATIENCE) and made == ["quick", "slow", "end"]
    assert not list(Behind({}, 1, end).done()) and made[-2:] == ["end", "end"]


def test_a_job_that_fails_fails_alone() -> None:
    def fail() -> None:
        raise BundleError("too large")

    ended = threading.Event()
    behind = Behind({"bad": fail, "good": lambda: None}, 1, ended.set)
    with pytest.raises(BundleError, match="too large"):
        behind.wait("bad")
    assert behind.wait("good") and ended.wait(PATIENCE)
    done = behind.done()
    assert next(done) == "good"
    with pytest.raises(BundleError, match="too large"):
        next(done)
