"""`initialize`: joins the processes of a job, or does nothing where there is but one.

Which process of which job this is, is taken from the arguments, then from the environment that our
launchers set, then from the cluster that jax recognises (Slurm, Cloud TPU, GKE, Open MPI, ...).
"""

import os
import platform
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata

import jax

from spmd.errors import LaunchError
from spmd.installed import as_called, source_digest
from spmd.launch.agree import judged, refuse_differences, sources
from spmd.launch.meet import meet
from spmd.launch.peers import first_line, watch_peers
from spmd.launch.store import Place, detect_cluster, devices_are_open, job_store, this_process

ENV_COORDINATOR = "JAX_COORDINATOR_ADDRESS"
ENV_PROCESSES = "JAX_NUM_PROCESSES"
ENV_PROCESS = "JAX_PROCESS_ID"
ENV_DEVICES = "JAX_LOCAL_DEVICE_IDS"

RANKS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""Variables in which MPI and Slurm give the number of processes, this one's, and this one's on its
machine. They are read if only the coordinator is given; each process then has one GPU, that of
the last number, as in jax's own detection."""

_joined = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    *,
    timeout_s: float = 300.0,
    heartbeat_timeout_s: float = 60.0,
) -> None:
    """Joins this process to the others of its job; call it before anything else of jax.

    Arguments left out come from the launcher's environment, or else from the cluster (Slurm, ...).
    With one process, outside of any cluster, or called again, it does nothing. From here on
    processes stop together: when one is killed, hangs as a whole or fails, the others say which and
    why and exit with `spmd.launch.EXIT_PEER_LOST`.

    Args:
      coordinator_address: `host:port` of process 0, where it will listen.
      num_processes: how many processes the job has.
      process_id: the number of this process, from 0.
      local_device_ids: numbers of this machine's accelerators for this process; all if left out.
      timeout_s: seconds to wait for the other processes to come.
      heartbeat_timeout_s: seconds of silence after which a process counts as lost.

    Raises:
      LaunchError: the coordinator cannot be reached, too few or too many processes came, they run
        different versions or sources, jax has used its devices already, or an argument is unfit.

    Example:
      >>> spmd.initialize()   # the same line on a laptop, under Slurm, on a TPU pod
    """
    global _joined
    if not heartbeat_timeout_s > 0:
        raise LaunchError(f"heartbeat_timeout must be positive, not {heartbeat_timeout_s:g}")
    if _joined:
        return
    devices = None if local_device_ids is None else tuple(local_device_ids)
    given = Place(coordinator_address, num_processes, process_id, devices)
    # `meet` compares versions before jax connects the processes. Where the caller connected them by
    # jax's own call it is too late for that: then they are compared through the store.
    is_joined = jax.distributed.is_initialized()  # by the caller: then this adds what jax lacks
    if not is_joined:
        place = find_place(given, os.environ, timeout_s)
        if place is None:
            return
        seat = _seat(place)
        coordinator, _, process = seat
        if devices_are_open():
            raise LaunchError(
                "spmd.initialize comes too late: jax has opened its devices already",
                fix="call it before jax.devices(), jax.random.key(0) or any array is made",
            )
        meet(*seat, versions(), timeout_s)
        if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "mpi":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            jax.distributed.initialize(
                *seat,
                place.devices,
                cluster_detection_method="deactivate",
                initialization_timeout=max(10, int(timeout_s)),
                # Ours speaks first, for it knows names; jax's is what remains if Python hangs.
                heartbeat_timeout_seconds=max(10, int(heartbeat_timeout_s * 1.5) + 5),
                shutdown_timeout_seconds=max(1, int(timeout_s)),
            )
        except Exception as error:
            raise LaunchError(
                f"process {process} could not join {coordinator}",
                actual=first_line(error),
                fix="see the coordinator's output; another port may help",
            ) from error
        finally:
            # jax's preemption service catches SIGTERM and only takes a note: nothing would end.
            if on_term is not None:
                signal.signal(signal.SIGTERM, on_term)
    _joined, store = True, job_store()
    if store is None:
        return
    watch_peers(store, heartbeat_timeout_s)
    if is_joined:
        judge = partial(refuse_differences, may_lack=True)
        judged({"checked": "versions", **versions()}, judge, timeout_s=timeout_s)


def versions() -> dict[str, str]:
    """Returns name -> value of what must be equal in all processes: versions, hashes of sources."""
    # Hosts that read different checkouts of this package have the same version number. Its files
    # are compared whether they are imported yet or not.
    return {
        "version of Python": platform.python_version(),
        "version of jax": jax.__version__,
        "version of jaxlib": metadata.version("jaxlib"),
        "sources of spmd (hash)": source_digest()[:12],
        **sources(),
    }


def find_place(given: Place, env: Mapping[str, str], timeout_s: float) -> Place | None:
    """Returns `given`, completed by `env`, else by the cluster; None if this process is alone."""
    coordinator = given.coordinator or env.get(ENV_COORDINATOR) or None
    processes = _from(env, ENV_PROCESSES) if given.processes is None else given.processes
    process = _from(env, ENV_PROCESS) if given.process is None else given.process
    devices = given.devices
    if devices is None and env.get(ENV_DEVICES):
        devices = tuple(_number(ENV_DEVICES, text) for text in env[ENV_DEVICES].split(","))
    engine = next((names for names in RANKS if names[0] in env and names[1] in env), None)
    if coordinator and process is None and engine:
        count, process, local = (_from(env, name) for name in engine)
        processes = count if processes is None else processes
        devices = devices or (None if local is None else (local,))
    place = Place(coordinator, processes, process, devices)
    if None in (place.coordinator, place.processes, place.process):
        place = detect_cluster(place, timeout_s)
    is_unknown = place == Place(devices=place.devices)
    return None if is_unknown or place.processes == 1 else place


def _from(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    return _number(name, text) if text else None


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise LaunchError(f"{name}={text!r} is not a number", fix="correct or unset the variable")
    return int(text)


def _seat(place: Place) -> tuple[str, int, int]:
    """Returns (host:port, process count, this one's number); LaunchError if any is unfit."""
    parts = {
        f"coordinator_address ({ENV_COORDINATOR})": place.coordinator,
        f"num_processes ({ENV_PROCESSES})": place.processes,
        f"process_id ({ENV_PROCESS})": place.process,
    }
    if place.coordinator is None or place.processes is None or place.process is None:
        raise LaunchError(
            "a job of several processes lacks "
            + ", ".join(name for name, part in parts.items() if part is None),
            actual=", ".join(f"{n} is {p}" for n, p in parts.items() if p is not None),
            fix="pass it to spmd.initialize, set the variable, or start the job by "
            + as_called("scripts/launch"),
        )
    host, _, port = place.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"coordinator_address {place.coordinator!r} is not of the form host:port",
            fix="give process 0's host and a free port, as in 10.0.0.1:8476",
        )
    if not 0 <= place.process < place.processes:
        raise LaunchError(
            f"there is no process {place.process} in a job of {place.processes}",
            required=f"process_id from 0 to {place.processes - 1}",
            fix="number the processes from 0",
        )
    return place.coordinator, place.processes, place.process


def is_main_process() -> bool:
    """Whether this is process 0: the one that prints and writes; no device is touched."""
    return this_process()[0] == 0
