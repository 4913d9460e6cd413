"""The benchmark of communication: what it reads from two partitioners on programs done by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from benchmarks import bytes as table
from benchmarks.bytes import Moved, Row, measure, placed_arguments
from benchmarks.environment import xla_flags
from benchmarks.programs.catalog import programs
from benchmarks.programs.program import Built, Program, marked, struct

pytestmark = pytest.mark.exact_plans

AXES = {"data": 4, "model": 2}
WEIGHT = 64 * 32 * 4  # bytes


def build_scanned_step(mesh: spmd.Mesh) -> Built:
    """Three microbatches' gradients of one matrix, split over data; its momentum is open."""

    def step(w: Any, momentum: Any, x: Any) -> Any:
        def add(total: Any, x: Any) -> tuple[Any, None]:
            return total + jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), None

        grads, _ = jax.lax.scan(add, jnp.zeros_like(w), x)
        momentum = 0.9 * momentum + grads
        return w - momentum, momentum

    w = marked(mesh, ("data", None), (64, 32))
    return Built(step, (w, struct((64, 32)), marked(mesh, (None, "data"), (3, 256, 64))), (0, 1))


def build_reshard(mesh: spmd.Mesh) -> Built:
    def reshard(x: Any) -> Any:
        return spmd.mark_sharding(x, mesh, (None, "data"))

    return Built(reshard, (marked(mesh, ("data", None), (16, 16)),))


def test_a_training_step_with_accumulation() -> None:
    row = measure(Program("tiny/step", AXES, build_scanned_step), spmd.Options(check=True))
    assert row.errors == {}
    assert row.spmd is not None and row.alone is not None and row.given is not None
    # Ours: gather the weight once, reduce the sum of the gradients once, into pieces.
    assert row.spmd.bytes == row.predicted == 2 * WEIGHT * 3 // 4
    assert row.spmd.kinds == {"all_gather": WEIGHT * 3 // 4, "reduce_scatter": WEIGHT * 3 // 4}
    # The gradient alone: one product in the forward pass is needed by it, and one is it.
    assert row.spmd.flops == row.given.flops == 2 * (3 * 2 * 64 * 64 * 32)
    # XLA's: whatever it does, it cannot do with less, and what it does in the loop it does thrice.
    assert row.given.bytes > row.spmd.bytes
    assert row.given.collectives >= 3
    assert row.ratio == row.spmd.bytes / row.given.bytes


def test_a_reshard_has_nothing_open_and_one_peer() -> None:
    row = measure(Program("tiny/reshard", AXES, build_reshard), spmd.Options())
    assert row.alone is row.given
    assert row.spmd is not None and row.given is not None
    assert row.spmd.bytes == row.given.bytes == 16 * 16 * 4 // 4 * 3 // 4
    assert row.spmd.kinds == {"all_to_all": row.spmd.bytes}
    assert row.ratio == 1.0


def test_a_program_that_fails_is_a_row() -> None:
    def build(mesh: spmd.Mesh) -> Built:
        def wrong(x: Any) -> Any:
            raise ValueError("no such thing\nat all")

        return Built(wrong, (marked(mesh, (), (8,)),))

    row = measure(Program("tiny/wrong", AXES, build), spmd.Options())
    assert (row.spmd, row.alone, row.given, row.ratio) == (None, None, None, None)
    assert row.errors == dict.fromkeys(("alone", "spmd"), "ValueError: no such thing")
    (line,) = table.program_lines([row])
    assert line[:3] == ["tiny/wrong", "ValueError: no such thing", "ValueError: no such thing"]


def test_open_arguments_are_placed_as_planned() -> None:
    mesh, built = Program("tiny/step", AXES, build_scanned_step).make()
    placed = placed_arguments(spmd.jit(built.fn, mesh=mesh).lower(*built.args), built.args)
    assert tuple(placed[1].sharding.spec) == ("data", "model")  # momentum: a piece each
    jax.jit(built.fn, donate_argnums=built.donate).lower(*placed)


def test_names_are_unique_and_found() -> None:
    names = [program.name for program in programs()]
    assert len(names) == len(set(names))
    assert [p.name for p in programs("^moe/train@")] == ["moe/train@8x1", "moe/train@4x2"]
    assert programs("^moe/train@8x1$")[0].axes == {"data": 8, "model": 1}


FIRST_OF_EACH = {p.name.partition("@")[0]: p for p in reversed(programs("^(?!reshard)"))}


@pytest.mark.thorough
@pytest.mark.parametrize("program", FIRST_OF_EACH.values(), ids=lambda p: p.name)
def test_every_program_traces_and_its_state_goes_round(program: Program) -> None:
    _, built = program.make()
    results = jax.eval_shape(built.fn, *built.args)
    results = results if isinstance(results, tuple) else (results,)
    # What is donated comes back: a step's results can be its next arguments.
    shapes = {str(jax.tree.map(lambda s: (s.shape, s.dtype), result)) for result in results}
    for number in built.donate:
        assert str(jax.tree.map(lambda s: (s.shape, s.dtype), built.args[number])) in shapes


def moved(size: int) -> Moved:
    return Moved(size, 1, {"all_gather": size}, 2**20, 10**6, 1.0)


def result(name: str, ours: int, theirs: int) -> Row:
    return Row(name, moved(ours), moved(theirs), moved(theirs), ours, 0.5)


def test_tables() -> None:
    results = [
        result("a/x", 1_000_000, 4_000_000),
        result("a/y", 1_000_000, 1_000_000),
        result("reshard/better", 1, 2),
        result("reshard/worse", 4, 2),
    ]
    lines = table.program_lines(results)
    assert [line[0] for line in lines] == ["a/x", "a/y", "reshard/worse"]
    assert lines[0] == [
        "a/x", "1.000", "4.000", "4.000", "0.25", "1", "1", "1.0", "1.0", "1", "1", "1.000",
        "0.50", "1.00",
    ]  # fmt: skip
    assert table.family_lines(results) == [
        ["a", "2", "1", "1", "0", "0.50"],
        ["reshard", "2", "1", "0", "1", "1.00"],
        ["all", "4", "2", "1", "1", "0.71"],
    ]


def test_bytes_bought_with_arithmetic_count_in_no_mean_and_ratios_of_nothing() -> None:
    fair = result("a/x", 1_000_000, 2_000_000)
    bought = fair._replace(spmd=moved(1)._replace(flops=2 * 10**6))
    assert table.buys_bytes(bought) and not table.buys_bytes(fair)
    assert table.family_lines([fair, bought]) == [["a", "2", "2", "0", "0", "0.50"]]
    assert result("a/x", 0, 0).ratio == 1.0
    assert result("a/x", 1, 0).ratio == math.inf
    assert table.geometric_mean([None, 0.0, math.inf]) == pytest.approx(1.0)
    assert table.geometric_mean([None]) is None


def test_the_users_flags_come_first() -> None:
    flags = xla_flags("--xla_force_host_platform_device_count=16").split()
    assert flags[0] == "--xla_force_host_platform_device_count=16"
    assert sum(flag.startswith("--xla_force_host") for flag in flags) == 1
    assert len(flags) == 4
