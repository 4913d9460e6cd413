"""Processes that save together: all wait for each other, and all hear at once if one failed."""

import itertools
import time

from spmd.launch.store import job_store, this_process
from spmd.models.training.checkpoints.found import CheckpointError

LOOK_S = 1.0
"""Seconds between two looks for a failure."""

_attempts = itertools.count(1)
"""Of this process; all processes of a job begin their saves together, and so count alike."""


class Together:
    """What the processes of a job tell each other of one save after the other.

    Where one fails the others would wait for it at orbax's next barrier until their patience ends.
    So orbax gets a barrier that ends with the failure's reason on all of them.

    Attributes:
        attempt: the number of the save.
    """

    # Processes 0 and 1 save for the third time, and the disk of 1 is full:
    #   1 writes saves/3/failed: "process 1: no space is left on the disk"
    #   0 waits for saves/3/<barrier>/1, looks for a failure every second, and raises that reason
    # Nobody gives the checkpoint its name, and both forget it.

    def __init__(self) -> None:
        self.store = job_store()
        self.process, self.processes = this_process()
        self.attempt = 0

    def begin(self) -> None:
        """Begins another save."""
        self.attempt = next(_attempts)

    def fail(self, why: str) -> None:
        """Tells the others that the save has failed here."""
        if self.store is not None:
            self.store.claim(f"saves/{self.attempt}/failed", f"process {self.process}: {why}")

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes have come here; orbax calls it on its own thread.

        Raises:
            CheckpointError: the save has failed on another process.
            TimeoutError: one did not come in time.
        """
        if self.store is None:
            return
        end = time.monotonic() + timeout_ms / 1000
        place = f"saves/{self.attempt}/{key}"
        if self.process:
            self.store.put(f"{place}/{self.process}", "here")
            self._await(f"{place}/all", end)
            return
        for process in range(1, self.processes):
            self._await(f"{place}/{process}", end)
        self.store.put(f"{place}/all", "here")

    def _await(self, name: str, end: float) -> None:
        assert self.store is not None
        while self.store.get(name, LOOK_S) is None:
            failure = self.store.get(f"saves/{self.attempt}/failed")
            if failure is not None:
                raise CheckpointError(failure)
            if time.monotonic() > end:
                raise TimeoutError(f"{name} did not come in time")
