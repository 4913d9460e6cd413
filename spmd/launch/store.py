"""The key-value store of jax's coordination service, by which processes exchange text.

jax's client of this service is private; this file is the only one that uses it.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src import distributed, xla_bridge
from jax._src.clusters import ClusterEnv

_PREFIX = "spmd/"
_MISSING = re.compile(r"NOT_FOUND|DEADLINE_EXCEEDED")


class JobStore:
    """Shares text under names among all processes of a job, over the coordinator's RPCs.

    Errors of the connection come out as jax raises them, as `jax.errors.JaxRuntimeError`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: str) -> None:
        """Writes a value in place of what was there."""
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def claim(self, key: str, value: str) -> None:
        """Writes a value unless the key has one already, from this or another process."""
        try:
            self._client.key_value_set(_PREFIX + key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        """Returns a value, waiting up to `timeout_s` seconds for it; None if there is none."""
        try:
            if timeout_s > 0:
                wait = int(timeout_s * 1000)
                return str(self._client.blocking_key_value_get(_PREFIX + key, wait))
            return str(self._client.key_value_try_get(_PREFIX + key))
        except jax.errors.JaxRuntimeError as error:
            if _MISSING.search(str(error)):
                return None
            raise

    def all(self, folder: str) -> dict[int, str]:
        """Returns process -> value for the keys `<folder>/<number of a process>` that are set."""
        start = f"{_PREFIX}{folder}/"
        found = self._client.key_value_dir_get(start)
        return {int(key.removeprefix(start)): value for key, value in found}


class Place(NamedTuple):
    """A process's number (`process`) and how many there are (`processes`), None where unknown.

    `coordinator` is `host:port` of process 0, `devices` are the local accelerators that it may use.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    devices: tuple[int, ...] | None = None


def detect_cluster(known: Place, timeout_s: float) -> Place:
    """Returns `known` with what is None filled in from the cluster (Slurm, ...) that jax finds."""
    devices = None if known.devices is None else list(known.devices)
    with warnings.catch_warnings():  # our JobSets say who is who: jax need not ask Kubernetes
        warnings.filterwarnings("ignore", message="Kubernetes environment detected")
        found = ClusterEnv.auto_detect_unset_distributed_params(
            known.coordinator, known.processes, known.process, devices, None, int(timeout_s)
        )
    coordinator, processes, process, ids = found
    return Place(coordinator, processes, process, None if ids is None else tuple(ids))


def this_process() -> tuple[int, int]:
    """Returns (this process's number, how many there are), without touching a device."""
    state = distributed.global_state
    return state.process_id, (state.num_processes or 1) if state.client is not None else 1


def listed(processes: Sequence[int]) -> str:
    """Returns `process 1`, `processes 1, 2` or, of more than 8, `processes 1, 2, ...`."""
    shown = ", ".join(map(str, processes[:8])) + ", ..." * (len(processes) > 8)
    return f"process{'es' if len(processes) > 1 else ''} {shown}"


def connected_to() -> str | None:
    """Returns `host:port` of the coordinator that this process is connected to, else None."""
    return distributed.global_state.coordinator_address


def devices_are_open() -> bool:
    """Whether jax has opened its devices: then it is too late to join a job."""
    return bool(xla_bridge.backends_are_initialized())


def job_store() -> JobStore | None:
    """Returns the store of this job; None where there is but one process."""
    client = distributed.global_state.client
    return None if client is None or this_process()[1] < 2 else JobStore(client)
