"""Signs of life: silence is death, an end that was announced is not."""

import pytest

from spmd.launch import peers
from spmd.launch.peers import COLLECTIVE_FAILED, LEFT, Signs, describe_silent


def test_a_sign_that_changes_is_life():
    signs = Signs(2, timeout_s=5, started=0)
    for now in range(1, 20):
        assert signs.silent(now, {0: str(now), 1: str(now)}) == {}


def test_a_sign_that_stays_is_death():
    signs = Signs(2, timeout_s=5, started=0)
    signs.silent(1, {0: "1", 1: "1"})
    assert signs.silent(6, {0: "2", 1: "1"}) == {}
    assert signs.silent(7, {0: "3", 1: "1"}) == {1: 6}


def test_one_who_never_came_is_dead():
    signs = Signs(3, timeout_s=5, started=10)
    assert signs.silent(15, {0: "1", 1: "1"}) == {}
    assert signs.silent(16, {0: "2", 1: "2"}) == {2: 6}


def test_one_who_left_is_not_missed():
    signs = Signs(2, timeout_s=5, started=0)
    signs.silent(1, {0: "1", 1: LEFT})
    assert signs.silent(100, {0: "2", 1: LEFT}) == {}


def test_the_dead_are_named_with_their_hosts():
    who = {"0": "pid 1 on a", "1": "pid 2 on b"}
    assert "for 12 s; it was pid 2 on b; the end" in describe_silent({1: 12.3}, who)
    assert "for 12 s; the end" in describe_silent({2: 12.3}, who)
    many = {str(i): f"pid {i} on h{i}" for i in range(9)}
    text = describe_silent({i: 9.0 for i in range(9)}, many)
    assert "pid 3 on h3;" in text and "pid 4" not in text


def test_words():
    assert describe_silent({1: 12.3}).startswith("process 1 was lost: no sign of life for 12 s;")
    assert describe_silent({3: 9.0, 1: 7.0}).startswith("processes 1, 3 were lost: no sign of life")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        ("ValueError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error", True),
        ("RuntimeError: the disk is full", False),
        ("RESOURCE_EXHAUSTED: Out of memory", False),
    ],
)
def test_errors_of_collectives_are_known(error: str, is_one: bool):
    assert bool(COLLECTIVE_FAILED.search(error)) == is_one


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (SystemExit("error: no such file"), ("error: no such file", 1)),
        (SystemExit(3), ("3", 3)),
        (SystemExit(0), None),
    ],
)
@pytest.mark.parametrize("cause", [None, ValueError("no such folder")])
def test_others_are_told_why_a_program_ends(end, told, cause, monkeypatch):
    """By the exit's own message, or by what an exit without one was raised from."""
    heard = []
    monkeypatch.setattr(peers, "fail_peers", lambda why, code=1: heard.append((why, code)))
    with pytest.raises(SystemExit), peers.stopping_peers():
        raise end from cause
    if told == ("3", 3) and cause is not None:
        told = (str(cause), 3)
    assert heard == ([] if told is None else [told])
