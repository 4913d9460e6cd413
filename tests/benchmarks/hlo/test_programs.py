"""What XLA makes of the emitted program: our collectives, no others, and no larger values."""

from typing import Any

import pytest

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.hlo.runs import array_bytes
from spmd.mesh.sharding import local_shape
from tests.programs import arrays_made, llama, mlp, sent_by_kind

PROGRAMS = ["mlp", "llama_scan", pytest.param("llama_unrolled", marks=pytest.mark.heavy)]


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: Any) -> spmd.Compiled:
    mesh = spmd.make_mesh(data=4, model=2)
    if request.param == "mlp":
        return mlp(mesh).compile()
    return llama(mesh, "adamw", scan=request.param == "llama_scan").compile()


@pytest.mark.thorough
def test_bytes_of_every_kind_agree_with_the_optimized_hlo(program: spmd.Compiled) -> None:
    found = hlo_collectives(program.as_text("hlo"))
    assert sent_by_kind(program.collectives) == sent_by_kind(found)


def test_xla_adds_no_collective(program: spmd.Compiled) -> None:
    emitted = sum(c.count for c in program.collectives)
    found = sum(h.count for h in hlo_collectives(program.as_text("hlo")))
    assert 0 < found <= emitted  # XLA may combine ours


def test_every_collective_says_where_and_why(program: spmd.Compiled) -> None:
    for collective in program.collectives:
        assert "needs " in collective.reason, collective
        assert ".py:" in collective.source, collective
        assert collective.axes
        assert collective.seconds > 0


def test_no_value_is_larger_than_planned(program: spmd.Compiled) -> None:
    planned = max(t.bytes for t in program.stages.optimized.program.types)
    for array in arrays_made(program.as_text("hlo")):
        assert array_bytes(*array) <= planned, array


def test_planned_values_are_pieces(program: spmd.Compiled) -> None:
    """Nothing that the plan splits is ever whole in the local program's boundary."""
    stages = program.stages
    types = stages.program.types
    here = stages.optimized
    ends = zip(stages.program.body.args, here.arguments, here.program.body.args, strict=True)
    for value, sharding, local in ends:
        want = local_shape(types[value].shape, sharding, program.mesh)
        assert here.program.types[local].shape == want
