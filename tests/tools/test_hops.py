"""What a run enters is counted, on all of its threads; what it takes to prepare is not."""

import threading
from collections.abc import Callable

import spmd
from tools.entered import entered


def ask() -> None:
    spmd.Mesh(None, (4, 2), ("data", "model"))


def test_calls_of_all_threads_count_and_preparations_do_not() -> None:
    def in_a_thread() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    def prepared() -> Callable[[], None]:
        ask()
        return in_a_thread

    once, none = entered(lambda: ask), entered(lambda: lambda: None)
    assert once["files"] >= 1 and once["functions"] >= 1 and once["calls"] >= once["functions"]
    assert entered(prepared) == once
    assert none == {"files": 0, "functions": 0, "calls": 0}
