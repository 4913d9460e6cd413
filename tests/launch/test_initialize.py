"""Where a process belongs: arguments, then the environment, then a cluster; and bad ones."""

import jax
import pytest

import spmd
from spmd.launch.initialize import RANKS, find_place, initialize, versions
from spmd.launch.store import Place


def place(env: dict[str, str], given: Place | None = None) -> Place | None:
    return find_place(given or Place(), env, 1.0)


OURS = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


def test_nothing_is_one_process():
    assert place({}) is None
    initialize()
    assert not jax.distributed.is_initialized()


def test_one_process_of_a_cluster_is_one_process():
    assert place({}, Place("a:1", 1, 0)) is None
    assert place({**OURS, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


def test_our_launchers_variables():
    assert place(OURS) == Place("a:1", 4, 2, None)
    assert place({**OURS, "JAX_LOCAL_DEVICE_IDS": "0,1"}) == Place("a:1", 4, 2, (0, 1))


def test_arguments_go_first():
    assert place(OURS, Place("b:2", 8, 0)) == Place("b:2", 8, 0)


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


def test_too_late(devices8):
    with pytest.raises(spmd.LaunchError, match="comes too late: jax has opened its devices"):
        initialize("localhost:1", 2, 1)


def test_a_variable_that_is_no_number():
    with pytest.raises(spmd.LaunchError, match="JAX_PROCESS_ID='x' is not a number"):
        place({**OURS, "JAX_PROCESS_ID": "x"})


def test_versions():
    assert set(versions()) >= {
        "version of Python", "version of jax", "version of jaxlib", "sources of spmd (hash)",
    }  # fmt: skip
    assert "sources of jax (hash)" not in versions()  # installed: it has a version
