"""Processes that save together: all wait for each other, and all hear at once if one failed."""

import contextlib
import itertools
import secrets
import socket
import time

from spmd import launch
from spmd.launch.store import job_store, this_process
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.paths import AnyPath

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


PROBE = ".seen-by-all"
PATIENCE_S = 10.0
"""How late a network file system may show a new file to other hosts."""


def check_shared(folder: AnyPath) -> None:
    """Makes a folder, and checks that all processes see the same one; all have to call it.

    Raises:
        CheckpointError: it cannot be written, or is another folder for some process. It is raised
            on all processes.
    """
    # Process 0 writes a random word into the folder and tells it to the others through the job's
    # store. Who finds that word sees the same folder.
    word, failure = secrets.token_hex(8), ""
    probe = folder / f"{PROBE}-{word}"
    if launch.is_main_process():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(word, encoding="utf-8")
        except OSError as error:
            failure = f"{folder} cannot be written: {error.strerror}"
    told = launch.from_first(f"{word} {failure}", label="the folder of checkpoints")
    word, _, failure = told.partition(" ")
    if failure:
        raise CheckpointError(failure)
    try:
        seen = _sees(folder / f"{PROBE}-{word}")
        answers = launch.exchange(
            f"{'yes' if seen else 'no'} {socket.gethostname()}: {folder}",
            label="who sees the folder of checkpoints",
        )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    blind = [number for number, answer in enumerate(answers) if answer.startswith("no")]
    if not blind:
        return
    where = [answer.partition(" ")[2] for answer in answers]
    more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
    raise CheckpointError(
        f"the processes do not share {where[0].partition(': ')[2]}: process {blind[0]}{more} (on "
        f"{where[blind[0]]}) cannot see what process 0 (on {where[0]}) writes. Each process writes "
        "its part of a checkpoint there: give a folder on a disk that all hosts see, by one path"
    )


def _sees(probe: AnyPath) -> bool:
    """Whether a file is there; a network file system may show it late."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            if probe.name in {path.name for path in probe.parent.iterdir()}:  # asks the server anew
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
