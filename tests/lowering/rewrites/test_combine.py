"""Small collectives that travel together: which do, which do not, and that all arrive."""

# ruff: noqa: E501 (program texts)

import pytest

from spmd.ir.program import Program
from spmd.lowering.rewrites import schedule
from spmd.lowering.rewrites.schedule import Clock, combine
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from tests.lowering.rewrites.local_programs import names, rewritten

MESH = Mesh(None, (4, 2), ("data", "model"))
H200 = Topology("h200:8")


def after(*lines: str, target: int = 4 << 20, topology: Topology = H200) -> Program:
    """What becomes of a program of `%0 : 8x4`, `%1 : 16x3x2`, that numbers its values from 2."""
    body = "\n".join(lines)
    text = f"""program @p(%0: tensor<8x4xf32> "x", %1: tensor<16x3x2xf32> "y") {{\n{body}\n}}"""
    return rewritten(lambda p: combine(p, Clock(p, MESH, topology), target), text, MESH)


def reduced(result: int, operand: int, type_: str, axes: str = "data", body: str = "add") -> str:
    attrs = f"{{axes = {{{axes}}}, body = {body}<f32>}}"
    return f"%{result} = stablehlo.all_reduce %{operand} {attrs} : (tensor<{type_}>) -> tensor<{type_}>"


def gathered(result: int, operand: int, dim: int, before: str, then: str) -> str:
    attrs = f"{{all_gather_dim = {dim}, axes = {{data}}}}"
    return f"%{result} = stablehlo.all_gather %{operand} {attrs} : (tensor<{before}>) -> tensor<{then}>"


def scattered(result: int, operand: int, dim: int, before: str, then: str) -> str:
    attrs = f"{{axes = {{data}}, body = add<f32>, scatter_dimension = {dim}}}"
    return f"%{result} = stablehlo.reduce_scatter %{operand} {attrs} : (tensor<{before}>) -> tensor<{then}>"


def product(at: int, size: int) -> list[str]:
    """Eight rows and four columns of a product of ones, as value `at + 3`."""
    wide, dims = f"tensor<{size}x{size}xf32>", "dot(lhs_contract = [1], rhs_contract = [0])"
    return [
        f"%{at} = stablehlo.constant {{value = dense<1.0 : tensor<f32>>}} : () -> tensor<f32>",
        f"%{at + 1} = stablehlo.broadcast_in_dim %{at} {{broadcast_dimensions = []}} : (tensor<f32>) -> {wide}",
        f"%{at + 2} = stablehlo.dot_general %{at + 1}, %{at + 1} {{dot_dimension_numbers = {dims}}} : ({wide}, {wide}) -> {wide}",
        f"%{at + 3} = stablehlo.slice %{at + 2} {{start_indices = [0, 0], limit_indices = [8, 4], strides = [1, 1]}} : ({wide}) -> tensor<8x4xf32>",
    ]


NEGATED = (
    "%2 = stablehlo.negate %0 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
    "%3 = stablehlo.negate %1 : (tensor<16x3x2xf32>) -> tensor<16x3x2xf32>",
)


def test_all_reduces_travel_together_even_when_used_one_by_one() -> None:
    program = after(
        *NEGATED,
        reduced(4, 2, "8x4xf32"),
        "%5 = stablehlo.abs %4 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        reduced(6, 3, "16x3x2xf32"),
        'return %5 "a", %6 "b"',
    )
    assert names(program).count("all_reduce") == 1
    (note,) = [op.loc.note for op in program.walk() if op.label == "all_reduce"]
    assert note == "(and 1 more with it)"


@pytest.mark.parametrize("other", [{"axes": "model"}, {"body": "max"}])
def test_different_all_reduces_stay_apart(other: dict[str, str]) -> None:
    program = after(
        reduced(2, 0, "8x4xf32"), reduced(3, 1, "16x3x2xf32", **other), 'return %2 "a", %3 "b"'
    )
    assert names(program) == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize(("dim", "then"), [(0, "64x3x2xf32"), (1, "16x12x2xf32"), (2, "16x3x8xf32")])  # fmt: skip
def test_gathers_along_any_dims_travel_together(dim: int, then: str) -> None:
    """The second's operand is there when the first is read."""
    program = after(
        *NEGATED,
        gathered(4, 2, 0, "8x4xf32", "32x4xf32"),
        "%5 = stablehlo.abs %4 : (tensor<32x4xf32>) -> tensor<32x4xf32>",
        gathered(6, 3, dim, "16x3x2xf32", then),
        'return %5 "a", %6 "b"',
    )
    assert names(program).count("all_gather") == 1


def test_a_gather_of_what_is_made_later_stays() -> None:
    program = after(
        gathered(2, 0, 0, "8x4xf32", "32x4xf32"),
        "%3 = stablehlo.negate %1 : (tensor<16x3x2xf32>) -> tensor<16x3x2xf32>",
        gathered(4, 3, 0, "16x3x2xf32", "64x3x2xf32"),
        'return %2 "a", %4 "b"',
    )
    assert names(program).count("all_gather") == 2


@pytest.mark.parametrize(("dim", "then"), [(0, "4x3x2xf32"), (1, "16x1x2xf32")])
def test_reduce_scatters_along_any_dims_travel_together(dim: int, then: str) -> None:
    wide = "16x3x2xf32"
    lines = [*NEGATED]
    source = 3
    if dim == 1:  # three rows do not go into four parts: take a dim that does
        wide, then, source = "4x8x3xf32", "4x2x3xf32", 4
        lines.append("%4 = stablehlo.reshape %3 : (tensor<16x3x2xf32>) -> tensor<4x8x3xf32>")
    first = source + 1
    program = after(
        *lines,
        scattered(first, 2, 1, "8x4xf32", "8x1xf32"),
        scattered(first + 1, source, dim, wide, then),
        f'return %{first} "a", %{first + 1} "b"',
    )
    assert names(program).count("reduce_scatter") == 1


def test_a_reduction_does_not_wait_for_one_that_needs_it() -> None:
    program = after(
        reduced(2, 0, "8x4xf32"),
        "%3 = stablehlo.abs %2 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        reduced(4, 3, "8x4xf32"),
        'return %4 "a"',
    )
    assert names(program) == ["all_reduce", "abs", "all_reduce"]


def test_a_bucket_has_a_size() -> None:
    """Three of 128 bytes, and room for two or for none."""
    lines = [
        *(reduced(i, 0, "8x4xf32", body=body) for i, body in ((2, "add"), (3, "max"))),
        *(
            f"%{i + 2} = stablehlo.negate %{i} : (tensor<8x4xf32>) -> tensor<8x4xf32>"
            for i in (2, 3)
        ),
        "%6 = stablehlo.negate %1 : (tensor<16x3x2xf32>) -> tensor<16x3x2xf32>",
        *(reduced(i + 3, i, "8x4xf32") for i in (4, 5)),
        reduced(9, 0, "8x4xf32", body="min"),
        "%10 = stablehlo.negate %9 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        reduced(11, 10, "8x4xf32"),
        'return %6 "a", %7 "b", %8 "c", %11 "d"',
    ]
    counts = {n: names(after(*lines, target=n)).count("all_reduce") for n in (0, 256, 512, 1024)}
    assert counts == {0: 6, 256: 6, 512: 4, 1024: 4}


def test_nothing_waits_for_what_is_ready_far_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two lies arithmetic that hides the first many times over."""
    monkeypatch.setattr(schedule, "FEW_BYTES", 0)

    def program(size: int) -> list[str]:
        sums = reduced(2, 0, "8x4xf32"), *product(3, size), reduced(7, 6, "8x4xf32")
        return names(after(*sums, 'return %2 "a", %7 "b"', topology=Topology("cpu:8")))

    assert program(16).count("all_reduce") == 1
    assert program(1024).count("all_reduce") == 2


def test_a_few_bytes_wait_until_somebody_computes_with_them() -> None:
    """What only moves a reduction's few bytes waits with it, in the order it had."""
    made = names(after(
        reduced(2, 0, "8x4xf32"),
        "%3 = stablehlo.transpose %2 {permutation = [1, 0]} : (tensor<8x4xf32>) -> tensor<4x8xf32>",
        "%4 = stablehlo.reshape %3 : (tensor<4x8xf32>) -> tensor<8x4xf32>",
        *product(5, 1024),
        reduced(9, 8, "8x4xf32"),
        "%10 = stablehlo.exponential %4 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        'return %10 "a", %9 "b"',
        topology=Topology("cpu:8"),
    ))  # fmt: skip
    assert made.count("all_reduce") == 1
    assert made[-3:] == ["transpose", "reshape", "exponential"]
    assert made.index("dot_general") < made.index("all_reduce") < made.index("transpose")


def test_what_waits_with_several_results_is_there_once() -> None:
    both = "(tensor<8x4xf32>, tensor<8x4xf32>)"
    made = names(after(
        reduced(2, 0, "8x4xf32"),
        f"%3, %4 = stablehlo.optimization_barrier %2, %0 : {both} -> {both}",
        "%5 = stablehlo.exponential %4 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        "%6 = stablehlo.exponential %3 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
        'return %5 "a", %6 "b"',
    ))  # fmt: skip
    assert made == ["all_reduce", "optimization_barrier", "exponential", "exponential"]
