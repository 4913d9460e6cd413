"""Processes on this machine: numbers, prefixes, exit codes, signals, restarts, devices."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from spmd.errors import LaunchError
from spmd.launch import EXIT_PEER_LOST
from spmd.scripts import launch_job
from spmd.scripts.jobs.job import NOT_AGAIN
from spmd.scripts.jobs.local import (
    LocalJob,
    describe_code,
    environment_of_devices,
    run_local,
    with_device_count,
)
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
OUTLIVE = f"sleep {PATIENCE}; echo outlived"


def run(script: str, processes: int = 2, **options) -> int:
    options = {"platform": "cpu", "grace_s": PATIENCE, **options}
    return run_local(LocalJob(("sh", "-c", script), processes, **options))


def test_each_process_knows_its_place(capfd: pytest.CaptureFixture[str]):
    """Its lines begin with its number, those of errors, too."""
    script = 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS" >&2'
    assert run(script, 11) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    address = lines[0].rpartition(" ")[2]
    assert lines == [f"[{p:2}] {p} of 11 at {address}" for p in range(11)]
    assert address.startswith("localhost:")


def test_a_failure_stops_all_and_its_cause_counts(capfd: pytest.CaptureFixture[str]):
    script = f"if [ $JAX_PROCESS_ID = 1 ]; then echo why; exit 3; fi; {OUTLIVE}"
    assert run(script) == 3
    out, said = capfd.readouterr()
    assert "outlived" not in out
    assert "launch: process 1 failed: exit code 3; its last lines:\nlaunch:   why\n" in said
    script = f"if [ $JAX_PROCESS_ID = 0 ]; then exit {EXIT_PEER_LOST}; fi; sleep 0.5; exit 4"
    assert run(script) == 4
    assert "process 1 failed: exit code 4" in capfd.readouterr().err


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    wait = f"until [ -e {tmp_path}/trapped ]; do sleep 0.05; done"
    trap = f'trap "" TERM; touch {tmp_path}/trapped; {OUTLIVE}'
    assert run(f"if [ $JAX_PROCESS_ID = 0 ]; then {wait}; exit 5; fi; {trap}", grace_s=0.5) == 5
    assert "outlived" not in capfd.readouterr().out


def test_restarts_until_it_works_or_so_often(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run("echo attempt $SPMD_RESTART; exit $((6 - 3 * SPMD_RESTART))", 1, max_restarts=3) == 0
    captured = capfd.readouterr()
    assert captured.out.splitlines() == [f"[0] attempt {n}" for n in range(3)]
    assert "restart 2 of 3" in captured.err
    assert run("exit 9", 1, max_restarts=1) == 9


@pytest.mark.parametrize("code", NOT_AGAIN)
def test_what_cannot_work_is_not_tried_again(code: int, capfd: pytest.CaptureFixture[str]):
    assert run(f"echo attempt $SPMD_RESTART of $SPMD_MAX_RESTARTS; exit {code}", 1, max_restarts=3)
    out, said = capfd.readouterr()
    assert out == "[0] attempt 0 of 3\n"
    assert said.count("it is not started again: it would end in the same way") == 1


def test_who_was_killed_is_told_to_the_others(capfd: pytest.CaptureFixture[str]):
    """By a pipe: one that hangs with it in a collective has no other way to know."""
    listen = "import os, time; from spmd.launch.restart import hear_news; "
    listen += "hear_news(lambda news: (print('heard:', news, flush=True), os._exit(0))); "
    listen += f"time.sleep({PATIENCE})"
    script = "if [ $JAX_PROCESS_ID = 1 ]; then kill -9 $$; fi; "
    script += f"trap '' TERM; exec {sys.executable} -c \"{listen}\""
    assert run(script) == 137
    heard = "[0] heard: process 1 was lost: killed by SIGKILL (exit code 137)\n"
    assert heard in capfd.readouterr().out


@pytest.mark.thorough
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path):
    """Not even what a process has started, or what ignores SIGTERM."""
    script = f"echo $$ > {tmp_path}/$JAX_PROCESS_ID; [ $JAX_PROCESS_ID = 1 ] && trap '' TERM; "
    script += f"while sleep 0.1; do date > {tmp_path}/lives$JAX_PROCESS_ID; done"
    flags = ["--processes", "2", "--platform", "cpu", "--grace_s", "0.5", "--", "sh", "-c", script]
    command = [sys.executable, "-m", "scripts.launch_job", "local", *flags]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "lives0").exists() and (tmp_path / "lives1").exists())
    launcher.kill()
    launcher.wait()

    def is_gone(pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return False
        return True

    for process in range(2):
        pid = int((tmp_path / str(process)).read_text())
        wait_until(functools.partial(is_gone, pid))


def test_variables_are_passed(capfd: pytest.CaptureFixture[str]):
    assert run('echo "<$A>"', 1, env={"A": "x  'y'"}) == 0
    assert capfd.readouterr().out == "[0] <x  'y'>\n"


@pytest.mark.parametrize(
    ("trap", "number", "code"),
    [
        ("exit 75", signal.SIGTERM, 75),  # it saved its state
        ("exit 0", signal.SIGINT, 0),
        (None, signal.SIGTERM, 143),
    ],
)
def test_signals_are_passed_on(trap: str | None, number: int, code: int, tmp_path: Path):
    handler = f"trap '{trap}' {signal.Signals(number).name[3:]}; " if trap else ""
    script = f"{handler}touch {tmp_path}/$JAX_PROCESS_ID; while true; do sleep 0.05; done"

    def send() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    assert run(script, max_restarts=2) == code
    sender.join()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "2"], "there is no command to run"),
        (["--processes", "2", "--", "no-such-program"], "'no-such-program' is no program"),
        (["--processes", "0", "--", "true"], "--processes must be at least 1, not 0"),
        (["--processes", "1", "--env", "NOT_SET_HERE", "--", "true"], "is not set here"),
    ],
)
def test_bad_flags_are_one_message(arguments: Sequence[str], says: str, capsys):
    assert launch_job.main(["local", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error


# Devices.


def devices(job: LocalJob, env: dict[str, str], gpus: int) -> list[dict[str, str]]:
    return environment_of_devices(job, env, [str(g) for g in range(gpus)])


JOB = ("true",)


def test_devices_are_divided():
    env = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8"}
    wanted = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=4",
    }
    assert devices(LocalJob(JOB, 2, 4), env, 0) == [wanted, wanted]
    assert devices(LocalJob(JOB, 2, 4, "cpu"), env, 8) == [wanted, wanted]
    assert with_device_count("", 2) == "--xla_force_host_platform_device_count=2"
    got = devices(LocalJob(JOB, 2), {}, 8)
    assert [d["CUDA_VISIBLE_DEVICES"] for d in got] == ["0,1,2,3", "4,5,6,7"]
    got = devices(LocalJob(JOB, 2, 1), {}, 8)
    assert [d["CUDA_VISIBLE_DEVICES"] for d in got] == ["0", "1"]
    assert devices(LocalJob(JOB, 1), {"JAX_PLATFORMS": "cpu"}, 8) == [{"JAX_PLATFORMS": "cpu"}]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (LocalJob(JOB, 4, 2, "cuda"), "4 processes with 2 GPUs each need 8 GPUs"),
        (LocalJob(JOB, 8, None, "cuda"), "8 processes with 1 GPUs each need 8 GPUs"),
        (LocalJob(JOB, 3, None, "cuda"), "4 GPUs do not divide over 3 processes"),
    ],
)
def test_too_few_gpus(job: LocalJob, says: str):
    with pytest.raises(LaunchError, match=says):
        devices(job, {}, 4)


def test_words_of_exit_codes():
    assert describe_code(3) == "exit code 3"
    assert describe_code(139) == "killed by SIGSEGV (exit code 139)"
    assert describe_code(250) == "exit code 250"
