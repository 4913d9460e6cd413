"""All stop at one step, wherever they are when one is asked to."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.launch import stop_agreed
from spmd.launch.peers import StopVote
from tests.launch.memory import Memory
from tests.waiting import PATIENCE


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
