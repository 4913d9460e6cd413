"""Where a process belongs, and meeting: who is missing, too many or differs is said to all."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import spmd
from spmd.errors import LaunchError
from spmd.launch.initialize import RANKS, find_place, initialize, versions
from spmd.launch.meet import meet
from spmd.launch.store import Place
from spmd.scripts.jobs.local import free_port
from tests.waiting import PATIENCE, wait_until


def told(
    seats: list[tuple[int, int]],
    host_waits_s: float = PATIENCE,
    about: dict[int, str] | None = None,
    stranger: bytes | None = None,
) -> list[str]:
    """What processes (number, how many it expects) are told when they meet; "" for welcome."""
    port = free_port()

    def run(seat: tuple[int, int]) -> str:
        process, processes = seat
        versions = {"version of jax": (about or {}).get(process, "0.10.2")}
        timeout_s = PATIENCE if process else host_waits_s
        try:
            meet(f"localhost:{port}", processes, process, versions, timeout_s)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(seats)) as pool:
        results = [pool.submit(run, seats[0])]
        if stranger is not None:  # while process 0 waits: it listens until all are there
            _say(port, stranger)
        results += [pool.submit(run, seat) for seat in seats[1:]]
        return [result.result() for result in results]


def _say(port: int, text: bytes) -> None:
    def is_said() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as line:
            line.sendall(text)
            return True
        return False

    wait_until(is_said, lambda: "process 0 does not listen")


def test_all_come_in_any_order_or_are_named():
    assert told([(2, 3), (1, 3), (0, 3)]) == ["", "", ""]
    for answer in told([(2, 4), (0, 4)], host_waits_s=2.0):
        assert answer.startswith("processes 1, 3 did not come to localhost:")
        assert "actual: 2 of 4 processes came" in answer


def test_a_coordinator_that_cannot_be_met():
    with pytest.raises(LaunchError, match=r"process 1 cannot reach process 0 at .* within 0\.3 s"):
        meet(f"localhost:{free_port()}", 2, 1, {}, 0.3)
    with pytest.raises(LaunchError, match="knows its name"):
        meet("no-such-host.invalid:1234", 2, 1, {}, 0.3)
    with (
        socket.create_server(("localhost", 0)) as server,
        pytest.raises(LaunchError, match="process 1 cannot reach process 0"),
    ):
        meet(f"localhost:{server.getsockname()[1]}", 2, 1, {}, 0.3)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen at port {port}"):
            meet(f"localhost:{port}", 2, 0, {}, 1.0)


def test_a_number_given_twice():
    answers = told([(0, 3), (1, 3), (1, 3)])
    assert "two processes of this job have process_id 1" in answers[0]
    assert all(answers)


@pytest.mark.parametrize(
    ("seats", "about", "differ", "says"),
    [
        ([(0, 2), (1, 3)], {}, "number of processes", "process 1: 3; process 0: 2"),
        # Some of them never come.
        ([(0, 4), (1, 2)], {}, "number of processes", "process 1: 2; process 0: 4"),
        ([(0, 2), (1, 2)], {1: "0.11.0"}, "version of jax", "process 1: 0.11.0; process 0: 0.10.2"),
    ],
)
def test_who_differs_is_said_to_all(seats: list, about: dict, differ: str, says: str):
    for answer in told(seats, about=about):
        assert f"differ in {differ}" in answer and says in answer


@pytest.mark.parametrize("stranger", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff\n"])
def test_strangers_are_ignored(stranger: bytes):
    assert told([(0, 2), (1, 2)], stranger=stranger) == ["", ""]


def place(env: dict[str, str], given: Place | None = None) -> Place | None:
    return find_place(given or Place(), env, 1.0)


OURS = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("env", "given", "found"),
    [
        ({}, None, None),
        # One process of a cluster is one process.
        ({}, Place("a:1", 1, 0), None),
        ({**OURS, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None, None),
        (OURS, None, Place("a:1", 4, 2, None)),
        ({**OURS, "JAX_LOCAL_DEVICE_IDS": "0,1"}, None, Place("a:1", 4, 2, (0, 1))),
        # Arguments go first.
        (OURS, Place("b:2", 8, 0), Place("b:2", 8, 0)),
    ],
)
def test_our_launchers_variables(env: dict, given: Place | None, found: Place | None):
    assert place(env, given) == found


def test_nothing_is_one_process_and_a_job_may_come_too_late(devices8):
    initialize()
    assert not jax.distributed.is_initialized()
    with pytest.raises(spmd.LaunchError, match="comes too late: jax has opened its devices"):
        initialize("localhost:1", 2, 1)
    with pytest.raises(spmd.LaunchError, match="JAX_PROCESS_ID='x' is not a number"):
        place({**OURS, "JAX_PROCESS_ID": "x"})


@pytest.mark.parametrize(("size", "rank", "local"), RANKS)
def test_engines_number_the_processes(size: str, rank: str, local: str):
    env = {"JAX_COORDINATOR_ADDRESS": "a:1", size: "4", rank: "3"}
    assert place(env) == Place("a:1", 4, 3, None)
    assert place({**env, local: "1"}) == Place("a:1", 4, 3, (1,))
    every = {"JAX_LOCAL_DEVICE_IDS": "0,1,2,3"}
    assert place({**env, local: "0", **every}) == Place("a:1", 4, 3, (0, 1, 2, 3))


def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch):
    env = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = place({**env, "JAX_LOCAL_DEVICE_IDS": "0,1,2,3"})
    assert found is not None
    assert (found.processes, found.process, found.devices) == (2, 1, (0, 1, 2, 3))
    assert found.coordinator is not None and found.coordinator.startswith("node03:")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("a:1", 4, None), r"lacks process_id \(JAX_PROCESS_ID\)"),
        ((None, 4, 1), "lacks coordinator_address"),
        (("a", 4, 1), "'a' is not of the form host:port"),
        (("a:70000", 4, 1), "is not of the form host:port"),
        (("a:1", 4, 4), "there is no process 4 in a job of 4"),
    ],
)
def test_bad_arguments(arguments: tuple, says: str):
    with pytest.raises(spmd.LaunchError, match=says):
        initialize(*arguments)


def test_versions():
    assert set(versions()) >= {
        "version of Python", "version of jax", "version of jaxlib", "sources of spmd (hash)",
    }  # fmt: skip
    assert "sources of jax (hash)" not in versions()  # installed: it has a version
