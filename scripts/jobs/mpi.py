"""MPI's starter: `mpirun` (Open MPI) starts the processes, jax connects them."""

import re

from spmd.errors import LaunchError
from spmd.launch.initialize import ENV_COORDINATOR, ENV_DEVICES
from spmd.scripts.jobs.job import Job

_HOST = re.compile(r"[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]")


def mpi_command(job: Job, hosts: tuple[str, ...] = (), hostfile: str | None = None) -> list[str]:
    """The `mpirun` call. `spmd.initialize` takes ranks from MPI's variables.

    Args:
      job: the command; `nodes` must be the number of hosts.
      hosts: names of the machines, process 0's first; this one if left out.
      hostfile: a file of names instead; then the coordinator must be in `job.env`.

    Raises:
      LaunchError: a wrong number or form of hosts, or nothing says where process 0 is.
    """
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise LaunchError(f"--hosts: {host!r} is no name of a host")
    if hosts and len(hosts) != job.nodes:
        raise LaunchError(
            f"--hosts names {len(hosts)} hosts and --nodes is {job.nodes}", fix="make them agree"
        )
    if hostfile is None and not hosts and job.nodes > 1:
        raise LaunchError(
            f"{job.nodes} nodes need names", fix="give --hosts a,b,... or --hostfile FILE"
        )
    env = dict(job.env)
    if ENV_COORDINATOR not in env:
        if hostfile is not None:
            raise LaunchError(
                "with --hostfile nothing says where process 0 is",
                fix=f"add --env {ENV_COORDINATOR}=HOST:{job.port} with the file's first host",
            )
        env[ENV_COORDINATOR] = f"{hosts[0] if hosts else 'localhost'}:{job.port}"
    if job.gpus_per_node and job.processes_per_node == 1:
        env.setdefault(ENV_DEVICES, job.all_gpus)
    places = [f"{host}:{job.processes_per_node}" for host in hosts]
    where = ["--host", ",".join(places)] if places else []
    if hostfile is not None:
        where = ["--hostfile", hostfile]
    folder = ["--wdir", job.folder] if job.folder else []
    variables = [part for name, value in env.items() for part in ("-x", f"{name}={value}")]
    return [
        "mpirun", "-np", str(job.processes), *where, "--map-by",
        f"ppr:{job.processes_per_node}:node", "--bind-to", "none", *folder, *variables,
        *job.command,
    ]  # fmt: skip
