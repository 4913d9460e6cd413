"""Whether all processes see one folder: each writes its part of a checkpoint there."""

import contextlib
import secrets
import socket
import time

from spmd import launch
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.paths import AnyPath

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
        try:
            if probe.name in {path.name for path in probe.parent.iterdir()}:  # asks the server anew
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
