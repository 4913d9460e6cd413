"""What is read of what the TPU compiler writes: of our program, and of plain `jax.jit`'s."""

from pathlib import Path

from benchmarks.hlo.arithmetic import matmul_flops
from benchmarks.hlo.collectives import hlo_collectives

TEXTS = Path(__file__).parent / "texts"

# Schedules for 16 chips, cut down to what readers look at. An iteration is a layer of 4096 x 11008
# bf16 weights; each chip has a share of them.
OURS = (TEXTS / "carried_gather.txt").read_text()
PEER = (TEXTS / "windowed_einsum.txt").read_text()
# Over four of the chips.
SCATTER = (TEXTS / "reduce_scatter.txt").read_text()

SHARE = 4096 * 11008 * 2 // 16


def found(text: str) -> list[tuple[str, int, int, bool]]:
    return [
        (c.kind, c.bytes, c.count, c.end is not None)
        for c in hlo_collectives(text, guess_trips=False)
    ]


def test_gathers_carried_by_products_and_fused_all_reduces() -> None:
    # Eight iterations; each gathers two weights, sending 15 of 16 shares, and sums one gradient.
    # The second gather stands in four fusions: its start, two products, its end.
    assert found(OURS) == [
        ("all_gather", 15 * SHARE, 8, False),
        ("all_gather", 15 * SHARE, 8, True),
        ("all_reduce", 2 * 15 * SHARE, 8, False),
    ]
    # Each chip uses a share of `all-reduce.5` only, but all of it is sent.
    kinds = [c.kind for c in hlo_collectives(OURS, scatter_slices=True)]
    assert kinds == ["all_gather", "all_gather", "all_reduce"]
    # 1040 rows of 4096 f32 stay here; those of the three other chips in the group are sent.
    assert found(SCATTER) == [("reduce_scatter", 3 * 1040 * 4096 * 4, 1, False)]


def test_loops_of_two_steps_run_half_as_often() -> None:
    # Eight layers, each with one permute before its loop and a gather behind it. The loop counts
    # 0, 2, 4, 6, starting from what the outer loop hands on: 4 iterations of 4 permutes.
    assert found(PEER) == [
        *[("collective_permute", SHARE, 8 * 4, True)] * 4,
        ("collective_permute", SHARE, 8, True),
        ("all_gather", 15 * SHARE, 8, False),
    ]


def test_products_of_a_windowed_einsum() -> None:
    # Each multiplies 512 x 512 (two shares of 256 rows) with 512 x 11008; 32 runs of each. Beside
    # our gather run two products of 512 x 4096 x 11008, eight times.
    assert matmul_flops(PEER) == 2 * 32 * 2 * 512 * 512 * 11008
    assert matmul_flops(OURS) == 2 * 8 * 2 * 512 * 4096 * 11008
