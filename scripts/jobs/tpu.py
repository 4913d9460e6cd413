"""TPU slices by their names, and the command that starts a program on all of a slice's hosts."""

import shlex
from typing import NamedTuple

from spmd.errors import LaunchError
from spmd.mesh.topology import Topology, slices_of
from spmd.scripts.jobs.job import Job, exports, restarted

KINDS = {
    "v4": ("tpu-v4-podslice", 4),
    "v5e": ("tpu-v5-lite-podslice", 8),
    "v5p": ("tpu-v5p-slice", 4),
    "v6e": ("tpu-v6e-slice", 8),
}
"""What GKE calls it (`cloud.google.com/gke-tpu-accelerator`), and the chips of its largest slice
that is one host; hosts of others have 4."""


class TpuSlice(NamedTuple):
    """A slice: `v5e-16` has topology 4x4 on 4 hosts of 4 chips."""

    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int


def parse_tpu(name: str) -> TpuSlice:
    """`v5e-16` -> the slice.

    Raises:
      LaunchError: no such TPU, or none of that size.
    """
    slices = slices_of(name.partition("-")[0])
    if name not in slices:
        kinds = f"{', '.join(KINDS)}, and a size, as in v5e-16 or v5p-128"
        raise LaunchError(
            f"--tpu {name!r} is no slice of TPUs",
            required=f"one of {', '.join(slices)}" if slices else kinds,
            fix="correct the name",
        )
    topology = Topology(name)
    (accelerator, single), chips = KINDS[topology.chip.name], topology.count
    per_host = chips if chips <= single else 4
    shape = "x".join(map(str, topology.shape))
    return TpuSlice(accelerator, shape, chips // per_host, per_host)


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
