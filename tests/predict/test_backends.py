"""What a prediction may fill of a device's memory."""

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.predict.backends import memory_for, room_for


@pytest.mark.parametrize(("name", "least"), [("v5e:2x4", 0.5), ("h200:8", 0.85), ("cpu:8", 0.99)])
def test_headroom_is_left_where_compilers_take_more(name: str, least: float) -> None:
    topology = spmd.Topology(name)
    room = memory_for(topology, None)
    assert least * topology.hbm_bytes < room <= topology.hbm_bytes
    assert memory_for(topology, 123) == 123  # a limit that is given is one of the prediction


def test_what_fits_what_is_tight_and_what_does_not_fit() -> None:
    topology = spmd.Topology("v5e:2x4")
    room = memory_for(topology, None)
    sizes = (room, room + 1, topology.hbm_bytes, topology.hbm_bytes + 1)
    found = [room_for(size, topology) for size in sizes]
    assert found == ["fits", "tight", "tight", "does not fit"]
    mesh, gib = spmd.Mesh(None, (8,), ("data",)), 1 << 30
    options = spmd.Options(topology=spmd.Topology("v5e:2x4"))
    for size, said in ((1, "fits"), (6, "tight"), (9, "does not fit")):
        x = jax.ShapeDtypeStruct((8, size * gib // 4), jnp.float32)
        x = spmd.mark_sharding(x, mesh, ("data", None))
        lowered = spmd.jit(lambda x: x + 1, mesh=mesh, options=options).lower(x)
        assert f"{2 * size} GiB of 16 GiB predicted" in lowered.summary()
        assert f"0 B of it temporary: {said}\n" in lowered.summary()
