"""What reports say of pipelines over stages, in text and as a picture."""

import re
from typing import Any

import pytest

from spmd.explain.page.page import render
from spmd.explain.page.pictures import pipelines, steps_picture
from spmd.explain.steps import pipeline_rows
from spmd.ir.pipelines import Pipeline
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
    assert_text_and_page_have([r.item for r in pipeline_rows(gpipe.stages)], gpipe, "pipelines")


def test_the_picture_has_every_step(gpipe: Any) -> None:
    page = pipelines(gpipe._facts())
    for stage in range(4):
        for step in range(11):
            idle = f"step {step}: stage {stage} has nothing to do"
            busy = f"step {step}: stage {stage} works on microbatch {step - stage}<"
            assert (busy if 0 <= step - stage < 8 else idle) in page
    assert len(re.findall(r"stage \d has nothing to do", page)) == 4 * 3


def test_pictures_say_how_much_of_a_long_pipeline_they_draw() -> None:
    page, down, across = steps_picture(Pipeline("stage", 32, 64, 4))
    assert "works on microbatch 0, chunk 1 of its layers" in page
    assert "step 127: stage 15 " in page and "step 128" not in page and "stage 16 " not in page
    assert (down, across) == ("stages (16 of 32 drawn)", "steps (128 of 287 drawn)")
    assert "chunk" not in steps_picture(Pipeline("stage", 2, 8))[0]


def test_a_program_without_pipelines_has_no_section(compiled: Any) -> None:
    page = render(compiled._facts())
    assert 'id="pipelines"' not in page and 'id="rings"' not in page
