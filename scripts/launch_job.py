r"""Starts a program as several processes of one job: on this machine, or by an engine.

The program calls `spmd.initialize()` first and is otherwise the same everywhere. Engines are
Slurm (`sbatch`), Kubernetes (a JobSet, `kubectl`) and TPU VMs (`gcloud`); `--dry_run` prints what
would be handed to them.

Examples:
    scripts/launch local --processes 2 --devices_per_process 4 -- \
        python scripts/train_llama.py --mesh data=4,model=2
    scripts/launch local --processes 8 --max_restarts 3 -- \
        python scripts/train_llama.py --mesh data=8
    scripts/launch slurm --nodes 4 --gpus_per_node 8 --time 8:00:00 --partition h200 --requeue -- \
        python scripts/train_llama.py --model llama2-7b --mesh data=32
    scripts/launch jobset --tpu v5e-16 --image registry/image:tag --name llama --dry_run -- \
        python scripts/train_llama.py --mesh data=16
    scripts/launch jobset --nodes 4 --gpus_per_node 8 --spot --image registry/image:tag \
        --bucket corpus=/corpus:ro --claim runs=/runs --secret hub-token=/secrets/hub \
        --volume nas:/models=/models:ro -- python scripts/train_llama.py --run_dir /runs/a --resume
    scripts/launch tpu-vm --tpu_name my-pod --zone us-east5-a --folder spmd -- \
        .venv/bin/python scripts/train_llama.py --mesh data=16
    scripts/launch local --processes 2 --devices_per_process 4 --max_restarts 3 --grace_s 60 -- \
        scripts/serve llama-70b --mesh data=1,model=8
    scripts/launch slurm --nodes 2 --gpus_per_node 8 --max_restarts 10 --requeue -- \
        scripts/serve llama-70b --mesh data=1,model=16 --host 0.0.0.0
    scripts/launch jobset --tpu v5e-16 --image registry/image:tag --name llama --max_restarts 10 \
        --http_port 8000 --claim bundles=/bundles:ro --claim cache=/home/spmd/.cache -- \
        scripts/serve /bundles/llama --mesh data=2,model=8 --host 0.0.0.0

Exit code of `local`: that of the process that failed first, 128 + n if signal n killed it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from spmd.cli.flags import Add, Parser, Switch
from spmd.errors import LaunchError
from spmd.models.fields import of_fields, taken
from spmd.scripts.jobs.job import Job, parse_env
from spmd.scripts.jobs.jobset import KINDS, JobSet, Volume, jobset_yaml
from spmd.scripts.jobs.local import LocalJob, run_local
from spmd.scripts.jobs.slurm import AS_SBATCH, Slurm, slurm_script
from spmd.scripts.jobs.tpu import parse_tpu, tpu_vm_command

T = TypeVar("T")
Handler = Callable[[argparse.Namespace, tuple[str, ...]], int]


def make_parser() -> Parser:
    """All flags."""
    parser = Parser("scripts/launch", __doc__)
    engines = parser.add_subparsers(dest="engine", required=True, metavar="ENGINE")

    def engine(name: str, says: str, handler: Handler) -> Add:
        usage = f"{parser.prog} {name} [flags] -- command ..."
        added = engines.add_parser(name, help=says, about=says, usage=usage)
        added.set_defaults(handler=handler)
        added.add_argument(
            "--env",
            action="append",
            default=[],
            metavar="NAME[=VALUE]",
            help="a variable of every process; without a value, the one set here (repeatable)",
        )
        return added.add_argument

    _add_local(
        engine(
            "local",
            "processes on this machine",
            lambda *given: run_local(_of_flags(LocalJob, *given)),
        )
    )
    _add_slurm(engine("slurm", "a batch job of Slurm's", launch_slurm))
    _add_jobset(engine("jobset", "a JobSet on Kubernetes", launch_jobset))
    _add_tpu_vm(engine("tpu-vm", "all hosts of a TPU VM, by gcloud", launch_tpu_vm))
    return parser


def _add_local(add: Add) -> None:
    of_job = of_fields(add, LocalJob)
    of_job("--processes", required=True, metavar="N", help="how many")
    of_job(
        "--devices_per_process",
        metavar="N",
        help="virtual CPU devices, or GPUs, of each; GPUs are divided evenly if left out",
    )
    of_job("--platform", choices=("cpu", "cuda"), help="(default: GPUs where there are some)")
    _add_restarts(add)
    what = "time between asking a process to end and killing it"
    of_job("--grace_s", metavar="SECONDS", help=what)


def _add_common(add: Add, *, nodes: bool = True) -> None:
    of_job = of_fields(add, Job)
    add("--dry_run", action=Switch, help="print it, start nothing")
    of_job("--folder", help="where the command runs")
    if not nodes:
        return
    of_job("--name", help="the job's name")
    of_job("--nodes", metavar="N", help="machines")
    of_job("--gpus_per_node", metavar="N", help="GPUs of each")
    of_job("--processes_per_node", metavar="N", help="1, or one for each GPU")
    of_job("--port", help="where process 0 listens")


def _add_slurm(add: Add) -> None:
    _add_common(add)
    of_slurm = of_fields(add, Slurm)
    for name in AS_SBATCH:
        of_slurm(f"--{name}", help="as sbatch's")
    of_slurm("--cpus_per_process", metavar="N", help="CPU cores of each process")
    of_slurm("--output", help="file of the output")
    add("--image", help="container image, for srun's container plugin")
    _add_restarts(add)
    of_slurm("--requeue", help="queue again after preemption and saved SIGTERM")
    of_slurm("--exclusive", help="no other job on its nodes")
    of_slurm("--warn_s", metavar="SECONDS", help="SIGTERM before the time's end")


def _add_jobset(add: Add) -> None:
    _add_common(add)
    of_jobset = of_fields(add, JobSet)
    of_jobset("--image", required=True, help="container image")
    add("--tpu", metavar="KIND-SIZE", help="a slice of TPUs, as v5e-16; sets the number of nodes")
    of_jobset("--slices", metavar="N", help="how many of them")
    of_jobset("--namespace")
    of_jobset("--max_restarts", metavar="N", help="make it anew after failures")
    of_jobset("--grace_s", metavar="SECONDS", help="from SIGTERM to SIGKILL")
    of_jobset("--cpu", help="request of each pod, as 8")
    of_jobset("--memory", help="request of each pod, as 64Gi")
    add("--selector", action="append", default=[], metavar="LABEL=VALUE", help="of nodes")
    of_jobset("--queue", help="a Kueue local queue")
    for kind, what in KINDS.items():
        about = f"{what} (repeatable)"
        add(f"--{kind}", action="append", default=[], metavar="NAME=PATH[:ro]", help=about)
    of_jobset("--spot", help="on spot nodes, which may be taken back")
    serves = "where process 0 serves: adds probes, and a Service for it"
    of_jobset("--http_port", metavar="PORT", help=serves)
    of_jobset("--service_account")


def _add_tpu_vm(add: Add) -> None:
    _add_common(add, nodes=False)
    add("--tpu_name", required=True, help="the TPU VM")
    add("--zone", required=True)
    add("--project")
    _add_restarts(add)


def _add_restarts(add: Add) -> None:
    add("--max_restarts", type=int, default=0, metavar="N", help="start again after a failure")


# Engines.


def launch_slurm(flags: argparse.Namespace, command: tuple[str, ...]) -> int:
    """Writes a batch script and hands it to sbatch."""
    slurm = taken(Slurm, flags, container=flags.image)
    script = slurm_script(_of_flags(Job, flags, command), slurm)
    return hand_over(["sbatch"], flags.dry_run, script)


def launch_jobset(flags: argparse.Namespace, command: tuple[str, ...]) -> int:
    """Writes a JobSet and hands it to kubectl."""
    if wrong := [item for item in flags.selector if not item.partition("=")[2]]:
        raise LaunchError(f"--selector {wrong[0]!r} is not of the form label=value")
    jobset = taken(
        JobSet,
        flags,
        tpu=parse_tpu(flags.tpu) if flags.tpu else None,
        selector=dict(item.split("=", 1) for item in flags.selector),
        volumes=tuple(Volume.parse(kind, text) for kind in KINDS for text in getattr(flags, kind)),
    )
    text = jobset_yaml(_of_flags(Job, flags, command), jobset)
    return hand_over(["kubectl", "create", "-f", "-"], flags.dry_run, text)


def launch_tpu_vm(flags: argparse.Namespace, command: tuple[str, ...]) -> int:
    """Runs the command on every host of a TPU VM."""
    job = _of_flags(Job, flags, command)
    call = tpu_vm_command(job, flags.tpu_name, flags.zone, flags.project, flags.max_restarts)
    return hand_over(call, flags.dry_run)


def _of_flags(cls: type[T], flags: argparse.Namespace, command: tuple[str, ...]) -> T:
    """A job as its flags and its command say it."""
    return taken(cls, flags, command=command, env=parse_env(flags.env, os.environ))


def hand_over(call: Sequence[str], dry_run: bool, text: str | None = None) -> int:
    """Prints what an engine's program would get, or runs it; its exit code.

    Args:
      call: the program and its arguments.
      dry_run: print only: the text, or the call where there is none.
      text: its standard input.

    Raises:
      LaunchError: the program is not here.
    """
    if dry_run:
        print(shlex.join(call) if text is None else text.rstrip("\n"))
        return 0
    if shutil.which(call[0]) is None:
        raise LaunchError(
            f"{call[0]} is not on this machine",
            fix="run this where it is, or print what it would get with --dry_run",
        )
    return subprocess.run(call, input=text, text=True, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Parses flags, runs, and turns what a user can mend into one message."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    flags = make_parser().parse_args(given[:split])
    try:
        return int(flags.handler(flags, tuple(given[split + 1 :])))
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
