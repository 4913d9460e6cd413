"""Kubernetes: a JobSet (`jobset.x-k8s.io/v1alpha2`), one Job with one pod for each node.

GKE tells TPU pods their numbers. GPU and CPU pods get their number from their Job's completion
index, and process 0's name from the JobSet's own DNS names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from spmd.errors import LaunchError
from spmd.launch import EXIT_PREEMPTED
from spmd.launch.initialize import ENV_COORDINATOR, ENV_DEVICES, ENV_PROCESS, ENV_PROCESSES
from spmd.scripts.jobs.job import Job, check_dns_label, check_numbers
from spmd.scripts.jobs.tpu import TpuSlice

Kind = Literal["volume", "claim", "bucket", "secret"]
KINDS: dict[Kind, str] = {
    "volume": "a folder of the node (/FOLDER=PATH) or of an NFS server (SERVER:/FOLDER=PATH)",
    "claim": "a persistent volume claim, and where it is mounted",
    "bucket": "a bucket of Cloud Storage, through GKE's FUSE driver",
    "secret": "a secret, whose keys become files",
}
"""Kind -> what its flag mounts."""

READ_ONLY = ":ro"


@dataclass(frozen=True)
class Volume:
    """One thing that is mounted."""

    kind: Kind  # what it is
    source: str  # its name; of a volume the folder, with its server before it on NFS
    path: str  # where it is mounted
    read_only: bool = False  # whether it is mounted for reading alone

    @classmethod
    def parse(cls, kind: Kind, text: str) -> "Volume":
        """Parses `NAME=PATH`, with `:ro` behind it for reading alone.

        Raises:
          LaunchError: not of that form, or a name that Kubernetes does not take.
        """
        source, _, place = text.partition("=")
        path = place.removesuffix(READ_ONLY)
        if not source or not path.startswith("/"):
            raise LaunchError(
                f"--{kind} {text!r} is not of the form NAME=PATH[{READ_ONLY}]",
                required="an absolute PATH",
                fix=f"as in --{kind} {'/data' if kind == 'volume' else 'data'}=/data{READ_ONLY}",
            )
        if kind == "volume" and "/" not in source:
            raise LaunchError(
                f"--volume {text!r}: {source!r} is neither /FOLDER nor SERVER:/FOLDER"
            )
        if kind == "claim":
            check_dns_label("--claim", source)
        return cls(kind, source, path, path != place or kind == "secret")

    @property
    def access(self) -> dict[str, Any]:
        """What says that it is for reading alone, if it is."""
        return {"readOnly": True} if self.read_only else {}

    def source_fields(self) -> dict[str, Any]:
        """Where it comes from."""
        if self.kind == "claim":
            return {"persistentVolumeClaim": {"claimName": self.source, **self.access}}
        if self.kind == "secret":
            return {"secret": {"secretName": self.source}}
        if self.kind == "bucket":
            driver, about = "gcsfuse.csi.storage.gke.io", {"bucketName": self.source}
            return {"csi": {"driver": driver, "volumeAttributes": about, **self.access}}
        server, colon, folder = self.source.partition(":")
        if colon:
            return {"nfs": {"server": server, "path": folder, **self.access}}
        return {"hostPath": {"path": self.source}}


def mounted(volumes: Sequence[Volume]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes of a pod, where its container mounts them).

    Raises:
      LaunchError: two at one path.
    """
    paths = [volume.path for volume in volumes]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise LaunchError(f"two volumes are mounted at {twice[0]}", fix="give each its own path")
    sources, mounts = [], []
    for number, volume in enumerate(volumes):
        name = volume.source if volume.kind == "claim" else f"{volume.kind}-{number}"
        sources.append({"name": name, **volume.source_fields()})
        mounts.append({"name": name, "mountPath": volume.path, **volume.access})
    return sources, mounts


# What Kubernetes has to know of a program that serves HTTP from process 0: probes and a Service.
#
# The pods of a job are alike, but only process 0 listens: the probes of the others always succeed.


PORT_NAME = "http"

STARTUP_SECONDS = 3600
"""Until then a model has to be loaded."""

LEAVING_SECONDS = 10
"""Before SIGTERM: meanwhile process 0 is taken out of the Service, so that nobody is refused."""

_PROBE = (
    "import os, urllib.request as r; "
    "os.environ['JOB_COMPLETION_INDEX'] == os.environ.get('MEGASCALE_SLICE_ID', '0') == '0' "
    "and r.urlopen('http://localhost:{port}{path}', timeout=5)"
)


def container_fields(port: int) -> dict[str, Any]:
    """Fields of the container of every pod."""

    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        return {
            "exec": {"command": ["python3", "-c", _PROBE.format(port=port, path=path)]},
            "periodSeconds": period,
            "timeoutSeconds": 10,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe("/startupz", 10, STARTUP_SECONDS // 10),
        "livenessProbe": probe("/livez", 20, 3),
        "readinessProbe": probe("/readyz", 10, 1),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVING_SECONDS)]}}},
    }


WORKERS = "workers"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SPOT = "cloud.google.com/gke-spot"
"""Label and taint of nodes that may be taken back."""

JOB_LABEL = "jobset.sigs.k8s.io/job-index"


@dataclass(frozen=True)
class JobSet:
    """Settings that only Kubernetes needs."""

    image: str  # the container image
    tpu: TpuSlice | None = None  # the slice that each Job gets; None for GPUs or CPUs
    slices: int = 1  # how many TPU slices
    namespace: str | None = None  # the namespace; the current one if left out
    # how many times a JobSet that failed is made anew; those after a saved SIGTERM
    # (`EXIT_PREEMPTED`) do not count
    max_restarts: int = 0
    grace_s: int = 120  # seconds between SIGTERM and SIGKILL
    # cpu, memory: requests of each pod, as `8` and `64Gi`
    cpu: str | None = None
    memory: str | None = None
    selector: dict[str, str] = field(default_factory=dict)  # further node labels
    queue: str | None = None  # a Kueue local queue
    service_account: str | None = None  # the pods' service account
    volumes: tuple[Volume, ...] = ()  # what the pods mount
    # take nodes that may be taken back; a saved SIGTERM does not count as a restart
    spot: bool = False
    http_port: int | None = None  # where process 0 serves HTTP; None if it does not


def jobset_yaml(job: Job, jobset: JobSet) -> str:
    """The JobSet, and a Service if it serves, to be given to `kubectl create -f -`.

    Raises:
      LaunchError: names that Kubernetes does not take, or resources that do not go together.
    """
    objects = [jobset_object(job, jobset)]
    if jobset.http_port is not None:  # a Service whose only pod is process 0's
        name = {"name": f"{job.name}-{PORT_NAME}", "namespace": jobset.namespace}
        of_first = {JOB_LABEL: "0", INDEX_LABEL: "0"}
        spec = {
            "selector": {"jobset.sigs.k8s.io/jobset-name": job.name, **of_first},
            "ports": [{"name": PORT_NAME, "port": 80, "targetPort": jobset.http_port}],
        }
        service = {"apiVersion": "v1", "kind": "Service", "metadata": _given(name), "spec": spec}
        objects.append(service)
    return str(yaml.safe_dump_all(objects, sort_keys=False, width=100))


def jobset_object(job: Job, jobset: JobSet) -> dict[str, Any]:
    """The JobSet as dicts and lists; see `jobset_yaml`."""
    _check(job, jobset)
    labels = {"kueue.x-k8s.io/queue-name": jobset.queue} if jobset.queue else None
    apart = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    nodes = jobset.tpu.hosts if jobset.tpu else job.nodes
    pod: dict[str, Any] = {"spec": _pod_spec(job, jobset)}
    if any(volume.kind == "bucket" for volume in jobset.volumes):  # GKE adds a container of FUSE's
        pod = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}, **pod}
    exits = {"containerName": WORKERS, "operator": "In", "values": [EXIT_PREEMPTED]}
    failures = [
        {"action": "FailJob", "onExitCodes": exits},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    of_job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": failures},
        "template": pod,
    }
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    workers = {"name": WORKERS, "replicas": jobset.slices, "template": {"spec": of_job}}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": jobset.max_restarts, "rules": [preempted]},
        "replicatedJobs": [workers],
    }
    metadata = {
        "name": job.name, "namespace": jobset.namespace, "labels": labels,
        "annotations": apart if jobset.tpu else None,
    }  # fmt: skip
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _given(metadata),
        "spec": spec,
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _check(job: Job, jobset: JobSet) -> None:
    # The longest name made of it is a pod's: <name>-workers-<job>-<index>-<5 characters>.
    check_dns_label("--name", job.name, 63 - len(f"-{WORKERS}-00-0000-abcde"))
    named = {"--namespace": jobset.namespace, "--queue": jobset.queue}
    for name, value in named.items():
        if value is not None:
            check_dns_label(name, value)
    if not jobset.image or any(char.isspace() for char in jobset.image):
        raise LaunchError(f"--image {jobset.image!r} is no container image")
    if job.processes_per_node != 1:
        raise LaunchError(
            "a pod runs one process, with all accelerators of its node",
            fix="leave out --processes_per_node",
        )
    if jobset.tpu and job.gpus_per_node:
        raise LaunchError("a node has TPUs or GPUs", fix="give --tpu or --gpus_per_node")
    if jobset.slices > 1 and not jobset.tpu:
        raise LaunchError("--slices counts TPU slices", fix="give --tpu, or use --nodes")
    check_numbers(jobset, 1, "slices")
    check_numbers(jobset, 0, "max_restarts", "grace_s")


def _pod_spec(job: Job, jobset: JobSet) -> dict[str, Any]:
    selector = dict(jobset.selector)
    resources = _given({"cpu": jobset.cpu, "memory": jobset.memory})
    limits: dict[str, Any] = {}
    if jobset.tpu:
        selector = {
            "cloud.google.com/gke-tpu-accelerator": jobset.tpu.accelerator,
            "cloud.google.com/gke-tpu-topology": jobset.tpu.topology,
            **selector,
        }
        limits["google.com/tpu"] = jobset.tpu.chips_per_host
    elif job.gpus_per_node:
        limits["nvidia.com/gpu"] = job.gpus_per_node
    container: dict[str, Any] = {
        "name": WORKERS,
        "image": jobset.image,
        "command": [_escaped(part) for part in job.command],
        "workingDir": job.folder,
        "env": _environment(job, jobset),
        "ports": [{"containerPort": job.port}],
        "resources": _given({"requests": resources, "limits": limits}),
    }
    if jobset.http_port is not None:
        container["ports"] += [{"name": PORT_NAME, "containerPort": jobset.http_port}]
        container |= container_fields(jobset.http_port)
    gpu, tolerations = "nvidia.com/gpu", []
    if gpu in limits:
        tolerations.append({"key": gpu, "operator": "Exists", "effect": "NoSchedule"})
    if jobset.spot:
        selector[SPOT] = "true"
        tolerations.append(
            {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    volumes, container["volumeMounts"] = mounted(jobset.volumes)
    if gpu in limits:  # NCCL's transport within a node
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": jobset.grace_s,
        "serviceAccountName": jobset.service_account,
        "nodeSelector": selector,
        "tolerations": tolerations or None,
        "containers": [_given(container)],
        "volumes": volumes or None,
    }
    return {name: value for name, value in pod.items() if value is not None and value != {}}


def _environment(job: Job, jobset: JobSet) -> list[dict[str, Any]]:
    """Variables of a pod; on TPUs GKE says who is who."""
    env: list[dict[str, Any]] = []
    host = f"{job.name}-{WORKERS}-0-0.{job.name}"
    if not jobset.tpu:
        number = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_LABEL}']"}}
        env += [
            {"name": ENV_COORDINATOR, "value": f"{host}:{job.port}"},
            {"name": ENV_PROCESSES, "value": str(job.nodes)},
            {"name": ENV_PROCESS, "valueFrom": number},
        ]
        if job.gpus_per_node:
            env.append({"name": ENV_DEVICES, "value": job.all_gpus})
    elif jobset.slices > 1:
        number = {"fieldRef": {"fieldPath": f"metadata.annotations['{JOB_LABEL}']"}}
        env += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(jobset.slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": number},
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": host},
        ]
    given = {item["name"] for item in env} & set(job.env)
    if given:
        raise LaunchError(f"--env: {sorted(given)[0]} is set by the JobSet itself")
    return env + [{"name": n, "value": _escaped(v)} for n, v in job.env.items()]


def _escaped(text: str) -> str:
    """Kubernetes would replace `$(A)` by a variable; `$$(A)` stands for the text itself."""
    return text.replace("$(", "$$(")
