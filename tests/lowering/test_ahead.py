"""Programs for machines that are not here: planned anywhere, compiled where their compiler is."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.programs.program import marked
from spmd.errors import ArgumentError, MeshError
from spmd.lowering.ahead import devices_ahead, is_here
from tests.compilers import needs_cuda_plugin, needs_libtpu


def step(x: Any, w: Any) -> Any:
    return jnp.maximum(x @ w, 0)


def structs(mesh: spmd.Mesh) -> tuple[Any, ...]:
    return tuple(marked(mesh, ("data", last), (512, 512)) for last in (None, "model"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v4:4x4x8", (32, 4)), ("v5e:4x4", (8, 2)), ("v5p:2x2x2", (4, 2)), ("v6e:2x2", (2, 2)),
        ("tpu7x:2x2x1", (4, 2)), ("h200:8", (4, 2)),
    ],
)  # fmt: skip
def test_planning_takes_no_devices(name: str, sizes: tuple[int, int]) -> None:
    mesh = spmd.Mesh(None, sizes, ("data", "model"))
    lowered = spmd.jit(step, mesh=mesh).lower(*structs(mesh), topology=spmd.Topology(name))
    assert lowered.cost > 0
    assert {c.kind for c in lowered.collectives} == {"all_gather"}
    assert lowered.memory.is_predicted
    whole = 512 * 512 * 4
    assert lowered.memory.arguments == whole // sizes[0] + whole // mesh.size


@pytest.mark.parametrize("how", ["the mesh's own", "marked", "constrained", "marked inside"])
def test_a_mesh_of_another_machine_needs_no_topology_again(how: str) -> None:
    mesh = spmd.make_mesh(data=4, model=2, topology="v5e-8")
    x, w = (jax.ShapeDtypeStruct((512, 512), np.float32) for _ in range(2))

    def marking(x: Any, w: Any) -> Any:
        return step(spmd.mark_sharding(x, mesh, ("data", None)), w)

    if how == "marked":
        lowered = spmd.jit(step).lower(spmd.mark_sharding(x, mesh, ("data", None)), w)
    elif how == "constrained":
        placed = jax.ShapeDtypeStruct(
            (512, 512), np.float32, sharding=NamedSharding(mesh, P("data"))
        )
        lowered = spmd.jit(step).lower(placed, w)
    else:
        of_mesh = mesh if how == "the mesh's own" else None
        lowered = spmd.jit(marking, mesh=of_mesh).lower(x, w)
    assert lowered.mesh == mesh and lowered.target == spmd.Topology("v5e:2x4")
    assert lowered.stages.plan.topology == lowered.target and lowered.request.platform == "tpu"


def test_of_another_machine_nothing_runs_and_no_compiler_is_here() -> None:
    mesh = spmd.make_mesh(data=4, model=2, topology="v5e-8")
    x = np.ones((512, 512), np.float32)
    for run in (lambda: spmd.jit(step, mesh=mesh)(x, x), lambda: spmd.mark_sharding(x, mesh, ())):
        with pytest.raises(MeshError, match=r"is one of v5e:2x4, which is not .*(\n.*)*topology="):
            run()
    mesh = spmd.Mesh(None, (8, 2), ("data", "model"))
    with pytest.raises(MeshError, match=r"use \.lower"):
        spmd.jit(step, mesh=mesh).compile(*structs(mesh), topology=spmd.Topology("cpu:16"))


@pytest.mark.parametrize("given", [(), ("mesh",), ("topology",)])
@needs_libtpu
def test_arguments_on_the_mesh_that_jax_describes(given: tuple[str, ...]) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    places = np.asarray(devices, dtype=object)[::-1].reshape(16, 1)  # its ids are not 0, 1, 2, ...
    theirs = jax.sharding.Mesh(places, ("data", "model"))
    struct = jax.ShapeDtypeStruct((512, 512), np.float32, sharding=NamedSharding(theirs, P("data")))
    mesh = spmd.Mesh(None, (16, 1), ("data", "model"))
    options: Any = {"mesh": mesh} if "mesh" in given else {}
    ahead: Any = {"topology": "v5e-16"} if given else {}
    lowered = spmd.jit(step, **options).lower(struct, struct, **ahead)
    assert lowered.memory.arguments == 2 * 512 * 512 * 4 // 16
    assert lowered.target == spmd.Topology("v5e:4x4") and lowered.request.platform == "tpu"


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "tpu"), ("h200:8", "cuda")])
def test_without_a_compiler_the_extra_is_named(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    with pytest.raises(MeshError, match=rf'pip install "spmd\[{extra}\]"'):
        spmd.jit(step, mesh=mesh).compile(*structs(mesh), topology=spmd.Topology(name))


@pytest.mark.parametrize("name", ["h200:16", pytest.param("v5e:4x4", marks=needs_libtpu)])
def test_a_mesh_must_fit(name: str) -> None:
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    with pytest.raises(MeshError, match=f"does not fit {name}"):
        devices_ahead(mesh, spmd.Topology(name))


def test_hosts_of_gpus_have_equally_many() -> None:
    with pytest.raises(MeshError, match=r"9 devices on 2 hosts\n.*a multiple of 2 devices"):
        devices_ahead(spmd.Mesh(None, (9,), ("x",)), spmd.Topology("h100:9"))


GPUS, TPUS = ("a100:8", "h100:8", "h200:8", "h200:16"), ("v4:2x2x2", "v5e:2x4", "tpu7x:2x2x1")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=needs_cuda_plugin) for name in GPUS),
        *(pytest.param(name, marks=needs_libtpu) for name in TPUS),
    ],
)
def test_other_compilers_report_memory_and_a_schedule(name: str) -> None:
    topology = spmd.Topology(name)
    mesh = spmd.Mesh(None, (topology.count // 2, 2), ("data", "model"))
    compiled = spmd.jit(step, mesh=mesh).compile(*structs(mesh), topology=topology)
    assert compiled.memory.arguments >= compiled.predicted_memory.arguments
    assert name in TPUS or compiled.memory.arguments == compiled.predicted_memory.arguments
    assert not compiled.memory.is_predicted
    text = compiled.as_text("hlo")
    assert "is_scheduled=true" in text and "all-gather" in text
    with pytest.raises(ArgumentError, match="cannot run here"):
        compiled(np.ones((512, 512)), np.ones((512, 512)))


def test_the_machine_at_hand_is_here_and_is_compiled_for(mesh: spmd.Mesh) -> None:
    assert is_here(mesh, spmd.Topology("cpu:8"))
    assert not is_here(mesh, spmd.Topology("v5e:2x4"))
    assert not is_here(spmd.Mesh(None, (16,), ("data",)), spmd.Topology("cpu:16"))
    compiled = spmd.jit(step, mesh=mesh).compile(*structs(mesh), topology=spmd.Topology("cpu:8"))
    x = np.ones((512, 512), np.float32)
    np.testing.assert_allclose(compiled(x, x), 512)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "count"),
    [("v4:4x4x8", 128), ("v5e:4x4", 16), ("v5e:1x4", 4), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8)],
)
def test_devices_are_as_many_as_the_topology_says(name: str, count: int) -> None:
    topology = spmd.Topology(name)
    assert topology.count == count
    devices = devices_ahead(spmd.Mesh(None, (count,), ("data",)), topology)
    assert len({device.id for device in devices}) == count


@needs_libtpu
@pytest.mark.parametrize(("sizes", "steps"), [((16, 1), 2), ((4, 4), 1)])
def test_what_the_tpu_compiler_makes_of_reduce_scatters(sizes: tuple[int, int], steps: int) -> None:
    """Of one over a whole slice it would make an all-reduce, so plans take two steps there."""
    mesh = spmd.Mesh(None, sizes, ("data", "model"))
    x = jax.ShapeDtypeStruct((64, 512, 512), np.float32)

    def total(x: Any) -> Any:
        return spmd.mark_sharding(jnp.sum(jnp.sin(x), 0), mesh, ("data", "model"))

    x = spmd.mark_sharding(x, mesh, ("data", None, "model"))
    compiled = spmd.jit(total, mesh=mesh).compile(x, topology=spmd.Topology("v5e:4x4"))
    planned = compiled.collectives
    found = [c for c in hlo_collectives(compiled.as_text("hlo")) if c.bytes > 1 << 15]
    assert [c.kind for c in planned] == [c.kind for c in found] == ["reduce_scatter"] * steps
    sent = sum(c.bytes for c in planned)
    assert sent <= sum(c.bytes for c in found) <= 1.1 * sent  # pieces may be padded
