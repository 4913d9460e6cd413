"""Plans of Llama training on slices that are not here: cells of the table, without the compiler."""

from __future__ import annotations

import pytest

from benchmarks.plan_llama import ROWS, lower, mfu, plan_cells


def test_one_row_without_the_compiler() -> None:
    row = ROWS["7b"]
    lowered = lower(row, 1024, 1)
    cells = plan_cells(row, 1024, 1, lowered)
    name, accumulate, sent, seconds, waiting, shares, count, permutes, memory = cells
    assert name == "llama2-7b, v4:2x2x4, 16x1, 256 x 1024"
    assert (accumulate, shares) == ("1", mfu(row, 1024, lowered.cost))
    # Three gathers of the weights in bf16 and one reduction of their gradients, at least.
    assert float(sent) > 3 * 2 * 6.6 * 15 / 16
    assert 0 <= float(waiting) < float(seconds)
    causal, palm = (float(share.rstrip("%")) for share in shares.split(" / "))
    assert 40 < causal < palm < 80
    assert int(count) > 32 * 7
    assert 0 <= int(permutes) <= int(count)
    assert 1.5 < float(memory) < 32
    # A loop-invariant mask is computed piece by piece: nobody holds it for the whole batch.
    types = lowered.stages.optimized.program.types
    assert not any(t.shape[:1] == (256,) and t.rank == 4 for t in types)


@pytest.mark.heavy
def test_accumulation_makes_room() -> None:
    row = ROWS["7b"]
    once, twice = (lower(row, 2048, n).predicted_memory.peak for n in (1, 2))
    assert twice < 0.75 * once
