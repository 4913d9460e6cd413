"""What a report opens with: the largest costs, in text, on the page and in a notebook."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.costs import (
    Collective,
    Cost,
    code_lines,
    code_of,
    collective_section,
    costs,
    seconds_by_kind,
    totals,
)
from spmd.explain.page.page import notebook_cell
from spmd.explain.words import Table
from tests.explain.test_report import _Reader


@pytest.fixture(scope="module")
def lowered(devices8: Any) -> Any:
    """Two layers of one function, weights split so that each has to be gathered."""
    mesh = spmd.make_mesh(data=4, model=2)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def forward(layers: Any, x: Any) -> Any:
        for w in layers:
            x = layer(x, w)
        return x

    struct = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    weights = [spmd.mark_sharding(struct, mesh, ("data", None))] * 2
    x = spmd.mark_sharding(struct, mesh, ("data", None))
    return spmd.jit(forward, mesh=mesh).lower(weights, x, topology=spmd.Topology("h200:8"))


@pytest.fixture(scope="module")
def found(lowered: Any) -> tuple[Cost, ...]:
    return costs(lowered.timeline, lowered.mesh, lowered.stages.plan.topology)


def test_layers_count_together_and_costs_add_up_to_the_predicted_time(
    found: tuple[Cost, ...], lowered: Any
) -> None:
    gathers = [cost for cost in found if cost.kind == "all_gather"]
    assert len(gathers) == 1
    assert (gathers[0].ops, gathers[0].axes) == (2, "data")
    assert "layers/*" in gathers[0].reason
    assert sum(cost.seconds for cost in found) == pytest.approx(lowered.cost, rel=1e-6)
    by_kind = seconds_by_kind(found)
    assert by_kind["compute"] == pytest.approx(lowered.timeline.compute_seconds)
    hidden = sum(cost.hidden for cost in found)
    comm = lowered.timeline.comm_seconds
    assert by_kind["all_gather"] == pytest.approx(comm - hidden)


def test_the_text_of_source_lines_stands_beside_them_if_it_is_here(found: tuple[Cost, ...]) -> None:
    gather = next(cost for cost in found if cost.kind == "all_gather")
    (place, text), (caller, called) = code_lines(gather, code_of(found))
    assert "test_costs.py" in place and "(layer)" in place.replace("lowered.<locals>.", "")
    assert text == "return jnp.tanh(x @ w)"
    assert "forward" in caller
    assert called == "x = layer(x, w)"
    frame = found[0].frames[0]._replace(file="/nowhere/model.py")
    moved = found[0]._replace(frames=(frame,))
    assert code_lines(moved, code_of([moved])) == ((str(frame), ""),)


def test_the_report_opens_with_them(lowered: Any) -> None:
    text = lowered.explain(prices=False)
    opening = text[: text.index("program: forward")]
    assert re.match(r"the \d largest of \d+ costs?: [\d.]+% of the predicted ", opening)
    assert re.search(r"[\d.]+% +[\d.]+ us +all_gather over data +2 ops", opening)
    assert "return jnp.tanh(x @ w)" in opening


def test_a_notebook_shows_the_first_screen_and_escapes_names(lowered: Any) -> None:
    html = lowered._repr_html_()
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.outside == []
    assert "all_gather over data" in html
    assert "return jnp.tanh(x @ w)" in html
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    rules = re.findall(r"(?:^|\}|\{)\s*([^{}@]+)\{", style[1])
    selectors = [s.strip() for rule in rules for s in rule.split(",")]
    assert selectors
    assert all(s.startswith((".spmd ", ".spmd-cell", ".spmd")) for s in selectors), selectors
    lambdas = notebook_cell(replace(lowered._facts(), title="<lambda>").report())
    assert "<lambda>" not in lambdas
    assert "&lt;lambda&gt;" in lambdas


def test_repr_is_one_line(lowered: Any, devices8: Any) -> None:
    assert re.fullmatch(
        r"<spmd\.Lowered forward on data=4, model=2 \(8 h200\): 2 collectives, 4.5 MiB sent per "
        r"device, [\d.]+ MiB memory per device, predicted [\d.]+ us>",
        repr(lowered),
    )
    double = spmd.jit(jnp.sin, mesh=spmd.make_mesh(data=8))
    assert repr(double) == "<spmd.jit of sin on data=8: compiled for 0 kinds of call>"
    double(jnp.ones(8))
    assert repr(double) == "<spmd.jit of sin on data=8: compiled for 1 kind of call>"
    assert "the mesh of its arguments" in repr(spmd.jit(jnp.sin))


def test_nothing_to_spend_time_on_or_to_report(devices8: Any) -> None:
    lowered = spmd.jit(lambda x: x, mesh=spmd.make_mesh(data=8)).lower(1.0)
    assert "collectives: 0" in lowered.explain()
    assert "0 of them split" in lowered.summary()
    assert lowered.explain(prices=False).startswith("program: <lambda>")
    assert "memory of each device" in lowered._repr_html_()


def test_equal_collectives_are_one_row_and_no_byte_is_lost() -> None:
    one = Collective("all_gather", ("data",), 100, 4, "t.py:1", "because", 1e-6, "layer")
    other = one._replace(source="t.py:2", bytes=1000)
    body = collective_section([one, other, one]).body
    assert isinstance(body, Table)
    assert [(row[-1][0], row[2], row[5]) for row in body.rows] == [
        ("t.py:2", 1, 4000),
        ("t.py:1", 2, 800),
    ]
    (total,) = totals([one, other, one], lambda c: c.kind).values()
    assert (total.ops, total.runs, total.bytes) == (3, 12, 4800)
    assert total.seconds == pytest.approx(12e-6)
