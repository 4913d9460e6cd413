"""What reports say of attention whose keys go round a ring of devices, or could."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.costs import Cost
from spmd.explain.page.pictures import rings
from spmd.explain.steps import RingRow, ring_rows
from spmd.explain.words import bytes_text
from tests.explain.programs import assert_text_and_page_have

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


def travels(rows: list[RingRow]) -> list[Cost]:
    assert all(row.travel is not None for row in rows)
    return [row.travel for row in rows if row.travel is not None]


def test_what_goes_round_is_counted(long: Any) -> None:
    rows = ring_rows(long.stages)
    forward, backward = rows
    piece = 2 * LENGTH // 8 * KEY_HEADS * WIDTH * 2  # keys and values, bf16
    assert (forward.op, forward.ops) == ("spmd.attention", 2)
    assert (forward.pieces, forward.goes_round, forward.is_zigzag) == (8, True, True)
    assert forward.piece == piece and backward.piece == 2 * piece
    assert dict(forward.parts)["each sends"] == f"{bytes_text(7 * piece)}, gathered or round"
    held = f"{bytes_text(3 * piece)}; gathered {bytes_text(8 * piece)}"
    assert dict(forward.parts)["each holds"] == held
    own = [c for c in long.collectives if c.kind == "collective_permute"]
    assert sum(t.bytes for t in travels(rows)) == sum(c.bytes * c.count for c in own)
    assert sum(t.runs for t in travels(rows)) == sum(c.count for c in own)
    assert all(0 <= t.seconds < forward.arithmetic for t in travels(rows))


def test_text_and_page_have_the_same_facts(long: Any) -> None:
    assert_text_and_page_have(ring_rows(long.stages), long, "rings")


def test_what_is_gathered_is_said() -> None:
    short = lowered(2048)
    rows = ring_rows(short.stages)
    assert rows and not any(row.goes_round or row.travel for row in rows)
    page = rings(short._facts())
    assert "8 pieces are gathered over seq" in page
    assert dict(rows[0].parts)["each holds"].startswith("4 MiB; going round 1.5 MiB")
