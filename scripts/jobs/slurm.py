"""Slurm: a batch script for `sbatch`. Processes find each other by Slurm's own variables."""

import re
import shlex
from dataclasses import dataclass

from spmd.errors import LaunchError
from spmd.launch import EXIT_PREEMPTED
from spmd.scripts.jobs.job import Job, exports, restarted

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
PATIENCE_S = 300
"""Seconds after the first process's end in which the others have to end, too."""

_WORD = re.compile(r"[^\s\"'`$\\]+")


AS_SBATCH = ("time", "partition", "account", "qos", "constraint", "reservation")
"""Settings that are options of `sbatch` as they are."""


@dataclass(frozen=True)
class Slurm:
    """Settings that only Slurm needs."""

    time: str | None = None  # limit, as `4:00:00` or `2-12:00:00`; the partition's if left out
    # partition, account, qos, constraint, reservation: as sbatch's options of these names
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    cpus_per_process: int | None = None  # CPU cores of each process
    output: str = "%x-%j.out"  # file of the output; `%j` is the job's number
    container: str | None = None  # image for the container plugin (`srun --container-image`)
    # queue again after preemption: by Slurm, and when a process ends with `EXIT_PREEMPTED` because
    # it saved its state on SIGTERM
    requeue: bool = False
    # how many times a command that failed is started again, on the same nodes
    max_restarts: int = 0
    exclusive: bool = False  # no other job on its nodes
    warn_s: int = 120  # how many seconds before its end the job gets SIGTERM; 0 for not at all


def slurm_script(job: Job, slurm: Slurm) -> str:
    """The batch script.

    Raises:
      LaunchError: a value that cannot stand on an `#SBATCH` line.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _options(job, slurm)), ""]
    lines += ["set -uo pipefail", *_environment(job), ""]
    # Not at the first bad exit: the process that has saved first ends with EXIT_PREEMPTED while the
    # others still save, and where one fails the others stop by themselves and say why.
    flags = ["--kill-on-bad-exit=0", f"--wait={PATIENCE_S}", "--label"]
    if slurm.cpus_per_process is not None:
        flags.append(f"--cpus-per-task={slurm.cpus_per_process}")
    if slurm.container is not None:
        flags.append(f"--container-image={slurm.container}")
        if job.folder is not None:
            flags.append(f"--container-workdir={job.folder}")
    command = " ".join(["srun", *map(shlex.quote, flags), job.shell_command])
    if slurm.max_restarts:
        lines.append(restarted(command, slurm.max_restarts))
    elif slurm.requeue:
        lines += [command, "code=$?"]
    else:
        return "\n".join([*lines, f"exec {command}", ""])
    if slurm.requeue:
        lines += [
            f"if [ $code -eq {EXIT_PREEMPTED} ]; then  # it saved its state on SIGTERM",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, "exit $code", ""])


def _options(job: Job, slurm: Slurm) -> list[str]:
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        raise LaunchError(
            f"--time {slurm.time!r} is not a time of Slurm's",
            fix="give minutes, hours:minutes:seconds or days-hours:minutes:seconds",
        )
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_process,
        **{name: getattr(slurm, name) for name in AS_SBATCH},
        "chdir": job.folder,
        "output": slurm.output,
        "open-mode": "append" if slurm.requeue else None,
        # To the steps, not to the batch script: they save, it decides afterwards.
        "signal": f"TERM@{slurm.warn_s}" if slurm.warn_s else None,
    }
    options = [f"{k}={_word(k, str(v))}" for k, v in given.items() if v is not None]
    if slurm.exclusive:
        options.append("exclusive")
    return [*options, "requeue" if slurm.requeue else "no-requeue"]


def _word(option: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise LaunchError(
            f"--{option} {value!r} cannot stand in a batch script",
            required="no spaces, quotes, $ or backslashes",
            fix="choose another value",
        )
    return value


def _environment(job: Job) -> list[str]:
    env = dict(job.env)
    if job.gpus_per_node and job.processes_per_node == 1:
        # jax gives a Slurm task the one GPU of its local number, unless it is told which are its.
        env.setdefault("JAX_LOCAL_DEVICE_IDS", job.all_gpus)
    return exports(env)
