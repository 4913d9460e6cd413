"""The text of every stage of one small program: a two-layer MLP's training step."""

import re
from collections.abc import Callable

import pytest

import spmd
from spmd.lowering.expand import expand
from tests.programs import in_order, mlp

STAGES = ("program", "propagated", "planned", "local", "optimized", "emitted")


@pytest.fixture(scope="module")
def lowered() -> spmd.Lowered:
    return mlp(spmd.make_mesh(data=4, model=2)).lower()


@pytest.mark.parametrize("stage", ["planned", "optimized"])
def test_stage(stage: str, lowered: spmd.Lowered, golden: Callable[[str, str], None]) -> None:
    golden(f"mlp_{stage}", in_order(lowered.as_text(stage)))


def test_what_the_plan_and_rewrites_change(
    lowered: spmd.Lowered, golden: Callable[[str, str], None]
) -> None:
    """Until a program is local, its stages differ in the shardings behind its lines alone."""
    texts = (in_order(lowered.as_text(stage)).splitlines() for stage in STAGES[:3])
    program, propagated, planned = texts
    for shown in (propagated, planned):
        assert [line.partition("  // ")[0] for line in shown] == program
    before = [old for old, new in zip(propagated, planned, strict=True) if old != new]
    golden("mlp_propagated", "\n".join(before))
    local, optimized = (lowered.as_text(stage).splitlines() for stage in ("local", "optimized"))
    golden("mlp_local", "\n".join(line for line in local if line not in optimized))


def test_what_is_emitted(lowered: spmd.Lowered, golden: Callable[[str, str], None]) -> None:
    """One device's ops in their order; how each kind of op is written, by the first of them."""
    optimized, text = lowered.stages.optimized, re.sub(" loc\\(.*", "", lowered.as_text("emitted"))
    names = re.findall(r'(?m)^%\d.* = "(.*?)"', text)
    assert names == [op.name for op in expand(optimized.program, optimized.mesh).walk()]
    written: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith("#loc"):
            found = re.search(r'"(stablehlo\.\w+)"', line)
            written.setdefault(found[1] if found else line, line)
    golden("mlp_emitted", "\n".join(written.values()))


def test_compiling_twice_gives_the_same_text(lowered: spmd.Lowered) -> None:
    again = mlp(spmd.make_mesh(data=4, model=2)).lower()
    for stage in STAGES:
        assert again.as_text(stage) == lowered.as_text(stage)
