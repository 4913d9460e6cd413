"""Calibration: the fit finds what made the times, and the command writes a topology that loads."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Link, Topology
from spmd.reshard.comm import collective_seconds
from tools import calibrate
from tools.calibrate import KINDS, Sample, axis_sets, calibrated

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
