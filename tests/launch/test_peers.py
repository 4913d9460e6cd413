"""Signs of life, and a stop of all at one step, wherever they are when one is asked to."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.launch import peers, stop_agreed
from spmd.launch.doing import LEFT, Sign
from spmd.launch.peers import COLLECTIVE_FAILED, Signs, StopVote, lost
from tests.launch.memory import Memory
from tests.waiting import PATIENCE


def test_a_sign_that_changes_is_life_and_one_that_stays_is_death():
    """Process 1 gives its last sign after 1 s, 2 says then that it leaves, and 3 never came."""
    signs = Signs(4, timeout_s=5, started=0)
    for now in range(1, 20):
        silent = signs.silent(now, {0: str(now), 1: "1", 2: LEFT if now > 1 else "1"})
        assert silent == {p: now - last for p, last in {1: 1, 3: 0}.items() if now - last > 5}


def test_the_dead_are_named_with_their_hosts_and_errors_of_collectives_known():
    signs = {i: Sign(7, f"pid {i} on h{i}", "reading", 0) for i in range(8)}
    assert lost("why", [1], signs) == "process 1 was lost: why; it was pid 1 on h1"
    assert lost("why", [3, 1], {}) == "processes 1, 3 were lost: why"
    assert lost("why", [8], signs) == "process 8 was lost: why"
    text = lost("why", range(9), signs)
    assert "pid 3 on h3" in text and "pid 4" not in text
    for error in (
        "ValueError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error",
    ):
        assert COLLECTIVE_FAILED.search(error)
    for error in ("RuntimeError: the disk is full", "RESOURCE_EXHAUSTED: Out of memory"):
        assert not COLLECTIVE_FAILED.search(error)


@pytest.mark.parametrize(
    ("code", "cause", "told"),
    [
        ("error: no such file", ValueError("no such folder"), [("error: no such file", 1)]),
        (3, None, [("3", 3)]),
        (3, ValueError("no such folder"), [("no such folder", 3)]),
        (0, None, []),
    ],
)
def test_others_are_told_why_a_program_ends(code, cause, told, monkeypatch):
    """By the exit's own message, or by what an exit without one was raised from."""
    heard = []
    monkeypatch.setattr(peers, "fail_peers", lambda why, code=1: heard.append((why, code)))
    with pytest.raises(SystemExit), peers.stopping_peers():
        raise SystemExit(code) from cause
    assert heard == told


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


def test_nobody_asks_and_one_process_is_asked():
    vote = StopVote(Memory(), 0, 2)
    for step in range(10):
        vote.look()
        assert not vote.reached(step, wanted=False)
    assert stop_agreed(3, wanted=True)
    assert not stop_agreed(3, wanted=False)
