"""The text and the HTML report of one compiled training step."""

import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.errors import ArgumentError
from spmd.explain.costs import totals
from spmd.explain.facts import proof_text
from spmd.explain.page.page import render
from spmd.explain.page.pictures import mesh_picture, tile_picture
from spmd.explain.text import explain_program, explain_value, summarize
from spmd.explain.words import bytes_text, parts_of_axes, seconds_text, source_text
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from tests.mesh.shardings import parse_sharding
from tests.programs import mlp

# Text.


@pytest.fixture(scope="module")
def text(compiled: Any) -> str:
    return explain_program(compiled._report(prices=True))


def alike(collectives: Any) -> Any:
    return totals(collectives, lambda c: c._replace(layer="")).values()


def test_text_names_every_argument_result_and_collective_and_where_shardings_come_from(
    compiled: Any, text: str
) -> None:
    program = compiled.stages.plan.program
    for name in (*program.arg_names, *program.result_names):
        assert name in text
    for row in alike(compiled.collectives):
        assert source_text(row.like.source) in text
        assert row.like.reason in text
    for section in ("predicted", "largest values inside", "totals by kind", "memory per device"):
        assert section in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["params/w_in"].endswith("marked")
    assert rows["0/w_in"].endswith("from argument params/w_in")
    assert '("data", "model")' in rows["0/w_in"]


def test_bytes_add_up_and_compute_has_no_exchange_for_its_reason(compiled: Any) -> None:
    total = sum(c.bytes * c.count for c in compiled.collectives)
    assert total > 0
    assert sum(row.bytes for row in alike(compiled.collectives)) == total
    assert (
        sum(row.bytes for row in totals(compiled.collectives, lambda c: (c.kind, c.axes)).values())
        == total
    )
    figures = compiled._facts()
    assert figures.sent_bytes == total
    assert sum(leaf.local.bytes for leaf in figures.leaves[0]) == compiled.memory.arguments
    costs = compiled._facts().costs
    assert {cost.reason for cost in costs if cost.kind == "compute"} == {""}
    assert all(cost.reason for cost in costs if cost.kind != "compute")


def test_origins_that_follow_another_argument_name_it(devices8: Any) -> None:
    text = mlp(spmd.make_mesh(data=4, model=2)).lower().explain(prices=False)
    assert "like argument params/w_in" in text
    assert "from argument params/w_in" in text
    assert "from like" not in text


def test_parts_of_axes_are_explained_where_they_are_named() -> None:
    """Half of an axis of four splits what the other half does not."""
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))

    def halves(x: Any) -> Any:
        return jax.numpy.tanh(x.reshape(2, 2, 1 << 20)).reshape(4, 1 << 20)

    struct = jax.ShapeDtypeStruct((4, 1 << 20), np.float32)
    jitted = spmd.jit(halves, mesh=mesh, in_specs=(("data", None),))
    lowered = jitted.lower(struct, topology=spmd.Topology("h200:8"))
    said = "data:(1)2 is the outer part of axis data, 4 = 2 x 2"
    assert said in lowered.explain(prices=False)
    value = next(op.results[0] for op in lowered.stages.plan.program.walk())
    assert said in lowered.explain(f"%{value}", prices=False)
    assert f"{said}." in render(lowered._report())
    whole = spmd.jit(lambda x: x * 2, mesh=mesh, in_specs=(("data", None),)).lower(
        np.zeros((4, 64), np.float32), topology=spmd.Topology("h200:8")
    )
    assert "part of axis" not in whole.explain(prices=False) + render(whole._report())


def test_parts_of_axes_by_where_they_are() -> None:
    mesh = Mesh(None, (256, 8), ("data", "a.b"))
    assert parts_of_axes('("data:(1)64", "data:(64)4", "a.b:(2)2") data:(1)64', mesh) == [
        "data:(1)64 is the outer part of axis data, 256 = 64 x 4",
        "data:(64)4 is the inner part of axis data, 256 = 64 x 4",
        "a.b:(2)2 is the middle part of axis a.b, 8 = 2 x 2 x 2",
    ]
    assert parts_of_axes('("data", None) at model.py:12 (data)', mesh) == []


def test_figures_print_in_a_line_and_times_on_cpus_are_for_devices_of_their_own(
    compiled: Any,
) -> None:
    use, timeline = compiled.predicted_memory, compiled.timeline
    for thing in (use, timeline):
        assert len(repr(thing)) < 200 and "\n" not in repr(thing)
    given = bytes_text(use.arguments)
    assert repr(use).startswith(f"<MemoryUse: peak {bytes_text(use.peak)} (arguments {given}, ")
    assert repr(timeline).startswith(f"<Timeline: {seconds_text(timeline.seconds)} (")
    assert f"{len(timeline.slots)} slots" in repr(timeline)
    assert "Times are predicted for 8 devices of their own." in render(compiled._report())
    there = spmd.jit(lambda x: x + 1, mesh=compiled.mesh).lower(
        np.ones(8, np.float32), topology=spmd.Topology("h200:8")
    )
    assert "of their own" not in render(there._report())


def test_text_says_how_sure_the_solver_is(compiled: Any, text: str) -> None:
    assert "exact: of every placement none has a smaller sum of costs" in text
    wide = spmd.Mesh(None, (2, 2, 2), ("a", "b", "c"))
    jitted = spmd.jit(lambda x: x @ x, mesh=wide, in_specs=(("a", "b"),))
    plan = jitted.lower(np.zeros((8, 8), np.float32), topology=spmd.Topology("h200:8")).stages.plan
    assert ": of every placement of two axes at a time none has a smaller" in proof_text(plan)
    unsure = plan._replace(solver="local search", gap=0.021)
    assert "at most 2.1% above the least" in proof_text(unsure)
    assert proof_text(plan._replace(solver="greedy")) == "greedy"
    assert "the plan of its loops took none" in proof_text(plan._replace(like_loops=True))


def test_the_summary_is_short_and_one_number_is_the_peak(compiled: Any) -> None:
    short = summarize(compiled._facts())
    assert 8 <= len(short.splitlines()) <= 25
    assert "5, 5 of them split" in short
    for row in totals(compiled.collectives, lambda c: (c.kind, c.axes)).values():
        assert re.search(rf"{row.like.kind} +{row.like.axes[0]} +{row.ops} +{row.runs} ", short)
    peak = bytes_text(compiled.predicted_memory.peak)
    assert compiled.predicted_memory.peak != compiled.memory.peak_bytes
    page = render(compiled._report())
    allocated = f"XLA allocates {bytes_text(compiled.memory.peak_bytes)}"
    assert all(s in compiled.summary() for s in (f"{peak} of 8 GiB predicted", allocated))
    assert re.search(rf"peak, predicted +{peak} of 8 GiB", compiled.explain(prices=False))
    assert f"{peak} memory per device" in repr(compiled)
    assert f"<b>{peak}</b>" in page and f"peak {peak}" in page
    assert page.count(allocated) == 2


# One value.


def test_why_an_argument_lies_so(compiled: Any) -> None:
    why = explain_value(compiled.stages, "params/w_in")
    assert "argument params/w_in (%" in why
    assert "dim 0 (size 16) is split over data" in why
    assert 'takes it as (None, "model")' in why
    assert "all_gather over data: 768 B sent" in why
    assert "closed by the mark: argument batch/x" in explain_value(compiled.stages, "batch/x")
    bias = explain_value(compiled.stages, "params/<b>&")
    assert "dim 0 (size 8) is split over data, model" in bias
    assert "no mark asks for it: the planner's choice" in bias
    x = explain_value(compiled.stages, "batch/x")
    assert "dim 1 (size 16) is not split" in x
    with pytest.raises(ArgumentError, match=r"close to it: .*params/w_in"):
        explain_value(compiled.stages, "params/win")
    for name in ("", "%100000", "%x"):
        with pytest.raises(ArgumentError, match="no value"):
            explain_value(compiled.stages, name)


def test_every_value_can_be_explained_and_says_what_is_still_owed(compiled: Any) -> None:
    stages = compiled.stages
    values = [op.results[0] for op in stages.plan.program.walk() if op.name.endswith("dot_general")]
    owed = [v for v in values if stages.plan.states[v].partial]
    assert owed
    for value in owed:
        assert re.search(r"(all_reduce|reduce_scatter) over", explain_value(stages, f"%{value}"))
    for number in range(len(compiled.stages.plan.program.types)):
        assert f"%{number}" in explain_value(compiled.stages, f"%{number}")


# HTML.


class _Reader(HTMLParser):
    """Checks that tags close, and keeps tables' rows and what would be loaded from elsewhere."""

    VOID = ("meta", "br", "wbr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.rows += tag == "tr"
        self.outside += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(compiled: Any) -> str:
    return render(compiled._report(prices=True))


def test_page_is_well_formed_needs_nothing_else_and_is_written(
    page: str, compiled: Any, tmp_path: Any
) -> None:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.outside == []
    assert "url(http" not in page
    assert "<b>&</" not in page
    assert "&lt;b&gt;&amp;" in page
    path = tmp_path / "report.html"
    compiled.report(str(path))
    assert path.read_text(encoding="utf-8") == page


def test_page_has_every_collective(compiled: Any, page: str) -> None:
    plain = unescape(re.sub(r"<[^>]*>", "", page))
    for row in alike(compiled.collectives):
        assert row.like.reason in plain
        assert row.like.source in unescape(page)
    keys = re.findall(r'data-v="([^"]*)"', page[page.index('id="collectives"') :])
    total = sum(c.bytes * c.count for c in compiled.collectives)
    rows = len(alike(compiled.collectives))
    assert sum(int(keys[8 * i + 5]) for i in range(rows)) == total


def test_pictures_show_every_tile() -> None:
    mesh = Mesh(None, (4, 2), ("data", "model"))
    type_ = TensorType((8, 3, 16), "f32")
    svg, down, across = tile_picture(type_, parse_sharding("[{data}, {}, {model}]", mesh), mesh)
    assert svg.count('class="edge"') == 8
    assert "hatch" not in svg
    assert (down, across) == ("8 over data", "16 over model")
    shared, down, across = tile_picture(type_, parse_sharding("[{data}, {}, {}]", mesh), mesh)
    assert shared.count('class="edge"') == 4
    assert shared.count("url(#hatch)") == 4
    assert (down, across) == ("8 over data", "16")
    svg, down, across = mesh_picture(mesh)
    assert svg.count('class="edge"') == 8
    assert (down, across) == ("data", "model")


def test_pictures_say_how_much_of_many_pieces_they_draw() -> None:
    mesh = Mesh(None, (256, 2), ("data", "model"))
    svg, down, _ = mesh_picture(mesh)
    assert svg.count('class="edge"') == 64
    assert down == "data (32 of 256 drawn)"
    sharding = parse_sharding("[{data}, {}]", mesh)
    assert tile_picture(TensorType((1024, 8), "f32"), sharding, mesh)[1:] == (
        "1024 over data (32 of 256 drawn)", "8",
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(), (1,), (8,), (2, 3, 5), (64, 128)])
def test_pictures_of_any_mesh(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(None, sizes, [f"a{i}" for i in range(len(sizes))])
    assert 1 <= mesh_picture(mesh)[0].count('class="edge"') <= 256
    for rank in range(3):
        dims = (tuple(range(len(mesh.atoms))),) + ((),) * (rank - 1) if rank else ()
        tile_picture(TensorType((1 << 13,) * rank, "f32"), Sharding(dims), mesh)
