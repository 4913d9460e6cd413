"""How a run begins: agreed on, watched, its folder open, at a checkpoint or anew."""

import contextlib
import dataclasses
import fcntl
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from spmd import launch
from spmd.launch.restart import is_first_start, max_restarts
from spmd.models.compiled import keeping_compiled
from spmd.models.training.checkpoints.found import Found
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.data.loader import Dataset, fingerprint
from spmd.models.training.errors import RunError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.paths import AnyPath, StorePath
from spmd.models.training.program import TrainingProgram
from spmd.models.training.run.background import say
from spmd.models.training.run.description import RunFolder
from spmd.models.training.run.loop import TrainState

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


def agree(options: TrainerOptions, data: Dataset) -> None:
    """All processes have the same options, sources and data, or each gets an error.

    Raises:
        LaunchError: they differ; names in what.
    """
    values = {name: str(value) for name, value in dataclasses.asdict(options).items()}
    del values["run_dir"]  # whether they share it is checked by what they see in it
    launch.check_same(values, label="options of the trainer")
    launch.check_same({"data (hash)": fingerprint(data)}, label="data")
    launch.check_same_sources()


def restart_note(options: TrainerOptions) -> str:
    """Says what a launcher's next start of this run would do, where it would not go on; else ""."""
    if not max_restarts() or not is_first_start() or (options.run_dir and options.resume):
        return ""
    then = "find this run in run_dir, and end" if options.run_dir else "begin anew"
    return (
        f"note: --max_restarts starts this run again if it fails, which would {then}; to go on, "
        "give --run_dir, --save_every and --resume (TrainerOptions.resume)"
    )


@contextlib.contextmanager
def watched(timeout: float, folder: RunFolder | None) -> Iterator[launch.Watch]:
    """What hears of progress; too long without any ends the job.

    Args:
        timeout: seconds without a step; 0 watches nothing.
        folder: where stacks are written; a temporary folder if there is none.
    """
    if not timeout:
        yield launch.Unwatched()
        return
    where = Path(tempfile.gettempdir()) / f"watchdog-{os.getpid()}"
    if folder is not None:
        where = folder.path / "watchdog"
    with launch.Watchdog(timeout, where) as dog:
        yield dog


@contextlib.contextmanager
def opened(
    folder: RunFolder | None, options: TrainerOptions, about: Mapping[str, Any]
) -> Iterator[Checkpoints | None]:
    """The checkpoints of a run's folder, which is made and kept up meanwhile; None without one.

    Args:
        about: what checkpoints say of the run.
    """
    if folder is None:
        yield None
        return
    folder.make()
    # A restart compiles nothing again; where the user keeps programs, they stay.
    has_place = getattr(jax.config, "jax_compilation_cache_dir", None) is not None
    with (
        held(folder.kept or folder.path),
        folder.kept_up(),
        contextlib.nullcontext() if has_place else keeping_compiled(folder.compiled.absolute()),
        Checkpoints(
            folder.checkpoints,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            keep_best=options.keep_best,
            about=about,
        ) as checkpoints,
    ):
        yield checkpoints


def find_checkpoint(
    checkpoints: Checkpoints, wanted: int | str | None, console: Console
) -> Found | None:
    """Where a run goes on; None to start anew.

    Raises:
        RunError: it is to start anew, and the folder holds a run.
        CheckpointError: the wanted step has no checkpoint, or all are damaged.
    """
    if wanted is None:
        steps = checkpoints.steps()
        if not steps:
            return None
        raise RunError(
            f"run_dir: {checkpoints.folder.parent} holds a run that has come to step {steps[0]}; "
            "go on from there with --resume (Options.resume), or name another folder"
        )
    found = checkpoints.find(wanted)
    for note in checkpoints.notes:
        console.print(note)
    if found is None:
        console.print("no checkpoint yet: starting anew")
    return found


def first_state(
    program: TrainingProgram,
    checkpoints: Checkpoints | None,
    found: Found | None,
    first_params: Callable[[TrainingProgram], Any],
    *,
    seed: int,
    console: Console,
) -> TrainState:
    """The state to go on from: a checkpoint's, or a fresh one, perhaps with given weights.

    Args:
        first_params: makes the parameters of a fresh one; None draws them. Frozen ones are made
            so in any case: checkpoints do not hold them.

    Raises:
        RunError: frozen parameters are others than those of the checkpoint's run.
    """
    if checkpoints is None or found is None:
        return program.fresh_state(first_params(program), seed=seed)
    started = time.perf_counter()
    state = checkpoints.restore(found, program.targets())
    seconds = time.perf_counter() - started
    console.print(f"resuming after step {found.step}, restored in {seconds:.1f} s")
    if program.frozen.patterns:
        kept = program.fresh_params(first_params(program), seed=seed)
        ours, saved = program.frozen.sums(kept), found.meta.get("frozen", (0.0, 0.0))
        if abs(ours[0] - saved[0]) > 1e-4 * saved[1]:
            raise RunError(
                "the frozen parameters, which checkpoints do not hold, are others than those of "
                "the run that saved: start from the same weights and seed as it did"
            )
        params = program.frozen.merge(state.params, program.frozen.split(kept)[1])
        state = dataclasses.replace(state, params=params)
    if state.opt_state is None:
        console.print("the checkpoint holds weights alone: the optimizer starts anew")
        return program.fresh_state(state.params, found.step)
    return state
