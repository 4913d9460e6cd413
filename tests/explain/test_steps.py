"""What reports say of pipelines over stages, and of attention whose keys go round a ring."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.costs import spent
from spmd.explain.page.page import render
from spmd.explain.steps import pipeline_rows, rings
from spmd.explain.words import bytes_text
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


def test_a_program_without_pipelines_has_no_section(compiled: Any) -> None:
    page = render(compiled._report())
    assert 'id="pipelines"' not in page and 'id="rings"' not in page


def test_what_runs_at_the_same_time_counts_once(gpipe: Any) -> None:
    """Sums over `data` and over `stage` go over links of their own."""
    timeline, topology = gpipe.timeline, gpipe.stages.plan.topology
    whole = sum(part.seconds for part in spent(timeline, topology))
    assert 0.9 * timeline.seconds < whole < 1.001 * timeline.seconds


LENGTH, HEADS, KEY_HEADS, WIDTH = 131_072, 32, 4, 128  # heads that eight devices do not divide


def lowered(length: int, zigzag: int = 1) -> spmd.Lowered:
    """The gradient of two layers of attention, eight devices with a part of the sequence each."""
    mesh, spec = spmd.Mesh(None, (8,), ("seq",)), (None, "seq")
    shapes = [(1, length, n, WIDTH) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(q: Any, k: Any, v: Any) -> Any:
        for _ in range(2):
            q = spmd.ops.attention(q, k, v, zigzag=zigzag)
        return jnp.sum(q.astype(jnp.float32))

    step = spmd.jit(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=(spec,) * 3)
    return step.lower(*args, topology=spmd.Topology("h200:8"))


@pytest.fixture(scope="module")
def long() -> Any:
    return lowered(LENGTH, 8)


def test_what_goes_round_is_counted(long: Any) -> None:
    items: Any = rings(long.stages.plan).body
    forward, backward = items
    piece = 2 * LENGTH // 8 * KEY_HEADS * WIDTH * 2  # keys and values, bf16
    assert forward.title == "spmd.attention: 8 pieces go round seq in zigzag order (2 alike)"
    assert dict(forward.rows)["each sends"] == f"{bytes_text(7 * piece)}, gathered or round"
    assert dict(backward.rows)["each sends"] == f"{bytes_text(14 * piece)}, gathered or round"
    held = f"{bytes_text(3 * piece)}; gathered {bytes_text(8 * piece)}"
    assert dict(forward.rows)["each holds"] == held


def test_text_and_page_have_the_same_facts(gpipe: Any, long: Any) -> None:
    items = [row.item for row in pipeline_rows(gpipe.stages)]
    assert_text_and_page_have(items, gpipe, "pipelines")
    assert_text_and_page_have(rings(long.stages.plan).body, long, "rings")


def test_what_is_gathered_is_said() -> None:
    items: Any = rings(lowered(2048).stages.plan).body
    item, *_ = items
    assert "8 pieces are gathered over seq" in item.title
    assert dict(item.rows)["each holds"].startswith("4 MiB; going round 1.5 MiB")
