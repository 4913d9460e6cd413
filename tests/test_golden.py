"""The text of every stage of one small program: a two-layer MLP's training step."""

from collections.abc import Callable

import pytest

import spmd
from tests.programs import JAX, mlp

STAGES = ("program", "propagated", "planned", "local", "optimized", "emitted")


@pytest.fixture(scope="module")
def lowered() -> spmd.Lowered:
    return mlp(spmd.make_mesh(data=4, model=2)).lower()


@pytest.mark.parametrize("stage", STAGES)
def test_stage(stage: str, lowered: spmd.Lowered, golden: Callable[[str, str], None]) -> None:
    text = lowered.as_text(stage)
    if stage == "emitted":
        text = "\n".join(line.partition(" loc(")[0] for line in text.splitlines())
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))
    golden(f"jax-{JAX}/mlp_{stage}", text)


def test_compiling_twice_gives_the_same_text(lowered: spmd.Lowered) -> None:
    again = mlp(spmd.make_mesh(data=4, model=2)).lower()
    for stage in STAGES:
        assert again.as_text(stage) == lowered.as_text(stage)
