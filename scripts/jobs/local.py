"""Several processes on this machine: one job, one output, one exit code.

Each process gets its number, a coordinator and its part of the machine's devices by environment
variables that `spmd.initialize` reads. When one fails, the others are stopped.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from spmd.errors import LaunchError
from spmd.launch import EXIT_PEER_LOST
from spmd.launch.initialize import ENV_COORDINATOR, ENV_PROCESS, ENV_PROCESSES
from spmd.launch.restart import ENV_MAX_RESTARTS, ENV_NEWS, ENV_RESTART, pipe_name
from spmd.scripts.jobs.job import NOT_AGAIN, check_command, check_numbers

LAST_LINES = 20
"""How many of the culprit's last lines are shown again at the end."""

TICK_S = 0.05
CAUSE_S = 2.0
"""How long to wait for the cause, where only processes that lost another one have ended."""

COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class LocalJob:
    """A command to run as several processes of this machine."""

    command: tuple[str, ...]  # the program and its arguments
    processes: int  # how many processes run it
    # devices of each: virtual ones on CPUs, else of this machine's GPUs. All GPUs are divided among
    # the processes if left out.
    devices_per_process: int | None = None
    platform: str | None = None  # `"cpu"`, `"cuda"`, or None for GPUs where there are some
    env: Mapping[str, str] = field(default_factory=dict)  # variables added to those of this process
    max_restarts: int = 0  # how many times a job that failed is started again
    grace_s: float = 30.0  # seconds between asking a process to end and killing it


def run_local(job: LocalJob) -> int:
    """Runs a job to its end, with restarts.

    Returns:
      0 if every process succeeded, else the exit code of the one that failed first; 128 + n where
      signal n ended the job and no process says otherwise.

    Raises:
      LaunchError: the program does not exist, or the devices do not divide.
    """
    check_command(job.command)
    if shutil.which(job.command[0]) is None:
        raise LaunchError(f"{job.command[0]!r} is no program that can be run", fix="correct it")
    check_numbers(job, 1, "processes", "devices_per_process")
    check_numbers(job, 0, "max_restarts", "grace_s")
    devices = environment_of_devices(job, os.environ, _count_gpus())
    with _signals() as received:
        for attempt in range(job.max_restarts + 1):
            if attempt:
                _say(f"restart {attempt} of {job.max_restarts}")
            code = _Run(job, devices, attempt, received).to_the_end()
            if code in NOT_AGAIN and attempt < job.max_restarts:
                _say("it is not started again: it would end in the same way")
            if code in (0, *NOT_AGAIN) or received:
                return code
        return code


# Devices.


def environment_of_devices(
    job: LocalJob, env: Mapping[str, str], gpus: Sequence[str]
) -> list[dict[str, str]]:
    """For each process the variables that give it its devices.

    Args:
      gpus: ids of the GPUs that may be used.

    Raises:
      LaunchError: there are fewer GPUs than asked for, or they do not divide.
    """
    wanted = job.platform or ("cuda" if gpus and env.get("JAX_PLATFORMS") != "cpu" else "cpu")
    if wanted == "cpu":
        one = {"JAX_PLATFORMS": "cpu"}
        if job.devices_per_process is not None:
            one["XLA_FLAGS"] = with_device_count(env.get("XLA_FLAGS", ""), job.devices_per_process)
        return [dict(one) for _ in range(job.processes)]
    each = job.devices_per_process or len(gpus) // job.processes
    if each < 1 or each * job.processes > len(gpus):
        raise LaunchError(
            f"{job.processes} processes with {max(each, 1)} GPUs each need "
            f"{max(each, 1) * job.processes} GPUs",
            actual=f"{len(gpus)} are visible",
            fix="start fewer processes, or use --platform cpu --devices_per_process N",
        )
    if job.devices_per_process is None and len(gpus) % job.processes:
        raise LaunchError(
            f"{len(gpus)} GPUs do not divide over {job.processes} processes",
            fix="say how many each one gets, by --devices_per_process",
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])}
        for i in range(job.processes)
    ]


def with_device_count(flags: str, count: int) -> str:
    """XLA_FLAGS with this many virtual CPU devices; all other flags stay."""
    others = [flag for flag in flags.split() if not flag.startswith(COUNT_FLAG)]
    return " ".join([*others, f"{COUNT_FLAG}={count}"])


def _count_gpus() -> tuple[str, ...]:
    """The ids of this machine's NVIDIA GPUs, or of those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return tuple(re.findall(r"^GPU (\d+):", listed.stdout, re.M))


# One attempt.


class _Run:
    """All processes of one attempt."""

    def __init__(
        self,
        job: LocalJob,
        devices: Sequence[Mapping[str, str]],
        attempt: int,
        received: Sequence[int],
    ) -> None:
        self.job = job
        self.received = received
        self.passed_on = 0
        self.kill_at: float | None = None
        self.last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(job.processes)]
        self.ended: dict[int, int] = {}  # process -> exit code, 128 + n for signal n; in order
        self.printing = threading.Lock()
        common = {
            **os.environ,
            **job.env,
            "PYTHONUNBUFFERED": "1",
            ENV_COORDINATOR: f"localhost:{free_port()}",
            ENV_PROCESSES: str(job.processes),
            ENV_RESTART: str(attempt),
            ENV_MAX_RESTARTS: str(job.max_restarts),
        }
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.news: dict[int, int] = {}  # process -> the end of a pipe that it hears us by
        for process in range(job.processes):
            env = {**common, **devices[process], ENV_PROCESS: str(process)}
            heard, self.news[process] = os.pipe()
            env[ENV_NEWS] = pipe_name(heard)
            self.running[process] = subprocess.Popen(
                job.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a group of its own: Ctrl-C reaches it through us, once
                pass_fds=[heard],
            )
            os.close(heard)
        # A process that ends the others when this one is killed: its input ends then.
        groups = " ".join(f"-{started.pid}" for started in self.running.values())
        script = f"cat; kill -s TERM -- {groups}; sleep {job.grace_s:g}; kill -s KILL -- {groups}"
        self.guard = subprocess.Popen(
            ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.readers = [
            threading.Thread(target=self._read, args=(process, started.stdout), daemon=True)
            for process, started in self.running.items()
        ]
        for reader in self.readers:
            reader.start()

    def to_the_end(self) -> int:
        """The exit code of the job."""
        failed_at: float | None = None
        while self.running:
            for process, started in list(self.running.items()):
                if (code := started.poll()) is not None:
                    del self.running[process]
                    self.ended[process] = code if code >= 0 else 128 - code
            for number in self.received[self.passed_on :]:
                self.passed_on += 1
                self._send(number if self.passed_on == 1 else signal.SIGKILL)
            if (culprit := self._culprit()) is not None and self.kill_at is None:
                failed_at = failed_at or time.monotonic()
                is_cause = self.ended[culprit] != EXIT_PEER_LOST
                if is_cause or time.monotonic() - failed_at > CAUSE_S:
                    self._stop_others(culprit)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self._send(signal.SIGKILL)
            time.sleep(TICK_S)
        for reader in self.readers:
            reader.join(timeout=1.0)  # a grandchild may hold the pipe open
        self.guard.kill()
        self.guard.communicate()
        for news in self.news.values():
            os.close(news)
        culprit = self._culprit()
        if self.received:
            codes = set(self.ended.values())
            said = codes - {0, 128 + self.received[0], 128 + signal.SIGKILL, EXIT_PEER_LOST}
            _say(f"stopped by {signal.Signals(self.received[0]).name}")
            if codes == {0}:
                return 0
            return min(said) if said else 128 + self.received[0]
        if culprit is None:
            return 0
        code = self.ended[culprit]
        _say(f"process {culprit} failed: {describe_code(code)}; its last lines:")
        for line in self.last[culprit]:
            _say(f"  {line}")
        return code

    def _read(self, process: int, lines: IO[str] | None) -> None:
        width = len(str(self.job.processes - 1))
        assert lines is not None
        with lines:
            for line in lines:
                text = line.rstrip("\n")
                self.last[process].append(text)
                with self.printing:
                    print(f"[{process:>{width}}] {text}", flush=True)

    def _culprit(self) -> int | None:
        """The process that failed first; one that only lost another counts if all did."""
        failed = [process for process, code in self.ended.items() if code]
        first = (process for process in failed if self.ended[process] != EXIT_PEER_LOST)
        return next(first, failed[0] if failed else None)

    def _stop_others(self, culprit: int) -> None:
        how = describe_code(self.ended[culprit])
        if self.running:
            then = f"the others get SIGTERM, and SIGKILL {self.job.grace_s:g} s later"
            _say(f"process {culprit} failed: {how}; {then}")
        if self.ended[culprit] > 128:  # it could not say so itself
            text = f"process {culprit} was lost: {how}\n"
            for process in self.running:  # what hangs in a collective with it need not wait
                with contextlib.suppress(OSError):
                    os.write(self.news[process], text.encode())
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.job.grace_s
        for started in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)


def describe_code(code: int) -> str:
    """`exit code 3`, or `killed by SIGKILL (exit code 137)`."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
    return f"exit code {code}"


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list instead of ending this process."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
