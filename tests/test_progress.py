"""The line that says what a long compilation is doing: where it is seen, and that it goes away."""

import contextlib
import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import spmd
from spmd.progress import Stopwatch, doing, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes at once."""
    monkeypatch.setattr("spmd.progress.PATIENCE", 0.01)
    monkeypatch.setattr("spmd.progress.EVERY", 0.01)


def wait_for(stream: io.StringIO, text: str) -> None:
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.005)


def screen(text: str) -> str:
    shown: list[str] = []
    for part in text.split("\r"):
        shown[: len(part)] = part
    return "".join(shown).rstrip()


@pytest.mark.parametrize("error", [None, ValueError("broken")])
def test_the_line_names_the_stage_and_is_erased(error: Exception | None) -> None:
    stream = Terminal()
    ends = pytest.raises(ValueError) if error else contextlib.nullcontext()
    with ends, progress("step", True, stream):
        doing("a stage of a long name")
        wait_for(stream, "spmd: step, a stage of a long name (0 s)")
        doing("plan")
        wait_for(stream, "spmd: step, plan (0 s)")
        assert screen(stream.getvalue()) == "spmd: step, plan (0 s)"
        if error:
            raise error
    assert screen(stream.getvalue()) == ""
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "wanted", "patience"),
    [(io.StringIO(), True, 0.01), (Terminal(), False, 0.01), (Terminal(), True, 60.0)],
    ids=["a log", "turned off", "quick"],
)
def test_nothing_is_shown(
    stream: io.StringIO, wanted: bool, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmd.progress.PATIENCE", patience)
    with progress("step", wanted, stream):
        doing("plan")
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_notebooks_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: object()))
    stream = io.StringIO()
    with progress("step", True, stream):
        wait_for(stream, "spmd: step (0 s)")


def test_an_inner_one_leaves_the_line_to_the_outer_one() -> None:
    stream = Terminal()
    with progress("outer", True, stream):
        with progress("inner", True, stream):
            doing("XLA")
            wait_for(stream, "spmd: outer, XLA (0 s)")
        doing("after")
        wait_for(stream, "spmd: outer, after (0 s)")
    assert "inner" not in stream.getvalue()


def test_a_compilation_names_its_stages(devices8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for place in ("spmd.progress.doing", "spmd.api.jitted.doing", "spmd.api.compiled.doing"):
        monkeypatch.setattr(place, said.append)
    spmd.jit(lambda x: x + 1, mesh=spmd.make_mesh(data=8)).compile(jnp.ones(8))
    assert said[0] == "trace"
    assert said[-1] == "XLA"
    assert {"import", "propagate", "plan", "partition", "optimize", "emit"} <= set(said)


def test_a_compilation_on_a_terminal(devices8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(x: Any) -> Any:
        wait_for(stream, "spmd: slow, trace (0 s)")
        return x + 1

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    spmd.jit(slow, mesh=spmd.make_mesh(data=8))(jnp.ones(8))
    assert screen(stream.getvalue()) == ""


def test_a_stage_that_fails_is_timed_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("spmd.progress.time.perf_counter", lambda: now)

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds
        if seconds == 2:
            raise ValueError

    def outer() -> None:
        clock("inner", work, 4)
        with pytest.raises(ValueError):
            clock("fails", work, 2)
        work(1)

    clock = Stopwatch()
    clock("outer", outer)
    assert clock.seconds == {"outer": 1, "inner": 4, "fails": 2}
