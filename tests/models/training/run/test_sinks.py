import io
import json
import struct

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from models.training.run.sinks import JsonLines, Sinks, TensorBoard, Terminal

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


def test_tensorboard_files_can_be_read(tmp_path):
    with Sinks([TensorBoard(tmp_path)]) as (sink,):
        sink.write({"step": 3, **STEP, "error": "text is left out"})
        sink.write({"step": 3, "eval_loss": 2.0})
    found, _ = events(tmp_path)
    assert ("train/loss", 3, 2.5) in found
    assert ("mfu/causal", 3, 0.5) in found
    assert ("eval/loss", 3, 2.0) in found
    assert len(found) == len(STEP) + 1


def test_tensorboard_forgets_what_comes_again(tmp_path):
    TensorBoard(tmp_path, after=7).close()
    assert events(tmp_path)[1] == [8]


def test_json_lines_are_appended_and_have_no_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for value in (1.0, float("nan")):
        sink = JsonLines(path)
        sink.write({"step": 1, "loss": value})
        sink.close()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0, None]


def test_json_lines_of_steps_that_come_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "eval_loss": 1}\n{"st')
    sink = JsonLines(path, after=2)
    sink.write({"step": 3, "loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2, 3]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_of_progress(is_terminal):
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=is_terminal)
    with Sinks([Terminal(console, steps=5, log_every=2)]) as (sink,):
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
