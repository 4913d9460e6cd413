"""Calibration: the fit finds what made the times, and the command writes a topology that loads."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import CollectiveSpeed, Link, Topology
from spmd.reshard.comm import collective_seconds
from tools import calibrate
from tools.calibrate import KINDS, Sample, axis_sets, calibrated, fit_link

MESH = Mesh(None, (4, 2), ("data", "model"))


def samples(topology: Topology) -> list[Sample]:
    """Times as the model has them on a machine."""
    found = []
    for axes in axis_sets(MESH):
        atoms = MESH.atoms_of(axes)
        count = MESH.extent(atoms)
        for kind in KINDS:
            for size in (1 << 12, 1 << 20, 1 << 28):
                part = size // count
                ends = {"all_gather": (part, size), "reduce_scatter": (size, part)}
                local_in, local_out = ends.get(kind, (size, size))
                seconds = collective_seconds(kind, atoms, local_in, local_out, MESH, topology)
                found.append(Sample(kind, axes, local_in, local_out, seconds))
    return found


@pytest.mark.parametrize("link", [Link(300e9, 7e-6), Link(1e9, 1e-4)])
def test_the_fit_finds_the_link_behind_the_times(link: Link) -> None:
    known = Topology("a100:8")
    truth = Topology("a100:8", dataclasses.replace(known.chip, ici=link))
    found = calibrated(known, MESH, samples(truth), {"f32": 4e14, "bf16": 8e14}, 4e12)
    assert found.chip.ici.bandwidth == pytest.approx(link.bandwidth, rel=1e-3)
    assert found.chip.ici.latency == pytest.approx(link.latency, rel=1e-3)
    assert found.chip.dcn == known.chip.dcn
    assert found.peak_flops("bf16") == 8e14
    assert found.peak_flops("i8") == pytest.approx(1.6e15, 1e-3)


def test_on_a_torus_an_axis_has_several_links() -> None:
    known = Topology("v5p:2x2x2")
    link = Link(60e9, 3e-6)
    truth = Topology("v5p:2x2x2", dataclasses.replace(known.chip, ici=link))
    found = calibrated(known, MESH, samples(truth), {"f32": 4e14, "bf16": 4e14}, 2e12)
    assert found.chip.ici.bandwidth == pytest.approx(link.bandwidth, rel=1e-3)


def test_every_kind_behind_a_switch_has_figures_of_its_own(tmp_path: Path) -> None:
    known = Topology("a100:8")
    speeds = tuple(
        CollectiveSpeed(kind, devices, (10 + devices) * 1e-6, (100 + 10 * number) * 1e9)
        for number, kind in enumerate(KINDS)
        for devices in (2, 4, 8)
    )
    chip = dataclasses.replace(known.chip, measured=speeds)
    truth = Topology("a100:8", chip)
    found = calibrated(known, MESH, samples(truth), {"f32": 4e14, "bf16": 8e14}, 4e12)
    assert len(found.chip.measured) == len(chip.measured)
    for m in chip.measured:
        again = found.measured(m.kind, m.devices)
        assert again is not None
        assert again.latency == pytest.approx(m.latency, rel=1e-3)
        assert again.bandwidth == pytest.approx(m.bandwidth, rel=1e-3)
    found.save(tmp_path / "topology.json")
    assert Topology.load(tmp_path / "topology.json") == found


def test_noise_never_makes_a_link_impossible() -> None:
    noisy = [s._replace(seconds=1e-3) for s in samples(Topology("a100:8"))]
    link = fit_link(noisy, MESH)
    assert link.bandwidth > 0 and link.latency > 0


@pytest.mark.thorough
def test_the_command_measures_this_machine(tmp_path: Path, capsys: Any, devices8: Any) -> None:
    out = tmp_path / "topology.json"
    sizes = "--smallest=4096 --largest=16384 --shapes=64 --repeat=2"
    calibrate.main([f"--out={out}", "--mesh=data=4,model=2", *sizes.split()])
    topology = Topology.load(out)
    assert topology.name == "cpu:8"
    assert topology.chip.ici != Topology("cpu:8").chip.ici
    assert 0 < topology.hbm_bandwidth < 1e12
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| all_reduce |")]
    assert len(rows) == 3 * 2  # each axis and both, two sizes
