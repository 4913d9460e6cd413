"""TPU slices by their names, and the command that starts a program on all of a slice's hosts."""

import math
import shlex
from dataclasses import dataclass
from typing import NamedTuple

from spmd.errors import LaunchError
from spmd.scripts.jobs.job import Job, exports, restarted


@dataclass(frozen=True)
class TpuKind:
    """A generation of TPUs."""

    accelerator: str  # what GKE calls it (`cloud.google.com/gke-tpu-accelerator`)
    cores: int  # what a chip counts in a slice's name: `v5p-128` is 64 chips of 2
    topologies: dict[int, str]  # chips -> topology
    hosted: int = 4  # chips of a host in slices of several hosts; a smaller slice is one host
    single: int = 4  # chips of the largest slice that is one host


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
    512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16",
}  # fmt: skip

KINDS = {
    "v4": TpuKind("tpu-v4-podslice", 2, _CUBE),
    "v5e": TpuKind("tpu-v5-lite-podslice", 1, _FLAT, single=8),
    "v5p": TpuKind("tpu-v5p-slice", 2, _CUBE),
    "v6e": TpuKind("tpu-v6e-slice", 1, _FLAT, single=8),
}


class TpuSlice(NamedTuple):
    """A slice: `v5e-16` has topology 4x4 on 4 hosts of 4 chips."""

    name: str
    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int


def parse_tpu(name: str) -> TpuSlice:
    """`v5e-16` -> the slice.

    Raises:
      LaunchError: no such TPU, or none of that size.
    """
    kind_name, _, size = name.partition("-")
    kind = KINDS.get(kind_name)
    if kind is None or not size.isdecimal():
        raise LaunchError(
            f"--tpu {name!r} is no slice of TPUs",
            required=f"{', '.join(KINDS)}, and a size, as in v5e-16 or v5p-128",
            fix="correct the name",
        )
    chips, rest = divmod(int(size), kind.cores)
    if rest or chips not in kind.topologies:
        sizes = ", ".join(f"{kind_name}-{c * kind.cores}" for c in kind.topologies)
        raise LaunchError(f"there is no slice {name}", required=f"one of {sizes}")
    per_host = chips if chips <= kind.single else kind.hosted
    topology = kind.topologies[chips]
    assert math.prod(map(int, topology.split("x"))) == chips
    return TpuSlice(name, kind.accelerator, topology, chips // per_host, per_host)


def tpu_vm_command(
    job: Job, tpu: str, zone: str, project: str | None = None, max_restarts: int = 0
) -> list[str]:
    """The `gcloud` call that runs a command on every host of a TPU VM; jax finds the rest itself.

    Args:
      job: the command, its folder on the hosts and its variables.
      project: the cloud project; gcloud's own setting if left out.
      max_restarts: how many times every host starts a command again that failed: where one fails,
        all end, and meet again.
    """
    parts = [*exports(job.env)]
    if job.folder is not None:
        parts.insert(0, f"cd {shlex.quote(job.folder)}")
    command = job.shell_command
    if max_restarts:
        command = f"{restarted(command, max_restarts)}; exit $code"
    remote = " && ".join([*parts, command])
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    return [
        "gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu, *where, "--worker=all",
        f"--command={remote}",
    ]  # fmt: skip
