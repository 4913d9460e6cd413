"""What reports say of pipelines over stages, in text and as a picture."""

import re
from typing import Any

import pytest

from spmd.explain.page.page import render
from spmd.explain.page.pictures import pipelines, shown_steps
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
    assert row.held > 0


def test_text_and_page_have_the_same_facts(gpipe: Any) -> None:
    assert_text_and_page_have(pipeline_rows(gpipe.stages), gpipe, "pipelines")


def test_the_picture_has_every_step(gpipe: Any) -> None:
    page = pipelines(gpipe._facts())
    for stage in range(4):
        for step in range(11):
            idle = f"step {step}: stage {stage} has nothing to do"
            busy = f"step {step}: stage {stage} works on microbatch {step - stage}<"
            assert (busy if 0 <= step - stage < 8 else idle) in page
    assert len(re.findall(r"stage \d has nothing to do", page)) == 4 * 3
    assert [name in page for name in (">fill<", ">all stages work<", ">drain<")] == [True] * 3


def test_long_pipelines_are_cut_in_the_middle() -> None:
    page = pipelines(pipelined_step("interleaved", 2, 32)._facts())
    assert "works on microbatch 0, chunk 1 of its layers" in page
    assert "step 0: stage 0" in page and "step 64: stage 1" in page
    assert "step 32: stage 0" not in page and "…" in page
    assert "chunk" not in pipelines(pipelined_step("1f1b", 2)._facts())


def test_fewer_microbatches_than_stages() -> None:
    page = pipelines(pipelined_step("gpipe", 8, 2)._facts())
    assert ">some work<" in page and ">all stages work<" not in page
    assert len(re.findall(r"stage \d has nothing to do", page)) == 8 * 7


def test_a_program_without_pipelines_has_no_section(compiled: Any) -> None:
    page = render(compiled._facts())
    assert 'id="pipelines"' not in page and 'id="rings"' not in page


@pytest.mark.parametrize("count", [1, 5, 6, 100])
def test_shown_steps(count: int) -> None:
    shown = shown_steps(count, 5)
    assert len(shown) == min(count, 5)
    assert (None in shown) is (count > 5)
    assert (shown[0], shown[-1]) == (0, count - 1)
