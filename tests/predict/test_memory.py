"""What the prediction of a device's memory says, on programs small enough to count by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from benchmarks.programs import llama_training
from benchmarks.programs.catalog import programs
from spmd.predict import memory
from spmd.predict.backends import backend_of
from spmd.predict.fusion import Kernels
from spmd.predict.memory import MemoryUse, peak_memory
from tests.greedy import greedy_plans as greedy_plans
from tests.ir.text_parse import parse_program

SIZE = 64 * 64 * 4


def use_of(
    fn: Any, *shapes: tuple[int, ...], donate: tuple[int, ...] = (), platform: str = "cuda"
) -> MemoryUse:
    """The prediction for a function of float32 arrays on one device."""
    mesh = spmd.Mesh(None, (1,), ("data",))
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    lowered = spmd.jit(fn, mesh=mesh, donate_argnums=donate).lower(*args)
    use = peak_memory(lowered.stages.optimized.program, lowered.donated, platform)
    assert sum(b.bytes for b in use.at_peak()) == use.temporary
    assert all(b.start <= b.end for b in use.buffers)
    return use


SQUARE = (64, 64)


def test_elementwise_chains_take_no_memory() -> None:
    use = use_of(lambda x: jnp.maximum(x * 2 + 1, 0) * 3, SQUARE)
    assert (use.arguments, use.results, use.temporary) == (SIZE, SIZE, 0)
    # Between products they are stored in the place of their operand: never three.
    use = use_of(lambda x: (((x @ x) * 2 + 1) @ x) @ x, SQUARE, platform="tpu")
    assert use.temporary == 2 * SIZE


def test_products_are_stored_until_their_last_reader() -> None:
    def f(x: Any) -> Any:
        a = x @ x
        b = a @ x  # a and b at once
        return b @ b  # a is gone

    use = use_of(f, SQUARE, platform="tpu")
    assert use.temporary == 2 * SIZE
    assert [b.name.split()[0] for b in use.at_peak()] == ["dot_general"] * 2
    # The first is read by the second alone: it lies where the result will be.
    use = use_of(f, SQUARE)
    first, second = use.buffers
    assert (first.in_result, second.in_result) == (True, False)
    assert use.temporary == SIZE and use.at_peak() == (second,)


def test_expensive_values_with_two_readers_are_computed_once() -> None:
    def both_ways(function: Any) -> Any:
        return lambda x: (lambda y: y.sum(0) + y.sum(1))(function(x))

    assert use_of(both_ways(jnp.exp), SQUARE).temporary >= SIZE
    assert use_of(both_ways(jnp.abs), SQUARE).temporary < SIZE


def test_donated_arguments_are_places_once_they_are_read() -> None:
    add = lambda x, y: x + y @ y  # noqa: E731
    assert use_of(add, SQUARE, SQUARE).peak == 3 * SIZE  # the product: where the result will be
    donated = use_of(add, SQUARE, SQUARE, donate=(0,))
    assert (donated.aliased, donated.peak) == (SIZE, 2 * SIZE + SIZE)
    # The first product reads x, and the third is read by the last: the second lies in x's place.
    chain = lambda x, y: (((x @ y) @ y) @ y) @ y  # noqa: E731
    assert use_of(chain, SQUARE, SQUARE, donate=(0,)).peak == 2 * SIZE + SIZE
    # It is read later: a copy.
    assert use_of(lambda x: (x * 2, (x @ x).sum()), SQUARE, donate=(0,)).temporary >= SIZE


def test_updates_of_a_donated_cache_are_in_place() -> None:
    def f(cache: Any, x: Any) -> Any:
        for i in range(3):
            cache = jax.lax.dynamic_update_slice(cache, x * i, (i, 0))
        return cache

    assert use_of(f, (1024, 64), (1, 64), donate=(0,)).temporary == 0
    assert use_of(f, (1024, 64), (1, 64), platform="tpu").temporary == 1024 * 64 * 4


def test_carries_of_a_loop_lie_in_one_place() -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=8)[0].sum()

    # The carry, and the product that is written beside it before the carry is free.
    assert use_of(f, SQUARE, SQUARE).temporary // SIZE == 2


def test_stacked_results_of_a_loop_are_written_in_place() -> None:
    def f(x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h + 1, h * 2), x, None, length=8)[1] @ jnp.ones((64, 1))

    use = use_of(f, SQUARE)
    stacked = 8 * SIZE
    assert stacked <= use.temporary < stacked + 3 * SIZE


def test_on_cpus_independent_kernels_run_side_by_side() -> None:
    def f(x: Any) -> Any:
        return sum(((x * i) @ x @ x).sum() for i in range(1, 5))

    assert use_of(f, SQUARE).temporary < 4 * SIZE
    # A product, and what the others read; in the order of the program there are never more than 3.
    assert use_of(f, SQUARE, platform="cpu").temporary == 5 * SIZE


@pytest.mark.parametrize(
    ("equation", "copies"),
    [
        ("ij,jk->ik", 0),
        ("ij,kj->ik", 0),
        ("ji,jk->ik", 0),
        ("abi,abk->ik", 1),
        ("bsi,kia->bska", 1),
    ],
)
def test_products_read_matrices_in_one_order(equation: str, copies: int) -> None:
    sizes = {"a": 8, "b": 8, "s": 16, "i": 32, "j": 32, "k": 16}
    lhs, rhs = equation.partition("->")[0].split(",")
    shapes = (tuple(sizes[dim] for dim in dims) for dims in (lhs, rhs))
    use = use_of(lambda x, y: jnp.einsum(equation, x, y), *shapes, platform="cpu")
    assert [b.label for b in use.buffers if b.is_copy] == ["copy for dot_general"] * copies


def test_gradients_of_convolutions_read_copies() -> None:
    def loss(w: Any, x: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return (y * y).sum()

    shapes = (3, 3, 8, 8), (4, 16, 16, 8)
    use = use_of(jax.grad(loss), *shapes, platform="cpu")
    copied = [b for b in use.buffers if b.is_copy and b.bytes == 4 * 16 * 16 * 8 * 4]
    assert len(copied) == 2  # the image, and the gradient of y
    assert copied[0].start < copied[1].start  # the image's as soon as it can be


def test_two_updates_of_one_value_need_a_copy() -> None:
    def f(index: Any, rows: Any) -> Any:
        zeros = jnp.zeros((1024, 64))
        where = index.astype(jnp.int32)
        one, two = zeros.at[where].add(rows), zeros.at[where + 1].add(rows)
        return one @ rows.T, two @ rows.T

    use = use_of(f, (64,), SQUARE, platform="cpu")
    whole = 1024 * 64 * 4
    assert sum(b.is_copy and b.bytes == whole for b in use.buffers) >= 1
    assert use.temporary >= whole  # what the second one makes; the rest lies in results' places


def test_cheap_values_are_computed_again() -> None:
    """A kernel that can compute an operand inside does, though a product wants it stored."""

    def f(x: Any, w: Any) -> Any:
        y = x @ w
        h = jnp.maximum(y, 0)
        return h @ w, h - 1

    lowered = spmd.jit(f, mesh=spmd.Mesh(None, (1,), ("data",))).lower(
        *[jax.ShapeDtypeStruct(SQUARE, np.float32)] * 2
    )
    kernels = Kernels(lowered.stages.optimized.program, backend_of("cpu"))
    product = next(k.makes for k in kernels.body if k.op.name == "stablehlo.dot_general")
    (shifted,) = (k for k in kernels.body if k.op.name == "stablehlo.subtract")
    assert any(k.op.name == "stablehlo.maximum" for k in kernels.body)
    assert shifted.reads == product


QUICK = (
    "remat/mlp-none@4x2",
    "resnet/data-parallel@8x1",
    "moe/train@4x2",
    "llama-serve/decode-tp@4x2",
)
LONGER = (
    "llama-train/scan@8x1", "llama-train/unrolled@4x2", "remat/attention-default@8x1",
    "recommender/rows@8x1", "llama-serve/prefill-2d@4x2", "moe/train-own-axis@4x2",
)  # fmt: skip


def lowered_program(name: str) -> spmd.Lowered:
    mesh, built = programs(f"^{name}$")[0].make()
    return spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate).lower(*built.args)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.heavy) for name in LONGER)]
)
def test_predictions_are_near_what_xla_reports(name: str) -> None:
    lowered = lowered_program(name)
    reported, predicted = lowered.compile().memory, lowered.memory
    assert predicted.is_predicted and not reported.is_predicted
    assert (predicted.arguments, predicted.aliased) == (reported.arguments, reported.aliased)
    assert peak_memory(lowered.stages.optimized.program).aliased == 0
    assert 0.86 < predicted.peak_bytes / reported.peak_bytes < 1.1


def test_halves_may_be_held_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = dataclasses.replace(llama_training.CONFIG, dtype="bfloat16")
    monkeypatch.setattr(llama_training, "CONFIG", halves)
    lowered = lowered_program("llama-train/scan@8x1")
    program = lowered.stages.optimized.program
    cpu, found = backend_of("cpu"), []
    for widens in (False, True):
        backend = cpu._replace(widens_halves=widens)
        monkeypatch.setattr(memory, "backend_of", {"cpu": backend}.__getitem__)
        found.append(peak_memory(program, lowered.donated, "cpu"))
    narrow, wide = found
    assert wide.arguments == narrow.arguments
    assert 1.3 * narrow.temporary < wide.temporary < 2 * narrow.temporary
    assert lowered.predicted_memory == (wide if cpu.widens_halves else narrow)


def test_results_that_nobody_reads() -> None:
    """A chain from the second result of an op, left over by a rewrite."""
    op = "stablehlo.rng_bit_generator %0 {rng_algorithm = `DEFAULT`}"
    text = f"""program @p(%0: tensor<4xui32> "x") {{
  %1, %2 = {op} : (tensor<4xui32>) -> (tensor<4xui32>, tensor<8xui32>)
  %3 = stablehlo.negate %2 : (tensor<8xui32>) -> tensor<8xui32>
  return %0 "y"
}}"""
    assert peak_memory(parse_program(text, spmd.Mesh(None, (2,), ("a",)))).peak == 2 * 16


@pytest.mark.parametrize("dim", [0, 1])
def test_running_totals_are_totals_of_tiles_first(dim: int) -> None:
    # Along the outer dim a transposed copy lies in the place of the result.
    for platform in ("cpu", "cuda"):
        use = use_of(lambda x: jnp.cumsum(x, dim), (256, 256), platform=platform)
        assert use.temporary == 256 * 256 * 4
    assert use_of(lambda x: jnp.cumsum(x, dim), (256, 256), platform="tpu").temporary == 0


def test_gradients_of_pooling_find_indices_first() -> None:
    def pooled(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    shape, size = (4, 32, 32, 8), 4 * 32 * 32 * 8 * 4
    grad = jax.grad(lambda x: (pooled(x) ** 2).sum())
    assert use_of(grad, shape, platform="cpu").temporary >= 5 * size  # four indices; their choice
    for platform in ("cuda", "tpu"):
        assert use_of(grad, shape, platform=platform).temporary < 3 * size


def test_an_all_gather_along_an_inner_dim_is_transposed_into_its_result() -> None:
    mesh = spmd.Mesh(None, (8,), ("data",))
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((64, 64), np.float32), mesh, (None, "data"))
    lowered = spmd.jit(lambda x: spmd.mark_sharding(x * 2, mesh, (None, None)), mesh=mesh).lower(x)
    use = peak_memory(lowered.stages.optimized.program, (), "cpu")
    assert use.results == SIZE
    assert use.temporary == SIZE  # what is gathered; the piece before lies in the result's place


def test_constants_are_held_in_pieces_if_they_are_large() -> None:
    """However many: they count against the limit, too."""
    table = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    row = np.arange(1 << 10, dtype=np.float32)
    mesh = spmd.Mesh(None, (8,), ("data",))
    x = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    x = spmd.mark_sharding(x, mesh, ("data", None))
    lowered = spmd.jit(lambda x: x + table + row, mesh=mesh).lower(x)
    use = lowered.predicted_memory
    assert use.constants == table.nbytes // 8 + row.nbytes
    assert use.peak == use.constants + 2 * table.nbytes // 8 + use.temporary
    assert use.temporary <= 4  # the device's number
    assert lowered.memory.peak_bytes == use.peak
    assert "constants                     516 KiB (unpartitioned" in lowered.explain(prices=False)
    assert len(lowered.as_text()) < 1 << 16
    options = spmd.Options(memory_limit=table.nbytes // 4)
    with pytest.raises(spmd.errors.PlanError, match="constants"):
        spmd.jit(lambda x: x + table, mesh=mesh, options=options).lower(x)
    ones = np.ones((1024, 1024), np.float32)  # equal elements take nothing
    assert use_of(lambda x: x + ones, (1024, 1024)).constants == 0


def _picked(w: Any, t: Any) -> Any:
    """The gradient of logits of which one of each row is picked, by a scatter into zeros."""
    x = jnp.ones((512, 64))
    rows = t.astype(jnp.int32)[:, None]
    loss = lambda w: jnp.take_along_axis(jax.nn.log_softmax(x @ w), rows, 1).mean()  # noqa: E731
    return jax.grad(loss)(w)


@pytest.mark.parametrize(
    ("fn", "shapes", "specs"),
    [
        (lambda x: jax.nn.logsumexp(x, -1), [(1024, 1024)], [("data", "model")]),
        (lambda x: (jnp.exp(x - x[:, :1]) * 2).sum(1), [(512, 1024)], [("data", None)]),
        (lambda x: jnp.where(x > 0, x, 0).sum(1), [(512, 1024)], [("data", None)]),
        (lambda x: jnp.argsort(x, 1), [(1024, 256)], [("data", None)]),
        (_picked, [(64, 2048), (512,)], [(None, "model"), None]),
        (lambda w, i: w[i.astype(jnp.int32)], [(8192, 512), (4096,)], [("data", "model"), None]),
    ],
    ids=["logsumexp", "library", "not in the library", "sort", "scatter", "pieces"],
)
def test_what_is_written_in_place_or_made_inside(
    fn: Any, shapes: Any, specs: Any, mesh: spmd.Mesh
) -> None:
    """Within a twentieth of what XLA takes."""
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    compiled = spmd.jit(fn, mesh=mesh, in_specs=tuple(specs)).lower(*structs).compile()
    assert compiled.predicted_memory.peak == pytest.approx(compiled.memory.peak_bytes, rel=0.05)
