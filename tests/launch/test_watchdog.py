"""The watchdog of one process: what it writes, when, and when not."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd.launch import EXIT_HUNG, Watchdog

ROOT = Path(__file__).parents[2]


def wait_for(path: Path, text: str) -> str:
    for _ in range(200):
        found = path.read_text() if path.exists() else ""
        if text in found:
            return found
        time.sleep(0.05)
    pytest.fail(f"{path} never said {text!r}; it says {found!r}")


def test_progress_leaves_nothing(tmp_path: Path):
    with Watchdog(5, tmp_path) as dog:
        for step in range(3):
            dog.beat(step=step)
    assert list(tmp_path.iterdir()) == []


def test_writes_stacks_and_marks(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def waits_for_ever(end: threading.Event) -> None:
        end.wait()

    end = threading.Event()
    thread = threading.Thread(target=waits_for_ever, args=(end,))
    thread.start()
    with Watchdog(0.2, tmp_path / "new" / "folder", stop=False) as dog:
        dog.beat(step=7)
        dog.beat(what="checkpoint")
        text = wait_for(dog.path, "waits_for_ever")
        assert "(last finished: checkpoint, step 7)" in text
        assert "step 7  step finished" in text
        assert "test_writes_stacks_and_marks" in text
        dog.beat(step=8)
        wait_for(dog.path, "step 8  step finished")  # it went on waiting, and hung again
    end.set()
    thread.join()
    assert f"stacks are in {dog.path}" in capfd.readouterr().err


def test_the_first_beat_may_take_longer(tmp_path: Path):
    with Watchdog(0.05, tmp_path, first_timeout_s=30):
        time.sleep(0.3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limits", [(0, None), (-1, None), (1, 0)])
def test_bad_limits(limits: tuple, tmp_path: Path):
    with pytest.raises(ValueError, match="positive"):
        Watchdog(limits[0], tmp_path, first_timeout_s=limits[1])


@pytest.mark.parametrize(
    ("hang", "code"),
    [
        ("time.sleep(30)", EXIT_HUNG),
        # A call into C that keeps the interpreter's lock: nothing of Python runs any more.
        ("ctypes.PyDLL(None).sleep(8)", None),
    ],
)
def test_a_hang_in_c(hang: str, code: int | None, tmp_path: Path):
    program = (
        "import ctypes, time\n"
        "from spmd.launch import Watchdog\n"
        f"with Watchdog(1, {str(tmp_path)!r}) as dog:\n"
        "    dog.beat(step=1)\n"
        f"    {hang}\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        text = wait_for(tmp_path / "process-0.txt", "<module>")
        assert "line 5 in <module>" in text
        if code is not None:
            assert started.wait(timeout=30) == code
            assert "made no progress" in (started.stderr.read() if started.stderr else "")
    finally:
        started.kill()
        started.communicate()
