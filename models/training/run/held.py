"""The lock of a run's folder: one job trains in it."""

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from spmd import launch
from spmd.models.training.errors import RunError
from spmd.models.training.paths import AnyPath, StorePath
from spmd.models.training.run.background import say

BEAT_S = 5.0


@contextlib.contextmanager
def held(folder: AnyPath) -> Iterator[None]:
    """Inside, no other job trains in the folder; process 0 locks it for all.

    Raises:
        RunError: another job does; says which.
    """
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    with contextlib.ExitStack() as stack:
        if launch.is_main_process() and isinstance(folder, Path):
            lock = stack.enter_context((folder / ".lock").open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.truncate(0)
                lock.write(who)
                lock.flush()
            except BlockingIOError as error:
                lock.seek(0)
                raise _taken(folder, lock.read()) from error
            except OSError:  # a file system without locks
                stack.enter_context(_beating(folder / ".lock-beats", who))
        elif launch.is_main_process():
            stack.enter_context(_beating(folder / ".lock", who))
        yield


def _taken(folder: AnyPath, text: str) -> RunError:
    return RunError(
        f"run_dir: another job trains in {folder} now, {text.partition(', beat')[0]}; wait until "
        "it has ended, or name another folder"
    )


@contextlib.contextmanager
def _beating(lock: AnyPath, who: str) -> Iterator[None]:
    """Holds a lock that its owner writes anew every few seconds.

    One that is found there is watched, as clocks of hosts differ: it was left by a process that was
    killed if it stays the same. Of two that write it at the same moment the later one has it.
    """
    mine, end = f"{who}, beat {secrets.token_hex(8)}", threading.Event()

    def write() -> None:
        part = lock if isinstance(lock, StorePath) else lock.with_name(f"{lock.name}-{os.getpid()}")
        part.write_text(f"{mine} {time.time()}", encoding="utf-8")
        if isinstance(part, Path):  # whole, for those who read it meanwhile, as a store does it
            part.replace(str(lock))

    def check(before: str, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while (now := _read(lock)).startswith(before) and time.monotonic() < until:
            time.sleep(patience_s / 20)
        if now and not now.startswith(before):
            raise _taken(lock.parent, now)

    def beat() -> None:
        while not end.wait(BEAT_S):
            try:
                check(mine, 0)
                write()
            except RunError as error:  # this process slept too long
                say("error", str(error))
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except OSError:  # a store that cannot be reached stops no run
                pass

    if found := _read(lock):
        say(lock, f"{found.partition(', beat')[0]} trains here or was killed, which takes a moment")
        check(found, 4 * BEAT_S)
    write()
    check(mine, BEAT_S / 5)
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        with contextlib.suppress(OSError):
            if _read(lock).startswith(mine):
                lock.unlink()


def _read(lock: AnyPath) -> str:
    try:
        return str(lock.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
