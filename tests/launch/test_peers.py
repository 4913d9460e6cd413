"""Signs of life, and a stop of all at one step, wherever they are when one is asked to."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.launch import peers, stop_agreed
from spmd.launch.peers import COLLECTIVE_FAILED, LEFT, Signs, StopVote, lost
from tests.launch.memory import Memory
from tests.waiting import PATIENCE


def test_a_sign_that_changes_is_life():
    signs = Signs(2, timeout_s=5, started=0)
    for now in range(1, 20):
        assert signs.silent(now, {0: str(now), 1: str(now)}) == {}


def test_a_sign_that_stays_is_death_and_an_end_is_not():
    signs = Signs(2, timeout_s=5, started=0)
    signs.silent(1, {0: "1", 1: "1"})
    assert signs.silent(6, {0: "2", 1: "1"}) == {}
    assert signs.silent(7, {0: "3", 1: "1"}) == {1: 6}
    signs.silent(8, {0: "4", 1: LEFT})
    assert signs.silent(10, {0: "5", 1: LEFT}) == {}
    assert signs.silent(100, {0: "6", 1: LEFT}) == {}


def test_one_who_never_came_is_dead():
    signs = Signs(3, timeout_s=5, started=10)
    assert signs.silent(15, {0: "1", 1: "1"}) == {}
    assert signs.silent(16, {0: "2", 1: "2"}) == {2: 6}


def test_the_dead_are_named_with_their_hosts():
    signs = {i: f"7\npid {i} on h{i}\nreading" for i in range(9)} | {8: LEFT}
    assert lost("why", signs, [1]) == "process 1 was lost: why; it was pid 1 on h1"
    assert (
        lost("why", signs, [0]) == "process 0, the coordinator, was lost: why; it was pid 0 on h0"
    )
    assert lost("why", {}, [3, 1]) == "processes 1, 3 were lost: why"
    assert lost("why", signs, [8]) == "process 8 was lost: why"
    text = lost("why", signs, range(9))
    assert "pid 3 on h3" in text and "pid 4" not in text


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


@pytest.mark.parametrize("asked", [(1,), (0, 2)])
@pytest.mark.parametrize("steps_ahead", [0, 3])
def test_all_stop_at_one_step(asked: tuple[int, ...], steps_ahead: int):
    """Steps are barriers, as collectives are; a host may run some steps ahead of the others."""
    store, count = Memory(), 3
    votes = [StopVote(store, process, count) for process in range(count)]
    barriers = [threading.Barrier(count) for _ in range(4 * (steps_ahead + 1))]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            for vote in votes:
                vote.look()

    def run(process: int) -> int:
        for step in itertools.count():
            barrier = barriers[step % len(barriers)]
            if votes[process].reached(step, wanted=process in asked and step >= 5 + process):
                return step
            if process != 0 or step % (steps_ahead + 1) == 0:
                barrier.wait(PATIENCE)
            else:  # its work is done in time, but it does not wait
                threading.Thread(target=barrier.wait, args=(PATIENCE,), daemon=True).start()
            time.sleep(0.001)
        raise AssertionError

    looker = threading.Thread(target=look)
    looker.start()
    with ThreadPoolExecutor(count) as pool:
        stops = list(pool.map(run, range(count)))
    over.set()
    looker.join()
    assert len(set(stops)) == 1
    assert stops[0] >= 5


def test_nobody_asks():
    vote = StopVote(Memory(), 0, 2)
    for step in range(10):
        vote.look()
        assert not vote.reached(step, wanted=False)


def test_one_process_stops_when_it_is_asked():
    assert stop_agreed(3, wanted=True)
    assert not stop_agreed(3, wanted=False)
