"""Stopping at one step: SIGTERM reaches processes at different moments, but all save together.

A process that is asked to stop says so in the store. Then the thread of every process freezes the
step that its main thread has reached, and publishes it; all stop at the step after the furthest. If
process 0 is in step 7 and process 1 in step 9, both stop before step 10. Nobody waits for a main
thread, so a collective that it is in ends as always.
"""

from __future__ import annotations

import threading

from spmd.launch.store import Store

_REQUEST = "stop/request"
_REACHED = "stop/reached"


class StopVote:
    """The vote of one process; `look` belongs to its thread, `reached` to its main thread."""

    def __init__(self, store: Store, process: int, processes: int) -> None:
        self.store = store
        self.process = process
        self.processes = processes
        self._step = -1
        self._stop_at: int | None = None
        self._has_asked = False
        self._is_frozen = False
        self._change = threading.Condition()

    def reached(self, step: int, wanted: bool) -> bool:
        """Whether all processes stop before this step, which would be next."""
        if wanted and not self._has_asked:
            self._has_asked = True
            self.store.claim(_REQUEST, str(self.process))
        # While steps are being counted this process must not go on to the next one, or the furthest
        # would be wrong. The wait is short: threads answer even while main threads compute.
        with self._change:
            self._change.wait_for(lambda: not self._is_frozen)
            if self._stop_at is not None:
                return step >= self._stop_at
            self._step = step
            return False

    def look(self) -> None:
        """One look at the store."""
        if self._stop_at is not None:
            return
        if not self._is_frozen:
            if self.store.get(_REQUEST) is None:
                return
            with self._change:
                self._is_frozen = True
            self.store.put(f"{_REACHED}/{self.process}", str(self._step))
        reached = self.store.all(_REACHED)
        if len(reached) < self.processes:
            return
        with self._change:
            self._stop_at = max(map(int, reached.values())) + 1
            self._is_frozen = False
            self._change.notify_all()
