"""What the prediction of a device's memory says, on programs small enough to count by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from scripts.bench_memory import PROGRAMS
from spmd.planning.memory import MemoryUse, peak_memory

SIZE = 64 * 64 * 4


def use_of(
    fn: Any, *shapes: tuple[int, ...], donate: tuple[int, ...] = (), platform: str = "cuda"
) -> MemoryUse:
    """The prediction for a function of float32 arrays on one device."""
    mesh = spmd.Mesh(None, (1,), ("data",))
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    lowered = spmd.jit(fn, mesh=mesh, donate_argnums=donate).lower(*args)
    return peak_memory(lowered.stages.optimized.program, lowered.donated, platform)


SQUARE = (64, 64)


def test_elementwise_chains_take_no_memory() -> None:
    use = use_of(lambda x: jnp.maximum(x * 2 + 1, 0) * 3, SQUARE)
    assert (use.arguments, use.results, use.temporary) == (SIZE, SIZE, 0)


def test_products_are_stored_until_their_last_reader() -> None:
    def f(x: Any) -> Any:
        a = x @ x
        b = a @ x  # a and b at once
        return b @ b  # a is gone

    use = use_of(f, SQUARE)
    assert use.temporary == 2 * SIZE
    assert [b.name.split()[0] for b in use.at_peak()] == ["dot_general"] * 2


def test_a_chain_between_products_is_stored_in_the_place_of_its_operand() -> None:
    use = use_of(lambda x: (((x @ x) * 2 + 1) @ x) @ x, SQUARE)
    assert use.temporary == 2 * SIZE  # never three


def test_expensive_values_with_two_readers_are_computed_once() -> None:
    def both_ways(function: Any) -> Any:
        return lambda x: (lambda y: y.sum(0) + y.sum(1))(function(x))

    assert use_of(both_ways(jnp.exp), SQUARE).temporary >= SIZE
    assert use_of(both_ways(jnp.abs), SQUARE).temporary < SIZE


def test_donated_arguments_are_overwritten() -> None:
    def f(x: Any, y: Any) -> Any:
        return x + y @ y

    assert use_of(f, SQUARE, SQUARE).peak == 3 * SIZE + SIZE
    donated = use_of(f, SQUARE, SQUARE, donate=(0,))
    assert donated.aliased == SIZE
    assert donated.peak == 2 * SIZE + SIZE


def test_a_donated_argument_that_is_read_later_costs_a_copy() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        return y, (x @ x).sum()

    late = use_of(f, SQUARE, donate=(0,))
    assert late.temporary >= SIZE


def test_updates_of_a_donated_cache_are_in_place() -> None:
    def f(cache: Any, x: Any) -> Any:
        for i in range(3):
            cache = jax.lax.dynamic_update_slice(cache, x * i, (i, 0))
        return cache

    assert use_of(f, (1024, 64), (1, 64), donate=(0,)).temporary == 0
    assert use_of(f, (1024, 64), (1, 64)).temporary == 2 * 1024 * 64 * 4 - 1024 * 64 * 4


def test_carries_of_a_loop_lie_in_one_place() -> None:
    def f(x: Any, w: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return h @ w, None

        return jax.lax.scan(body, x, None, length=8)[0].sum()

    use = use_of(f, SQUARE, SQUARE)
    # The carry, and the product that is written beside it before the carry is free.
    assert use.temporary // SIZE == 2


def test_stacked_results_of_a_loop_are_written_in_place() -> None:
    def f(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return h + 1, h * 2

        return jax.lax.scan(body, x, None, length=8)[1] @ jnp.ones((64, 1))

    use = use_of(f, SQUARE)
    stacked = 8 * SIZE
    assert stacked <= use.temporary < stacked + 3 * SIZE


def test_buffers_cover_the_peak() -> None:
    use = use_of(lambda x: (x @ x) @ (x @ x), SQUARE)
    assert sum(b.bytes for b in use.at_peak()) == use.temporary
    assert all(b.start <= b.end for b in use.buffers)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("mlp 4x2", 0.9, 1.1),
        ("llama scan 8x1", 0.9, 1.1),
        ("llama scan 8x1 remat", 0.9, 1.1),
        ("moe 4x2", 0.9, 1.1),
    ],
)
def test_predictions_are_near_what_xla_reports(name: str, low: float, high: float) -> None:
    lowered = PROGRAMS[name](1).lower()
    reported = lowered.compile().memory
    assert not reported.is_predicted
    assert low < lowered.memory.peak_bytes / reported.peak_bytes < high


def test_arguments_and_results_are_exact() -> None:
    lowered = PROGRAMS["mlp 4x2"](1).lower()
    reported, predicted = lowered.compile().memory, lowered.memory
    assert predicted.is_predicted
    assert predicted.arguments == reported.arguments
    assert predicted.aliased == reported.aliased
    assert peak_memory(lowered.stages.optimized.program).aliased == 0


def test_cpus_hold_halves_as_floats() -> None:
    lowered = PROGRAMS["llama scan 8x1 bf16"](1).lower()
    program = lowered.stages.optimized.program
    narrow = peak_memory(program, lowered.donated)
    wide = peak_memory(program, lowered.donated, platform="cpu")
    assert wide.arguments == narrow.arguments
    assert 1.3 * narrow.temporary < wide.temporary < 2 * narrow.temporary
    assert lowered.predicted_memory == wide
