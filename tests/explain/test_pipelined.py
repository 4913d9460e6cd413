"""What reports say of pipelines over stages, in text and on the page."""

from typing import Any

import pytest

from spmd.explain.costs import spent
from spmd.explain.page.page import render
from spmd.explain.steps import pipeline_rows
from tests.explain.programs import assert_text_and_page_have, pipelined_step


@pytest.fixture(scope="module")
def gpipe() -> Any:
    return pipelined_step("gpipe")


def test_what_is_sent_is_what_the_collectives_send(gpipe: Any) -> None:
    (row,) = pipeline_rows(gpipe.stages)
    assert row.travel is not None
    own = [c for c in gpipe.collectives if c.kind == "collective_permute"]
    assert row.travel.bytes == sum(c.bytes * c.count for c in own)
    assert row.travel.runs == sum(c.count for c in own) == 2 * 11
    whole = sum(c.seconds * c.count for c in own)
    assert 0 < row.travel.seconds <= whole * 1.001


def test_text_and_page_have_the_same_facts(gpipe: Any) -> None:
    assert_text_and_page_have([r.item for r in pipeline_rows(gpipe.stages)], gpipe, "pipelines")


def test_a_program_without_pipelines_has_no_section(compiled: Any) -> None:
    page = render(compiled._facts())
    assert 'id="pipelines"' not in page and 'id="rings"' not in page


def test_what_runs_at_the_same_time_counts_once(gpipe: Any) -> None:
    """Sums over `data` and over `stage` go over links of their own."""
    timeline, topology = gpipe.timeline, gpipe.stages.plan.topology
    whole = sum(part.seconds for part in spent(timeline, topology))
    assert 0.9 * timeline.seconds < whole < 1.001 * timeline.seconds
