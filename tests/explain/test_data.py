"""A plan as data: JSON holds all that text, page, trace and differences are written from."""

import json
from typing import Any

import pytest

import spmd
from spmd.errors import ArgumentError
from spmd.explain.data import PlanReport, from_json
from spmd.explain.page.page import notebook_cell, render
from spmd.explain.text import explain_program
from spmd.explain.trace import trace_of
from tests.explain.programs import pipelined_step, trained


@pytest.fixture(scope="module", params=["training", "pipeline"])
def program(request: Any) -> spmd.Lowered:
    return trained(False) if request.param == "training" else pipelined_step("gpipe")


@pytest.fixture(scope="module")
def read(program: spmd.Lowered) -> PlanReport:
    return from_json(json.loads(json.dumps(program.to_json())))


def test_text_page_and_trace_use_nothing_else(program: spmd.Lowered, read: PlanReport) -> None:
    whole = program._report()
    assert explain_program(read) == explain_program(whole) == program.explain(prices=False)
    assert render(read) == render(whole) and notebook_cell(read) == program._repr_html_()
    assert trace_of(read) == trace_of(whole)
    assert "nothing changed" in spmd.explain.diff(read, program)


def test_it_is_complete(program: spmd.Lowered, read: PlanReport) -> None:
    data = program.to_json()
    assert (data["format"], data["version"], data["name"]) == ("spmd plan", 1, program.name)
    assert data["mesh"]["axes"] == [list(pair) for pair in program.mesh.shape.items()]
    assert len(data["arguments"]) == len(program.request.arg_names)
    assert {leaf["origin"] for leaf in data["arguments"]} != {""}
    sent = sum(c["bytes"] * c["count"] for c in data["collectives"])
    assert sent == data["sent_bytes"] > 0 and all(c["source"] for c in data["collectives"])
    assert data["timeline"]["seconds"] == program.cost
    assert len(data["timeline"]["slots"]) == len(program.timeline.slots)
    assert max(map(sum, data["curve"]["steps"])) == pytest.approx(data["peak_bytes"], rel=0.2)
    assert read.to_json() == data


def test_what_is_no_plan() -> None:
    every: list[Any] = [{}, [], {"format": "spmd plan", "version": 99}]
    for data in every:
        with pytest.raises(ArgumentError, match="not a plan that can be read"):
            from_json(data)
