"""The report in a real browser: it needs nothing from outside, sorts, filters, has its charts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.costs import totals
from tests.explain.browser import Browser, find_browser
from tests.explain.programs import pipelined_step

PROGRAM = find_browser() or ""
pytestmark = pytest.mark.skipif(
    not PROGRAM, reason="no Chromium on this machine: apt-get install chromium"
)

TABLE = "document.querySelector('#collectives').closest('section').querySelector('table')"


@pytest.fixture(scope="module")
def lowered() -> Any:
    """The gradient of a stack of layers, forward and backward a loop."""
    mesh = spmd.make_mesh(data=4, model=2)

    def loss(weights: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return spmd.mark_sharding(jnp.tanh(h @ w), mesh, ("data", None)), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    specs = ((None, "data", "model"), ("data", None))
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 64), (64, 64))]
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=specs)
    return step.lower(*structs, topology=spmd.Topology("h200:8"))


@pytest.fixture(scope="module")
def report(lowered: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    lowered.report(str(path))
    return path


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Browser]:
    with Browser(PROGRAM, report.parent / "profile") as browser:
        browser.open(report)
        yield browser
        assert {url for url in browser.requests if not url.startswith("data:")} == {report.as_uri()}


def keys(page: Browser, column: int) -> Any:
    """What the rows that are shown sort by in one column, from the top."""
    rows = f"[...{TABLE}.tBodies[0].rows].filter(r => !r.hidden)"
    return page.run(f"{rows}.map(r => r.cells[{column}].dataset.v)")


def click_head(page: Browser, column: int) -> Any:
    """Clicks a column's head; how it says that it is sorted."""
    head = f"{TABLE}.tHead.rows[0].cells[{column}]"
    return page.run(f"({head}.querySelector('button').click(), {head}.ariaSort)")


def test_the_largest_costs_are_on_the_first_screen_and_parts_unfold_by_their_link(
    page: Browser,
) -> None:
    part = "document.querySelector('#collectives').closest('details')"
    assert page.run(f"{part}.open") is False
    page.run("document.querySelector('nav a[href=\"#collectives\"]').click()")
    assert page.run(f"{part}.open") is True
    bottom = "document.querySelector('.costs li').getBoundingClientRect().bottom"
    assert page.run(f"{bottom} + scrollY < 900")
    assert "jnp.tanh(h @ w)" in page.run("document.querySelector('.costs').textContent")


def test_the_table_sorts_by_a_click(page: Browser) -> None:
    total = [float(key) for key in keys(page, 5)]
    assert total == sorted(total, reverse=True)
    assert click_head(page, 5) == "ascending"
    assert [float(key) for key in keys(page, 5)] == sorted(total)
    assert click_head(page, 0) == "descending"
    assert page.run(f"{TABLE}.querySelectorAll('th[aria-sort]').length") == 1


def test_the_table_sorts_by_the_keyboard(page: Browser) -> None:
    page.run(f"{TABLE}.tHead.rows[0].cells[6].querySelector('button').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
    seconds = [float(key) for key in keys(page, 6)]
    assert seconds == sorted(seconds, reverse=True)


def test_the_filter_leaves_what_has_all_words(page: Browser, lowered: Any) -> None:
    box = f"{TABLE}.closest('.tabled')"
    page.run(f"{box}.querySelector('input').focus()")
    page.type("all_gather data")
    found = totals(lowered.collectives, lambda c: c._replace(layer=""))
    kinds = keys(page, 0)
    assert 0 < len(kinds) < len(found)
    assert set(kinds) == {"all_gather"}
    said = page.run(f"{box}.querySelector('output').textContent")
    assert said == f"{len(kinds)} of {len(found)} rows"
    page.run(
        f"(i => {{ i.value = ''; i.dispatchEvent(new Event('input')) }})"
        f"({box}.querySelector('input'))"
    )
    assert len(keys(page, 0)) == len(found)


def test_the_arrow_keys_go_along_the_timeline(page: Browser) -> None:
    page.run("document.querySelector('svg.timeline').focus()")
    readout = "document.querySelector('.scroll:has(svg.timeline) + output').textContent"
    said = []
    for _ in range(3):
        page.press("ArrowRight")
        said.append(page.run(readout))
    assert len(set(said)) == 3
    page.press("ArrowLeft")
    assert page.run(readout) == said[1]


CLIPPED = """(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const own = node.parentElement;
    if (!node.data.trim() || own.closest("script,style,title") || !own.checkVisibility()) continue;
    const range = document.createRange(), said = `${own.tagName} ${node.data}`;
    range.selectNodeContents(node);
    const text = range.getBoundingClientRect();
    const cuts = box => text.left < box.left - 1 || text.right > box.right + 1
      || text.top < box.top - 1 || text.bottom > box.bottom + 1;
    const scrolls = own.closest(".scroll");
    if (!own.ownerSVGElement && own.clientWidth && own.scrollWidth > own.clientWidth)
      found.push(said);
    if (own.ownerSVGElement && cuts(own.ownerSVGElement.getBoundingClientRect()))
      found.push(said);
    if (!scrolls && (text.left < 0 || text.right > innerWidth)) found.push(said);
    for (let box = own; box && !(own instanceof SVGElement); box = box.parentElement)
      if (getComputedStyle(box).overflowX === "hidden" && cuts(box.getBoundingClientRect()))
        found.push(said);
  }
  return found;
})()"""
"""Texts that are shown in part: their box, their picture or the page ends before them."""

BLANK = """(() => {
  const found = [];
  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      let used = 0, whole = 0;
      for (const row of table.tBodies[0].rows) {
        const cell = row.cells[column], range = document.createRange();
        range.selectNodeContents(cell);
        used += Math.min(range.getBoundingClientRect().height, cell.clientHeight);
        whole += cell.clientHeight;
      }
      if (used < whole / 2) found.push(`${head.textContent}: ${used} of ${whole}`);
    });
  }
  return found;
})()"""
"""Columns of tables of whose height texts take less than half."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: Any) -> Iterator[Browser]:
    """All parts of a report of tensors that are much wider than high, and of a long source line."""
    mesh = spmd.make_mesh(data=4, model=2)

    def loss(weights: Any, tall_and_wide: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(tall_and_wide @ weights["in"]) @ weights["out"]) ** 2)

    weights = {
        "in": jax.ShapeDtypeStruct((8192, 64), jnp.float32),
        "out": jax.ShapeDtypeStruct((64, 8192), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, 8192), jnp.float32)
    specs = ({"in": ("data", "model"), "out": ("model", "data")}, ("data", None))
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=specs)
    folder = tmp_path_factory.mktemp("narrow")
    step.lower(weights, x, topology=spmd.Topology("h200:8")).report(str(folder / "report.html"))
    with Browser(PROGRAM, folder / "profile") as browser:
        browser.open(folder / "report.html")
        browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
        yield browser


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_text_is_cut_off(narrow: Browser, width: int) -> None:
    narrow.resize(width)
    assert narrow.run("document.querySelector('.tiles').textContent.includes('16 over data')")
    assert narrow.run(CLIPPED) == []
    assert narrow.run("document.documentElement.scrollWidth <= innerWidth")
    if width < 1000:
        assert narrow.run(BLANK) == []


def test_tables_sort_on_a_narrow_page(narrow: Browser) -> None:
    narrow.resize(390)
    assert click_head(narrow, 5) == "ascending"
    total = [float(key) for key in keys(narrow, 5)]
    assert len(total) > 1 and total == sorted(total)
    label = "getComputedStyle(document.querySelector('#collectives').closest('section')"
    assert "bytes" in narrow.run(f"{label}.querySelector('td:nth-child(6)'), '::before').content")


@pytest.mark.thorough
def test_a_pipelines_picture_scrolls_inside_a_narrow_page(tmp_path: Path) -> None:
    pipelined_step("interleaved", 4, 32).report(str(tmp_path / "report.html"))
    with Browser(PROGRAM, tmp_path / "profile") as browser:
        browser.resize(420)
        browser.open(tmp_path / "report.html")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        # Squares keep their size, so that their numbers can be read.
        picture = "document.querySelector('figure .scroll svg')"
        assert browser.run(f"{picture}.getBoundingClientRect().width > 1000")
        assert browser.run(f"{picture}.parentElement.getBoundingClientRect().right <= innerWidth")
        titles = f"[...{picture}.querySelectorAll('title')].map(t => t.textContent)"
        assert "step 66: stage 3 works on microbatch 31" in browser.run(titles)[-1]


def test_it_is_dark_where_the_system_is(page: Browser) -> None:
    for scheme in ("dark", "light"):
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        page.call("Emulation.setEmulatedMedia", features=[wanted])
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(",")))
        assert (brightness < 200) is (scheme == "dark")
