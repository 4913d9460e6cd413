"""Job files: as reviewed (golden), of known fields and options, and quoted so that they run."""

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmd.mesh.topology import Topology, slices_of
from spmd.scripts import launch_job
from spmd.scripts.jobs.tpu import KINDS, parse_tpu

HARD = ["prog", "a b", "it's", 'say "hi"', "$HOME", "`x`", "$(y)", "back\\slash", "*", "", "é;&|"]
"""Arguments that a shell would take apart."""

TRAIN = ["python", "scripts/train_llama.py", "--model=llama2-7b", "--data=/corpus/a b/*.txt"]

DRY_RUNS: dict[str, list[str]] = {
    "slurm": ["slurm", "--nodes=4", "--gpus_per_node=8", "--time=8:00:00", "--partition=h200",
              "--account=lab", "--requeue", "--exclusive", "--env=NOTE=it's new",
              "--folder=/home/me/spmd"],
    "slurm_each_gpu": ["slurm", "--nodes=2", "--gpus_per_node=4", "--processes_per_node=4",
                       "--cpus_per_process=8", "--image=registry/image:tag",
                       "--constraint=nvlink", "--qos=high", "--name=llama"],
    "jobset_tpu": ["jobset", "--tpu=v5p-128", "--slices=2", "--image=registry/image:tag",
                   "--name=llama", "--max_restarts=3", "--queue=tpus", "--namespace=training",
                   "--selector=cloud.google.com/reservation-name=mine"],
    "jobset_gpu": ["jobset", "--nodes=4", "--gpus_per_node=8", "--image=registry/image:tag",
                   "--cpu=96", "--memory=800Gi", "--env=NOTE=a $(b)", "--folder=/spmd",
                   "--service_account=trainer", "--spot", "--bucket=corpus=/corpus:ro",
                   "--claim=runs=/runs", "--secret=hub-token=/secrets/hub",
                   "--volume=nas:/models=/models:ro", "--volume=/scratch=/scratch"],
    "tpu_vm": ["tpu-vm", "--tpu-name=pod", "--zone=us-east5-a", "--project=mine",
               "--folder=my spmd", "--env=NOTE=it's new"],
}  # fmt: skip

SERVE = ["scripts/serve", "/bundles/llama", "--mesh=data=2,model=8", "--host=0.0.0.0"]

SERVING: dict[str, list[str]] = {
    "jobset_serving": ["jobset", "--tpu=v5e-16", "--image=registry/image:tag", "--name=llama",
                       "--max_restarts=10", "--http_port=8000", "--claim=bundles=/bundles:ro",
                       "--claim=cache=/home/spmd/.cache", "--namespace=serving"],
    "slurm_serving": ["slurm", "--nodes=2", "--gpus_per_node=8", "--max_restarts=10", "--requeue"],
    "tpu_vm_serving": ["tpu-vm", "--tpu-name=pod", "--zone=us-east5-a", "--max_restarts=10"],
}  # fmt: skip


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(flags: Sequence[str], command: Sequence[str] = TRAIN) -> str:
        assert launch_job.main([*flags, "--dry-run", "--", *command]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", [*DRY_RUNS, *SERVING])
def test_golden(name: str, dry_run: Callable[..., str], golden: Callable[[str, str], None]):
    golden(f"launch/{name}", job_file(name, dry_run))


def job_file(name: str, dry_run: Callable[..., str]) -> str:
    """What is handed over for one of the jobs above."""
    return dry_run(SERVING[name], SERVE) if name in SERVING else dry_run(DRY_RUNS[name])


# Slurm.

SBATCH_OPTIONS = {
    "account", "chdir", "constraint", "cpus-per-task", "exclusive", "gpus-per-node", "job-name",
    "no-requeue", "nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue",
    "reservation", "signal", "time",
}  # fmt: skip
"""As `man sbatch` spells them."""


@pytest.mark.parametrize("name", [n for n in (*DRY_RUNS, *SERVING) if n.startswith("slurm")])
def test_slurm_scripts_parse(name: str, dry_run: Callable[..., str]):
    script = job_file(name, dry_run)
    parsed = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert parsed.returncode == 0, parsed.stderr
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == options  # sbatch reads none behind the first command
    for line in options:
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)
        assert match and match[1] in SBATCH_OPTIONS, line


def fake(tmp_path: Path, name: str, code: int = 0) -> dict[str, str]:
    """An environment with a program that writes down its arguments and variable NOTE, as JSON."""
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"with open({str(tmp_path / name)!r}, 'a') as file:\n"
        "    print(json.dumps([sys.argv[1:], os.environ.get('NOTE')]), file=file)\n"
        f"sys.exit({code})\n"
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


def called(tmp_path: Path, name: str) -> list[Any]:
    return json.loads((tmp_path / name).read_text())


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_slurm_runs_the_command_and_requeues(
    code: int, requeued: bool, dry_run: Callable[..., str], tmp_path: Path
):
    script = dry_run(["slurm", "--requeue", "--env", "NOTE=it's $new"], HARD)
    fake(tmp_path, "scontrol")
    env = {**fake(tmp_path, "srun", code), "SLURM_JOB_ID": "42"}
    assert subprocess.run(["bash", "-c", script], env=env).returncode == code
    arguments, note = called(tmp_path, "srun")
    assert arguments[-len(HARD) :] == HARD
    assert note == "it's $new"
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert called(tmp_path, "scontrol")[0] == ["requeue", "42"]


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (75, 1), (76, 3)])
def test_slurm_starts_again_what_failed(
    code: int, starts: int, dry_run: Callable[..., str], tmp_path: Path
):
    script = dry_run(["slurm", "--max_restarts=2"], HARD)
    ran = subprocess.run(["bash", "-c", script], env=fake(tmp_path, "srun", code))
    assert ran.returncode == code
    assert len((tmp_path / "srun").read_text().splitlines()) == starts


# Kubernetes.

FIELDS, SERVICE = yaml.safe_load_all(Path(__file__).with_name("jobset_fields.yaml").read_text())
TYPES = {"text": str, "number": int, "flag": bool}


def misfits(value: Any, fields: Any, path: str = "") -> list[str]:
    """Where a document has a field that does not exist, or one of another type."""
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [m for i, v in enumerate(value) for m in misfits(v, fields[0], f"{path}[{i}]")]
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [f"{path} is no mapping"]
        known = {name: fields.get(name, fields.get("*")) for name in value}
        wrong = [f"{path}.{name} is unknown" for name, of in known.items() if of is None]
        return wrong + [
            m for n, v in value.items() if known[n] for m in misfits(v, known[n], f"{path}.{n}")
        ]
    return [] if type(value) is TYPES[fields] else [f"{path} is {type(value).__name__}"]


LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.mark.parametrize("name", [n for n in (*DRY_RUNS, *SERVING) if n.startswith("jobset")])
def test_jobsets_have_known_fields(name: str, dry_run: Callable[..., str]):
    jobset, *services = yaml.safe_load_all(job_file(name, dry_run))
    assert [misfits(service, SERVICE) for service in services] == [[]] * (name in SERVING)
    assert misfits(jobset, FIELDS) == []
    assert misfits({**jobset, "kind": 1, "x": 1}, FIELDS) == [".x is unknown", ".kind is int"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    names = [jobset["metadata"]["name"], replicated["name"], container["name"]]
    assert all(LABEL.fullmatch(text) for text in names)
    assert job["parallelism"] == job["completions"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # pod failure policies need it
    variables = [variable["name"] for variable in container["env"]] if "env" in container else []
    assert len(variables) == len(set(variables))


def test_probes_ask_process_0_alone(dry_run: Callable[..., str]):
    """Where nothing listens, process 0 is not ready, and the others are."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = ["jobset", "--image=i", "--nodes=2", f"--http_port={port}"]
    jobset, service = yaml.safe_load_all(dry_run(flags, SERVE))
    assert service["spec"]["ports"][0]["targetPort"] == port
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["readinessProbe"]["exec"]["command"]
    codes = [
        subprocess.run(
            command, env={**os.environ, "JOB_COMPLETION_INDEX": str(index)}, stderr=subprocess.PIPE
        ).returncode
        for index in range(2)
    ]
    assert codes == [1, 0]


def test_jobset_commands_survive(dry_run: Callable[..., str]):
    jobset = yaml.safe_load(dry_run(["jobset", "--image=i", "--nodes=2"], HARD))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    # Kubernetes takes "$$(y)" for "$(y)".
    assert [part.replace("$$(", "$(") for part in pod["containers"][0]["command"]] == HARD


# TPU VMs.


def test_tpu_vm_commands_survive_and_start_again(dry_run: Callable[..., str], tmp_path: Path):
    env = fake(tmp_path, "prog", 76)
    flags = ["tpu-vm", "--tpu-name=n", "--zone=z", f"--folder={tmp_path}", "--env=NOTE=it's $new"]
    remote = shlex.split(dry_run([*flags, "--max_restarts=1"], HARD))[-1].removeprefix("--command=")
    assert subprocess.run(["bash", "-c", remote], env=env).returncode == 76
    calls = [json.loads(line) for line in (tmp_path / "prog").read_text().splitlines()]
    assert calls == [[HARD[1:], "it's $new"]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_slices_have_whole_hosts(kind: str):
    for name, topology in slices_of(kind).items():
        slice_ = parse_tpu(name)
        assert f"{kind}:{slice_.topology}" == topology
        assert slice_.hosts * slice_.chips_per_host == Topology(name).count


# Handing over, and bad flags.


def test_hands_the_file_over_where_the_engine_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("PATH", fake(tmp_path, "sbatch", 7)["PATH"])
    assert launch_job.main(["slurm", "--", "true"]) == 7
    assert called(tmp_path, "sbatch")[0] == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch_job.main(["slurm", "--", "true"]) == 2
    assert "error: sbatch is not on this machine\n  fix: run this where" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["slurm", "--nodes=0"], "--nodes must be at least 1"),
        (["slurm", "--time=soon"], "--time 'soon' is not a time"),
        (["slurm", "--partition=a b"], "--partition 'a b' cannot stand in a batch script"),
        (["slurm", "--gpus_per_node=8", "--processes_per_node=3"], "3 processes cannot share 8"),
        (["slurm", "--env=A-B=1"], "'A-B' is no name of an environment variable"),
        (["jobset", "--image=i", "--name=My_Job"], "'My_Job' is no name that Kubernetes takes"),
        (["jobset", "--image=i", "--name=" + "a" * 50], "at most 41 of"),
        (["jobset", "--image=i", "--tpu=v9-8"], "'v9-8' is no slice of TPUs"),
        (["jobset", "--image=i", "--tpu=v5e-12"], "one of v5e-1, v5e-4, v5e-8, v5e-16"),
        (["jobset", "--image=i", "--tpu=v5e-8", "--gpus_per_node=1"], "TPUs or GPUs"),
        (["jobset", "--image=a b"], "'a b' is no container image"),
        (["jobset", "--image=i", "--selector=x"], "'x' is not of the form label=value"),
        (["jobset", "--image=i", "--env=JAX_PROCESS_ID=1"], "JAX_PROCESS_ID is set by the JobSet"),
        (["jobset", "--image=i", "--claim=x"], "--claim 'x' is not of the form NAME=PATH[:ro]"),
        (["jobset", "--image=i", "--bucket=x=y"], "an absolute PATH"),
        (["jobset", "--image=i", "--volume=x=/y"], "'x' is neither /FOLDER nor SERVER:/FOLDER"),
        (["jobset", "--image=i", "--claim=A=/a"], "--claim 'A' is no name that Kubernetes takes"),
        (["jobset", "--image=i", "--claim=a=/a", "--secret=b=/a"], "two volumes are mounted at /a"),
    ],
)
def test_bad_flags(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert launch_job.main([*flags, "--dry-run", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error
