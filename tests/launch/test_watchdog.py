"""The watchdog of one process: what it writes, when, and when not."""

import threading
import time
from pathlib import Path

import pytest

from spmd.launch import EXIT_HUNG, Watchdog
from tests.forked import Forked
from tests.waiting import PATIENCE, wait_until


def wait_for(path: Path, *texts: str) -> None:
    """Until a file says all of this."""

    def said() -> str:
        return path.read_text() if path.exists() else ""

    wait_until(lambda: all(text in said() for text in texts), said)


def test_progress_leaves_nothing(tmp_path: Path):
    with Watchdog(PATIENCE, tmp_path) as dog:
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
        wait_for(
            dog.path,
            "(last finished: checkpoint, step 7)",
            "step 7  step finished",
            "waits_for_ever",
            "test_writes_stacks_and_marks",
        )
        dog.beat(step=8)
        wait_for(dog.path, "step 8  step finished")  # it went on waiting, and hung again
    end.set()
    thread.join()
    assert f"stacks are in {dog.path}" in capfd.readouterr().err


def test_what_was_said_to_take_longer_may(tmp_path: Path):
    """A step that long would be a hang: 0.05 s; compiling and saving may take as long as said."""
    with Watchdog(0.05, tmp_path, first_timeout_s=PATIENCE) as dog:
        time.sleep(0.3)
        with dog.may_take("compiling"):  # ten times as long
            time.sleep(0.3)
            assert dog.doing == "compiling"
        with dog.may_take("evaluating", PATIENCE), dog.may_take("reading", PATIENCE):
            assert dog.doing == "reading"
            time.sleep(0.3)
        assert dog.doing == ""
    assert list(tmp_path.iterdir()) == []


def test_what_takes_longer_than_it_said_is_named_if_it_can_be_written(tmp_path: Path, capfd):
    with Watchdog(PATIENCE, tmp_path, stop=False) as dog, dog.may_take("saving", 0.1):
        wait_for(dog.path, "(saving; nothing was finished yet)")
    (tmp_path / "file").touch()
    with Watchdog(0.1, tmp_path / "file" / "hangs", stop=False):
        wait_until(lambda: "made no progress" in capfd.readouterr().err)


@pytest.mark.parametrize("limits", [(0, None), (-1, None), (1, 0)])
def test_bad_limits(limits: tuple, tmp_path: Path):
    with pytest.raises(ValueError, match="positive"):
        Watchdog(limits[0], tmp_path, first_timeout_s=limits[1])


@pytest.mark.parametrize(
    ("hang", "code"),
    [
        ("time.sleep(600)", EXIT_HUNG),
        # A call into C that keeps the interpreter's lock: nothing of Python runs any more.
        ("libc.sleep(600)", None),
    ],
)
def test_a_hang_in_c(hang: str, code: int | None, tmp_path: Path):
    program = (
        "import ctypes, time\n"
        "from spmd.launch import Watchdog\n"
        "libc = ctypes.PyDLL(None)\n"
        f"with Watchdog(1, {str(tmp_path)!r}, first_timeout_s={PATIENCE}) as dog:\n"
        f"    dog.beat(step=1); {hang}\n"
    )
    (tmp_path / "hang.py").write_text(program)
    started = Forked(tmp_path / "hang.py", [], tmp_path / "said.txt", {})
    try:
        wait_for(tmp_path / "process-0.txt", "line 5 in <module>")
        if code is not None:
            assert started.wait() == code
            assert "made no progress" in started.said
    finally:
        started.kill()
