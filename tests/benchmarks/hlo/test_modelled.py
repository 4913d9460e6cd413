"""Modelled time: cycles of kernels, what is waited for of collectives, and what lies between."""

import pytest

from benchmarks.hlo.collectives import HloCollective
from benchmarks.hlo.modelled import CLOCKS, modelled, wire_seconds
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology

MESH, TPUS = Mesh(None, (4, 4), ("data", "model")), Topology("v5e:4x4")
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"30000"}}'
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}"

TEXT = f"""HloModule m, is_scheduled=true, num_partitions=16

ENTRY %main (p: f32[1048576]) -> f32[1048576] {{
  %p = f32[1048576]{{0}} parameter(0)
  %start = (f32[1048576]{{0}}, f32[4194304]{{0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}
  %fusion.1 = f32[1048576]{{0}} fusion(%p), kind=kLoop, calls=%f, {CYCLES}
  %done = f32[4194304]{{0}} all-gather-done(%start)
  %fusion.2 = f32[1048576]{{0}} fusion(%done), kind=kLoop, calls=%f, {CYCLES}
  ROOT %sum = f32[1048576]{{0}} all-reduce(%fusion.2), {GROUPS}, to_apply=%add
}}
"""


def test_what_is_not_hidden_is_waited_for() -> None:
    step = modelled(TEXT, MESH, TPUS)
    assert step.kernel_seconds == pytest.approx(60000 / CLOCKS["v5e"])
    gather, total = (wire(kind, size, 4) for kind, size in (("all_gather", 12), ("all_reduce", 6)))
    hidden = 30000 / CLOCKS["v5e"]
    assert hidden < gather
    assert step.exposed_seconds == pytest.approx(gather - hidden + total)
    assert (step.large, step.large_hidden) == (2, 1)
    ((alone, waited),) = step.synchronous
    assert alone.kind == "all_reduce"
    assert waited == pytest.approx(total)


def test_a_moment_of_a_kernel_hides_one_collective() -> None:
    """The second gather has what the first one leaves of a kernel that is longer than it."""
    start = next(line for line in TEXT.splitlines() if "all-gather-start" in line)
    done = next(line for line in TEXT.splitlines() if "all-gather-done" in line)
    twice = TEXT.replace(start, start + "\n" + start.replace("%start", "%second"))
    again = done.replace("%done", "%also").replace("%start", "%second")
    twice = twice.replace(done, done + "\n" + again).replace("30000", "600000")
    gather, total = (wire(kind, size, 4) for kind, size in (("all_gather", 12), ("all_reduce", 6)))
    kernel = 600000 / CLOCKS["v5e"]
    assert gather < kernel < 2 * gather
    step = modelled(twice, MESH, TPUS)
    assert step.exposed_seconds == pytest.approx(2 * gather - kernel + total)
    assert (step.large, step.large_hidden) == (3, 2)


def wire(kind: str, mebibytes: int, group: int) -> float:
    return wire_seconds(HloCollective(kind, mebibytes << 20, 1, group, "", ""), MESH, TPUS)


def test_a_whole_slice_has_the_links_of_all_dims() -> None:
    latency = TPUS.chip.ici.latency
    row, everything = (wire("all_gather", 64, group) for group in (4, 16))
    assert row - 3 * latency == pytest.approx(2 * (everything - 5 * latency))
    assert wire("all_gather", 64, 1) == 0
