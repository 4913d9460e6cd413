"""Bytes and seconds of collectives."""

import pytest

from spmd.errors import LegalityError
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.reshard.comm import KINDS, collective_seconds, latency_steps, run_as, wire_bytes

MESH = Mesh(None, (4, 2), ("data", "model"))
A100 = Topology("a100:8")


@pytest.mark.parametrize(
    ("kind", "count", "before", "after", "sent"),
    [
        ("slice", 4, 4096, 1024, 0),
        ("all_gather", 4, 1024, 4096, 3072),
        ("reduce_scatter", 4, 4096, 1024, 3072),
        ("all_reduce", 4, 4096, 4096, 6144),
        ("all_to_all", 4, 4096, 4096, 3072),
        ("collective_permute", 4, 4096, 4096, 4096),
        ("all_reduce", 3, 4, 4, 6),
        ("all_reduce", 8, 4, 4, 7),  # rounded up
    ],
)
def test_bytes_sent_by_each(kind: str, count: int, before: int, after: int, sent: int):
    assert wire_bytes(kind, count, before, after) == sent


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_sends_nothing(kind: str):
    assert wire_bytes(kind, 1, 4096, 4096) == 0
    assert collective_seconds(kind, (), 4096, 4096, MESH, A100) == 0.0


def test_an_unknown_kind_is_refused():
    with pytest.raises(LegalityError, match="broadcast"):
        wire_bytes("broadcast", 4, 1, 1)


def test_latency_counts_messages_that_follow_one_another():
    assert latency_steps("all_gather", [2, 2]) == 3
    assert latency_steps("all_gather", [2, 3]) == 4
    assert latency_steps("all_reduce", [2, 2]) == 5
    assert latency_steps("all_to_all", [2, 2]) == latency_steps("collective_permute", [5]) == 2
    link = A100.atom_links(MESH)[0]
    parts = collective_seconds("reduce_scatter", (0, 1), 4096, 1024, MESH, A100)
    parts += collective_seconds("all_gather", (0, 1), 1024, 4096, MESH, A100)
    whole = collective_seconds("all_reduce", (0, 1), 4096, 4096, MESH, A100)
    assert whole == pytest.approx(parts - link.latency)


def test_large_collectives_run_at_the_bandwidth_of_the_slowest_link():
    size = 2**34
    seconds = collective_seconds("all_to_all", (0, 1), size, size, MESH, A100)
    assert seconds == pytest.approx(size * 3 / 4 / 300e9, rel=1e-3)
    mesh = Mesh(None, (4, 2), ("data", "model"), (2, 1))
    topology = Topology("v5e:2x2")
    size = 2**30
    near = collective_seconds("all_gather", (1,), size, 2 * size, mesh, topology)
    far = collective_seconds("all_gather", (0,), size, 2 * size, mesh, topology)
    both = collective_seconds("all_gather", (0, 1), size, 4 * size, mesh, topology)
    assert near < far < both
    assert far == pytest.approx(size / 3.125e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [
        ("v5e:4x4", (16,), "all_reduce"),
        ("v4:2x2x4", (4, 4), "all_reduce"),
        ("v5e:2x4", (8,), "reduce_scatter"),
        ("h200:16", (16,), "reduce_scatter"),
    ],
)
def test_tpus_reduce_all_of_a_slice_at_once(name: str, sizes: tuple[int, ...], kind: str):
    mesh, topology = Mesh(None, sizes, ("x", "y")[: len(sizes)]), Topology(name)
    atoms = tuple(range(len(mesh.atoms)))
    assert run_as("reduce_scatter", atoms, mesh, topology) == kind
    assert run_as("reduce_scatter", atoms[1:], mesh, topology) == "reduce_scatter"
    assert run_as("all_gather", atoms, mesh, topology) == "all_gather"
    size = 1 << 24
    seconds = collective_seconds("reduce_scatter", atoms, size, size // mesh.size, mesh, topology)
    assert seconds == collective_seconds(kind, atoms, size, size // mesh.size, mesh, topology)
