"""The tool that looks for marks which make plans faster: what it draws, and what it says."""

import random

import pytest

from tools.placements import (
    Drawn,
    Explored,
    Step,
    drawn,
    explored,
    in_own_process,
    marks_of,
    report,
    specs_of,
    summary,
)

PROGRAM = Drawn((None,), (Step("tanh", (0,)),), ((1024, 2048), (1024, 2048)), (1,))
BEATEN = Explored(PROGRAM, 9, 2.2e-5, 2e-5, {1: ("data", None)})


@pytest.mark.thorough
def test_a_seed_gives_the_same_everywhere() -> None:
    assert in_own_process(5, 2) == explored(5, 2)


@pytest.mark.parametrize("seed", range(20))
def test_programs_are_small_and_well_typed(seed: int) -> None:
    program = drawn(random.Random(seed))
    assert 2 <= len(program.steps) <= 10
    for number, step in enumerate(program.steps, len(program.specs)):
        assert all(i < number for i in step.reads)
    assert program.results and set(program.results).isdisjoint(program.inner)


def test_few_marks_are_all_tried() -> None:
    every = list(marks_of(PROGRAM, 10, random.Random(0)))
    assert len(every) == 1 + len(specs_of(2)) == 10
    assert {marks.get(1) for marks in every} == {None, *specs_of(2)}
    assert len(list(marks_of(PROGRAM, 9, random.Random(0)))) == 9


def test_a_beaten_plan_is_told_with_its_marks_and_counted() -> None:
    text = report(BEATEN)
    assert "1.100 (22.0 us, 20.0 us with these marks)" in text
    assert "%1 = tanh %0: 1024x2048 ('data', None)" in text
    even = BEATEN._replace(fastest=BEATEN.free)
    every: list[Explored | str] = [BEATEN, even, "PlanError: no"]
    assert summary(every) == (
        "2 programs, 18 draws, 1 failed: 1 beaten by more than 1%, worst 1.100"
    )
    assert report("PlanError: no") == "PlanError: no"
