import contextlib
import errno
import io
import json
import os
import struct
import sys
import threading
from typing import Any, cast

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from spmd.models.training.run.background import Background
from spmd.models.training.run.sinks import Forgiving, JsonLines, TensorBoard, Terminal
from tests.forked import run_text
from tests.models.training.notes import Notes
from tests.waiting import wait_until

STEP = {"loss": 2.5, "grad_norm": 1.0, "tokens_per_s": 100.0, "seconds": 0.5, "mfu_causal": 0.5}


def events(folder):
    """(tag, step, value) of every scalar in TensorBoard's files, and the steps of purges."""
    found, purges = [], []
    for path in sorted(folder.glob("events*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status:
                purges.append(event.step)
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found, purges


def test_tensorboard_files_can_be_read_and_forget_what_comes_again(tmp_path):
    with contextlib.closing(TensorBoard(tmp_path)) as sink:
        sink.write({"step": 3, **STEP, "error": "text is left out"})
        sink.write({"step": 3, "eval_loss": 2.0})
    found, _ = events(tmp_path)
    assert ("train/loss", 3, 2.5) in found
    assert ("mfu/causal", 3, 0.5) in found
    assert ("eval/loss", 3, 2.0) in found
    assert len(found) == len(STEP) + 1
    TensorBoard(tmp_path, after=7).close()
    assert events(tmp_path)[1] == [8]


def of_lines(path, key):
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def test_json_lines_are_appended_and_have_no_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for value in (1.0, float("nan")):
        sink = JsonLines(path)
        sink.write({"step": 1, "loss": value})
        sink.close()
    assert of_lines(path, "loss") == [1.0, None]


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "eval_loss": 1}\n{"st', [1, 2, 2, 3]),
        ('{"step": 1}\n{"step": 2}', [1, 2, 3]),  # killed before the end of the line
    ],
)
def test_json_lines_of_steps_that_come_again_are_dropped(before, steps, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    sink = JsonLines(path, after=2)
    sink.write({"step": 3})
    sink.close()
    assert of_lines(path, "step") == steps


# A disk that takes nothing

BACKGROUND = "spmd.models.training.run.background"


class Disk(Notes):
    """A sink that fails or hangs as long as it is told to."""

    def __init__(self):
        super().__init__()
        self.is_full, self.is_open = True, threading.Event()

    def write(self, record):
        self.is_open.wait()
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(record)


def test_records_wait_for_a_full_disk(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    disk = Disk()
    disk.is_open.set()
    monkeypatch.setattr(f"{BACKGROUND}.RETRY_S", 0.01)
    sink = Background("metrics", lambda: disk)
    for step in range(3):
        sink.write({"step": step})
    wait_until(lambda: "records wait\n" in said.getvalue())
    sink.flush()  # does not wait for what cannot be
    disk.is_full = False
    wait_until(lambda: [record["step"] for record in disk] == [0, 1, 2])
    sink.close()
    assert said.getvalue() == (
        "metrics: No space left on device; training goes on, and records wait\n"
        "metrics: written again\n"
    )


def test_a_disk_that_hangs_delays_nothing(capfd, monkeypatch):
    monkeypatch.setattr(f"{BACKGROUND}.CLOSE_S", 0.1)
    monkeypatch.setattr(f"{BACKGROUND}.KEPT", 5)
    disk = Disk()
    sink = Background("metrics", lambda: disk)
    for step in range(100):
        sink.write({"step": step})
    sink.close()
    assert "metrics: 100 records were lost (the disk is too slow)" in capfd.readouterr().err
    disk.is_full = False
    disk.is_open.set()


def test_flushed_records_are_written_and_what_never_is_is_counted(capfd, tmp_path, monkeypatch):
    disk = Disk()
    disk.is_open.set()
    for name, value in {"KEPT": 5, "RETRY_S": 60}.items():
        monkeypatch.setattr(f"{BACKGROUND}.{name}", value)
    sink = Background("metrics", lambda: disk)
    for step in range(8):
        sink.write({"step": step})
    sink.close()
    assert "8 records were lost (No space left on device)" in capfd.readouterr().err
    monkeypatch.undo()
    path = tmp_path / "metrics.jsonl"
    sink = Background("metrics", lambda: JsonLines(path))
    for step in range(1000):
        sink.write({"step": step})
    sink.flush()
    assert len(path.read_text().splitlines()) == 1000
    sink.close()


def test_output_on_a_full_disk_is_lost_and_nothing_else(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self):
            self.write("")

    monkeypatch.setattr(sys, "stdout", Full())
    Console(file=cast(Any, Forgiving())).print("step 1")
    Terminal(Console(file=sys.stdout), steps=1).write({"step": 1, **STEP})


@pytest.mark.parametrize("kind", [JsonLines, TensorBoard])
def test_of_a_record_that_does_not_fit_nothing_is_left(kind, tmp_path):
    """A file that may not grow is as good as a full disk: a process of its own has the limit."""
    program = (
        "import resource, signal, sys, pathlib\n"
        f"from spmd.models.training.run.sinks import {kind.__name__} as Kind\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "sink = Kind(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))\n"
        "failed = 0\n"
        "for step in range(20):\n"
        "    try: sink.write({'step': step, 'loss': 1.0})\n"
        "    except OSError: failed += 1\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "sink.write({'step': 20, 'loss': 1.0})\n"
        "print(20 - failed)\n"
    )
    path = tmp_path / "metrics"
    code, said = run_text(program, [path], tmp_path)
    assert code == 0, said
    fitted = int(said)
    assert 0 < fitted < 20
    if kind is JsonLines:
        steps = of_lines(path, "step")
    else:
        steps = [step for _, step, _ in events(path)[0]]
    assert steps == [*range(fitted), 20]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_of_progress(is_terminal):
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=is_terminal)
    with contextlib.closing(Terminal(console, steps=5, log_every=2)) as sink:
        for step in range(1, 6):
            sink.write({"step": step, **STEP, "skipped": float(step == 3)})
        sink.write({"step": 5, "eval_loss": 2.0})
        sink.write({"step": 4, "save_seconds": 2.0, "save_stall_seconds": 0.05})
        sink.write({"step": 5, "error": "no space"})
    lines = [line for line in text.getvalue().splitlines() if "step " in line]
    shown = [line[line.index("step ") :].split()[1] for line in lines]
    assert shown == ["1/5", "2/5", "3/5", "4/5", "5/5", "5/5", "4/5", "5/5"]
    assert "MFU 50.0% (causal)" in lines[0]
    assert "not finite: skipped" in lines[2]
    assert "checkpoint saved in 2.0 s, training waited 0.05 s" in lines[6]
