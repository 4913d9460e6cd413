"""Jobs behind a bundle that runs already."""

from __future__ import annotations

import threading

import pytest

from serving.bundle.bundle import Behind
from serving.bundle.function import BundleError
from tests.waiting import PATIENCE


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


def test_without_jobs_it_has_ended() -> None:
    ended = threading.Event()
    assert not list(Behind({}, 1, ended.set).done()) and ended.is_set()
