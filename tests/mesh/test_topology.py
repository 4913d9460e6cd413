"""Chips, shapes, and the links behind mesh axes."""

import dataclasses
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import DTYPES, Chip, Link, Topology

PLATFORMS = {
    "tpu": ["v4:4x4x8", "v5e:4x4", "v5p:4x4x4", "v6e:2x4", "tpu7x:2x2x1"],
    "cuda": ["a100:8", "h100:16", "h200:8", "b200:16"],
    "rocm": ["mi300x:8"],
    "cpu": ["cpu:8"],
}


@pytest.mark.parametrize(("platform", "name"), [(p, n) for p in PLATFORMS for n in PLATFORMS[p]])
def test_known_topologies(platform: str, name: str, tmp_path: Path):
    topology = Topology(name)
    assert (str(topology), topology.platform) == (name, platform)
    assert all(topology.peak_flops(dtype) > 0 for dtype in DTYPES)
    assert topology.hbm_bytes > 1e9 and topology.hbm_bandwidth > 1e9
    topology.save(tmp_path / "topology.json")
    again = Topology.load(tmp_path / "topology.json")
    assert again == topology and hash(again) == hash(topology)


def test_counts_and_peaks():
    assert Topology("v4:4x4x8").count == 128 and Topology("tpu7x:2x2x1").count == 8
    assert Topology("h200:8").shape == (8,)
    h200 = Topology("h200:8")
    assert h200.peak_flops("f8E4M3FN") == h200.peak_flops("fp8") > h200.peak_flops("bf16")
    assert h200.peak_flops("ui8") == h200.peak_flops("i8")
    assert (Topology("h200:4x2").count, Topology("h200:4x2").chip.per_host) == (8, 2)
    assert h200.peak_flops("f64") == h200.peak_flops("f32")


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v4-8", "v4:2x2x1"), ("v4-256", "v4:4x4x8"), ("v5p-256", "v5p:4x4x8"),
        ("v5p-12288", "v5p:16x16x24"), ("v5litepod-16", "v5e:4x4"), ("v5e-16", "v5e:4x4"),
        ("v6e-8", "v6e:2x4"),
    ],
)  # fmt: skip
def test_slices_by_the_names_that_clouds_have(name: str, topology: str):
    assert Topology(name) == Topology(topology)
    # v4 and v5p count cores, two of a chip; what runs programs are chips.
    cores = int(name.partition("-")[2])
    assert Topology(name).count == cores // (2 if name.startswith(("v4", "v5p")) else 1)


def test_slices_that_there_are_not():
    for name in ("v5p-250", "v5p-4", "v4-8192", "v5litepod-2", "v6e-", "v5e-512"):
        with pytest.raises(MeshError, match=f"there is no slice '{name}'") as caught:
            Topology(name)
        assert caught.value.required and f" {name.partition('-')[0]}-" in caught.value.required


@pytest.mark.parametrize(
    "name", ["v9:4x4", "v9-8", "h200-8", "", "h200", "h200:2x4x2", "v5e:16", "v5e:4x0", "v4:axb"]
)
def test_unknown_topologies_say_what_is_known(name: str):
    with pytest.raises(MeshError) as caught:
        Topology(name)
    assert caught.value.required
    with pytest.raises(
        MeshError, match="v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, mi300x, cpu"
    ):
        Topology("tpu:8")


def test_kernels_are_as_slow_as_was_measured_of_the_chip(tmp_path: Path):
    for name, efficiency in (("h100:8", 0.63), ("h200:8", 0.63), ("v5e:2x4", 1.0), ("a100:8", 1.0)):
        topology = Topology(name)
        product = topology.arithmetic_seconds(1e12, "bf16")
        assert product == 1e12 / topology.peak_flops("bf16")
        assert topology.arithmetic_seconds(1e12, "bf16", "attention") == product / efficiency
    chip = dataclasses.replace(Topology("v5e:2x4").chip, efficiency=(("attention", 0.5),))
    mine = Topology("v5e:2x4", chip)
    mine.save(tmp_path / "mine.json")
    seconds = Topology.load(tmp_path / "mine.json").arithmetic_seconds(1e12, "bf16", "attention")
    assert seconds == 2e12 / mine.peak_flops("bf16")


def test_other_chips_can_be_given(tmp_path: Path):
    link = Link(1e9, 1e-6)
    chip = Chip("mine", tuple((d, 1e12) for d in DTYPES), 10**9, 1e11, link, link)
    topology = Topology("mine:4", chip)
    assert topology != Topology("cpu:4") and topology.count == 4 and topology.platform is None
    topology.save(tmp_path / "mine.json")
    assert Topology.load(tmp_path / "mine.json") == topology
    torus = Topology("mine:4x2", dataclasses.replace(chip, torus_dims=2))  # of lines, not rings
    assert len(torus.atom_links(Mesh(None, (4, 2), ("a", "b")))) == 3


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": "h200:8", "chip": {}}'])
def test_files_that_hold_no_topology(text: str, tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(MeshError, match="does not hold a topology"):
        Topology.load(path)


NVLINK, NETWORK = 450e9, 50e9
V4, V5E = (Topology(name).chip.ici.bandwidth for name in ("v4:4x4x8", "v5e:4x4"))
INTERLEAVED = [8 * (i % 2) + i // 2 for i in range(16)]


@pytest.mark.parametrize(
    ("name", "mesh", "bandwidths"),
    [
        ("h200:8", Mesh(None, (4, 2), "ab"), (NVLINK, NVLINK)),  # each has the whole switch
        ("h100:16", Mesh(None, (2, 8), "ab"), (NETWORK, NVLINK)),
        ("h100:16", Mesh(INTERLEAVED, (8, 2), "ab"), (NVLINK, NETWORK)),
        ("v4:4x4x8", Mesh(None, (16, 8), "ab"), (4 * V4, 2 * V4)),  # two rings, and one
        ("v4:4x4x8", Mesh(None, (64, 2), "ab"), (None, V4)),
        ("v5e:4x4", Mesh(None, (4, 4), "ab"), (V5E, V5E)),  # lines
        ("v5e:16x16", Mesh(None, (16, 16), "ab"), (2 * V5E, 2 * V5E)),
        ("h200:8", Mesh(None, (8, 1), "ab"), (NVLINK, None)),  # nothing is sent along b
        ("tpu7x:2x2x1", Mesh(None, (4, 2), "ab"), (100e9, 600e9)),  # b: the two cores of a chip
    ],
)
def test_axes_have_the_links_that_they_cross(name: str, mesh: Mesh, bandwidths: tuple[float, ...]):
    for axis, bandwidth in enumerate(bandwidths):
        links = zip(mesh.atoms, Topology(name).atom_links(mesh), strict=True)
        found = [link.bandwidth for atom, link in links if atom.axis == axis]
        assert bandwidth in (None, min(found, default=None))


@pytest.mark.parametrize(
    ("name", "sizes", "detour"),
    [
        ("h200:8", (8,), 1), ("v4:4x4x4", (64,), 3), ("v5p:8x8x8", (8, 64), 4),
        ("v4:4x4x4", (16, 4), 1), ("v5p:4x4x4", (8, 8), 1),
    ],
)  # fmt: skip
def test_messages_take_longer_through_a_torus(name: str, sizes: tuple[int, ...], detour: float):
    mesh = Mesh(None, sizes, "xy"[: len(sizes)])
    assert Topology(name).detour(mesh, len(sizes) - 1) == detour


def test_axes_across_slices_are_as_slow_as_the_network():
    topology = Topology("v5e:4x4")
    mesh = Mesh(None, (8, 4), ("data", "model"), (2, 1))
    links = topology.atom_links(mesh)
    assert links[0] == topology.chip.dcn
    assert links[1].bandwidth == topology.chip.ici.bandwidth


def gpu(kind: str) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform="gpu")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200:8"),
        ("NVIDIA H100 80GB HBM3", "h100:8"),
        ("NVIDIA A100-SXM4-80GB", "a100:8"),
        ("cpu", "cpu:8"),
    ],
)
def test_devices_behind_a_switch_are_recognised(kind: str, name: str):
    assert Topology.for_devices([gpu(kind)] * 8).name == name


@pytest.mark.parametrize(
    ("kind", "box", "name", "cores"),
    [
        ("TPU v4", (2, 2, 4), "v4:2x2x4", 1),
        ("TPU v5 lite", (4, 4, 1), "v5e:4x4", 1),
        ("TPU v5", (2, 2, 1), "v5p:2x2x1", 1),
        ("TPU v6 lite", (2, 4, 1), "v6e:2x4", 1),
        ("TPU7x", (2, 2, 1), "tpu7x:2x2x1", 2),
    ],
)
def test_devices_on_a_torus_are_recognised(kind: str, box: tuple[int, ...], name: str, cores: int):
    coords = [c for c in product(*map(range, box)) for _ in range(cores)]
    devices = [SimpleNamespace(device_kind=kind, coords=c, slice_index=0) for c in coords]
    assert Topology.for_devices(devices).name == name


def test_unknown_devices_say_what_to_do():
    with pytest.raises(MeshError, match="NVIDIA Z9") as caught:
        Topology.for_devices([gpu("NVIDIA Z9")])
    assert "Topology.load" in str(caught.value)
