import ctypes
import dataclasses
import io
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from spmd.models.llama.named import CONFIGS
from spmd.models.training.errors import RunError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.paths import StorePath
from spmd.models.training.run.description import RunConfig, RunFolder, check_same_model
from spmd.models.training.run.optimizer import OptimizerConfig
from spmd.models.training.run.profile import ProfileRange
from spmd.models.training.run.start import held, restart_note
from spmd.models.training.run.stop import StopSignals
from tests.waiting import wait_until

RUN = RunConfig(
    model=CONFIGS["tiny"],
    optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
    options=TrainerOptions(steps=100, profile=ProfileRange(2, 3), run_dir=Path("runs/a")),
    mesh={"data": 4, "model": 2},
    seq_len=16,
    global_batch=16,
    data=("a.txt",),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len must be positive, not 0"),
        ({"z_loss": -1.0}, "z_loss must be at least 0, not -1.0"),
        *(
            ({"model": dataclasses.replace(RUN.model, **{name: "float16"})}, f"^{name}: .*float16")
            for name in ("dtype", "param_dtype")
        ),
        ({"global_batch": 6}, "6 sequences do not divide over data=4; the next that do are 8"),
        (
            {"options": TrainerOptions(steps=1, microbatches=3)},
            "over data=4 times 3 microbatches; the next that do are 24",
        ),
    ],
)
def test_bad_runs(changes, message):
    with pytest.raises(RunError, match=message):
        dataclasses.replace(RUN, **changes)


def test_config_json_and_a_folder_that_cannot_be_made(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.make()
    folder.write_config(RUN)
    read = json.loads(folder.config.read_text())
    assert read == RUN.to_json()
    assert read["model"]["hidden_size"] == 32
    assert read["profile"] == {"first": 2, "last": 3}
    assert (read["steps"], read["optimizer"]["total_steps"]) == (100, 100)
    assert read["run_dir"] == "runs/a"
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"run_dir: .* cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").make()


# A checkpoint's config and this run's

OLD_CONFIG = {
    "optimizer": {
        "name": "adamw", "total_steps": 100, "learning_rate": 1e-3, "warmup_steps": None,
        "schedule": "cosine", "final_fraction": 0.1, "decay_fraction": 0.1, "beta1": 0.9,
        "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 1.0,
    },
    "mesh": {"data": 4, "model": 2}, "seq_len": 16, "global_batch": 16, "dcn": {}, "sharding": "2d",
    "microbatches": 1, "z_loss": 0.0, "on_nonfinite": "stop", "max_skipped": 10, "eval_every": 0,
    "eval_batches": 8, "save_every": 0, "keep_last": 3, "keep_every": 0, "log_every": 0,
    "profile": {"first": 2, "last": 3}, "seed": 0, "data": ["a.txt"], "tokenizer": "bytes",
    "packing": "none",
}  # fmt: skip
"""As runs wrote it before their options had a class of their own, but for the model."""


def other(model=None, optimizer=None, options=None, **changes):
    return dataclasses.replace(
        RUN,
        model=dataclasses.replace(RUN.model, **(model or {})),
        optimizer=dataclasses.replace(RUN.optimizer, **(optimizer or {})),
        options=dataclasses.replace(RUN.options, **(options or {})),
        **changes,
    )


def test_neither_how_it_is_run_nor_fields_that_a_checkpoint_does_not_know_matter():
    moved = other(
        model={"scan_layers": False, "remat": "full"},
        mesh={"data": 8},
        options={"save_every": 3, "run_dir": "runs/b", "resume": 12},
    )
    assert check_same_model(RUN.to_json(), moved) == []
    saved = RUN.to_json()
    del saved["model"]["remat_every"], saved["z_loss"]
    assert check_same_model(saved, RUN) == []


@pytest.mark.parametrize("saved", [RUN.to_json(), {"model": RUN.to_json()["model"], **OLD_CONFIG}])
def test_what_differs_is_told_or_refused(saved):
    assert check_same_model(saved, RUN) == []
    changed = other(options={"steps": 200, "seed": 1}, seq_len=32, global_batch=32)
    assert sorted(check_same_model(saved, changed)) == [
        "global_batch: 16 -> 32",
        "optimizer.total_steps: 100 -> 200",
        "seed: 0 -> 1",
        "seq_len: 16 -> 32",
    ]
    says = (
        r"model\.hidden_size is 32 there and 64 here, optimizer\.name is 'adamw' there and "
        r"'adafactor' here; use its values or start anew"
    )
    with pytest.raises(RunError, match=says):
        check_same_model(saved, other(model={"hidden_size": 64}, optimizer={"name": "adafactor"}))


def test_processes_make_their_folder_together(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: folder.make(), range(400)))
    assert list(folder.path.iterdir()) == []


# Signals


def test_sigterm_asks_to_stop(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert not stop.is_requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_requested(2)
        assert stop.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == before
    assert "SIGTERM: stopping after this step" in capfd.readouterr().err


def test_sigterm_is_answered_while_the_main_thread_is_in_c(capfd):
    """As while XLA compiles: no handler of Python runs, and yet it is said at once."""
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a mutex that is free
    said = io.StringIO()

    def block() -> None:
        libc.pthread_mutex_lock(lock)  # until `send` unlocks it

    def send() -> None:
        main = threading.main_thread().ident or 0
        wait_until(lambda: sys._current_frames()[main].f_code is block.__code__)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: said.write(capfd.readouterr().err) >= 0 and "SIGTERM" in said.getvalue())
        libc.pthread_mutex_unlock(lock)

    with StopSignals(lambda: "compiling") as stop:
        libc.pthread_mutex_lock(lock)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send)
            block()
            sent.result()
        assert stop.is_requested(0)
    assert "SIGTERM while compiling: stopping when that is done" in said.getvalue()


def test_the_second_sigint_interrupts():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_requested(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


LOCKS = {"disk": ".lock", "disk without locks": ".lock-beats", "store": ".lock"}


@pytest.mark.parametrize("where", LOCKS)
def test_a_folder_is_one_jobs(where, tmp_path: Path, monkeypatch):
    """A second one by mistake would write over what the first one saves."""
    folder = StorePath("memory://a/run") if where == "store" else tmp_path
    stopped, lock = Mock(), folder / LOCKS[where]
    monkeypatch.setattr("spmd.models.training.run.start.BEAT_S", 0.1)
    if where == "disk without locks":
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError))
    lock.write_text("pid 1 on another, beat 7 0.0")  # of a job that was killed
    with held(folder):
        who = rf"trains in .* now, pid {os.getpid()} on [^,]+; wait"
        with pytest.raises(RunError, match=who), held(folder):
            pass
        if where != "disk":
            monkeypatch.setattr("os.kill", stopped)
            lock.write_text("pid 1 on another, beat 7 1.0")  # it was not killed, but slept
            wait_until(lambda: stopped.called)
    assert lock.read_text().startswith(f"pid {os.getpid()}" if where == "disk" else "pid 1 on")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "begin anew; to go on, give --run_dir, --save_every and --resume"),
        ({"run_dir": Path("a")}, "find this run in run_dir, and end; to go on"),
        ({"run_dir": Path("a"), "resume": "auto"}, ""),
    ],
)
def test_a_restart_that_would_not_go_on_is_said_once(options: dict, says: str, monkeypatch):
    given = TrainerOptions(steps=9, **{"resume": None, **options})
    assert restart_note(given) == ""
    monkeypatch.setenv("SPMD_MAX_RESTARTS", "2")
    note = restart_note(given)
    assert (says in note) if says else note == ""
    monkeypatch.setenv("SPMD_RESTART", "1")
    assert restart_note(given) == ""
