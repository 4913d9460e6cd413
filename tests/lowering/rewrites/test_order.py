"""Communication starts early: where each collective comes to stand, and that nothing else changes."""

# ruff: noqa: E501 (program texts)

import itertools

import pytest

import spmd
from spmd.ir.program import Program
from spmd.lowering.rewrites.schedule import Clock, Room, order
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.memory import peak_memory
from spmd.predict.timeline import predict_timeline
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import rewritten
from tests.programs import mlp

MESH = Mesh(None, (4, 2), ("data", "model"))
CPU = Topology("cpu:8")
H200 = Topology("h200:8")

DOT = "{dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])}"
SQUARE = "tensor<128x128xf32>"


def dot(result: int, lhs: int, rhs: int) -> str:
    return (
        f"%{result} = stablehlo.dot_general %{lhs}, %{rhs} {DOT} : ({SQUARE}, {SQUARE}) -> {SQUARE}"
    )


def gather(result: int, operand: int) -> str:
    return (
        f"%{result} = stablehlo.all_gather %{operand} {{all_gather_dim = 0, axes = {{data}}}} : "
        f"(tensor<32x128xf32>) -> {SQUARE}"
    )


def text(*lines: str) -> str:
    body = "\n".join(lines)
    return f"""program @p(%0: {SQUARE} "x", %1: tensor<32x128xf32> "w") {{\n{body}\n}}"""


def after(
    *lines: str, prefetch: int = 2, memory: int = 1 << 30, topology: Topology = CPU
) -> Program:
    def rewrite(program: Program) -> Program:
        return order(program, Clock(program, MESH, topology), prefetch, Room(memory))

    return rewritten(rewrite, text(*lines), MESH)


def results(program: Program) -> list[int]:
    return [op.results[0] for op in program.body.ops]


LAYERS = (
    dot(2, 0, 0), dot(3, 2, 2), dot(4, 3, 3),
    "%5 = stablehlo.abs %1 : (tensor<32x128xf32>) -> tensor<32x128xf32>", gather(6, 5),
    dot(7, 4, 6), 'return %7 "y"',
)  # fmt: skip


def test_a_gather_starts_as_late_as_it_is_hidden_and_without_prefetch_where_it_was() -> None:
    """One product takes longer than the gather, so it starts in front of the last one before."""
    assert results(after(*LAYERS)) == [2, 3, 5, 6, 4, 7]
    assert results(after(*LAYERS, prefetch=0)) == [2, 3, 4, 5, 6, 7]


def test_an_order_that_takes_too_much_memory_is_not_taken() -> None:
    early = after(*LAYERS)
    late = parse_program(text(*LAYERS), MESH)
    assert peak_memory(early).peak > peak_memory(late).peak
    assert results(after(*LAYERS, memory=peak_memory(early).peak - 1)) == results(late)


def test_a_reduction_starts_as_soon_as_its_operand_is_there() -> None:
    program = after(
        dot(2, 0, 0),
        dot(3, 2, 2),
        dot(4, 3, 3),
        f"%5 = stablehlo.transpose %2 {{permutation = [1, 0]}} : ({SQUARE}) -> {SQUARE}",
        f"%6 = stablehlo.reduce_scatter %5 {{axes = {{data}}, body = add<f32>, scatter_dimension = 0}} : ({SQUARE}) -> tensor<32x128xf32>",
        "%7 = stablehlo.add %6, %1 : (tensor<32x128xf32>, tensor<32x128xf32>) -> tensor<32x128xf32>",
        'return %4 "y", %7 "z"',
    )
    assert results(program) == [2, 5, 6, 3, 4, 7]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_so_many_gathers_are_held_at_a_time(prefetch: int) -> None:
    """Products take no time on a large device, so that each gather starts as early as it may."""
    lines, value = [], 0
    for shift in range(6):
        piece, whole = value + 2, value + 3
        attrs = f"{{axes = {{model}}, pairs = [[0, {shift + 1}]]}}"
        type_ = "tensor<32x128xf32>"
        lines += [
            f"%{piece} = stablehlo.collective_permute %1 {attrs} : ({type_}) -> {type_}",
            gather(whole, piece),
            dot(value + 4, value and value + 1, whole),
        ]
        value += 3
    program = after(*lines, f'return %{value + 1} "y"', prefetch=prefetch, topology=H200)
    held = [(op.label == "all_gather") - (op.label == "dot_general") for op in program.body.ops]
    assert max(itertools.accumulate(held)) == prefetch


def test_nothing_moves_in_front_of_a_loop_or_out_of_it() -> None:
    loop = [
        "%2 = stablehlo.constant {value = dense<0 : tensor<i32>>} : () -> tensor<i32>",
        f"%3, %4 = stablehlo.while %2, %0 : (tensor<i32>, {SQUARE}) -> (tensor<i32>, {SQUARE}) {{",
        f"  region(%5: tensor<i32>, %6: {SQUARE}) {{",
        "    %7 = stablehlo.constant {value = dense<2 : tensor<i32>>} : () -> tensor<i32>",
        "    %8 = stablehlo.compare %5, %7 {comparison_direction = `#stablehlo<comparison_direction LT>`} : (tensor<i32>, tensor<i32>) -> tensor<i1>",
        "    return %8",
        "  }",
        f"  region(%9: tensor<i32>, %10: {SQUARE}) {{",
        "    %11 = stablehlo.constant {value = dense<1 : tensor<i32>>} : () -> tensor<i32>",
        "    %12 = stablehlo.add %9, %11 : (tensor<i32>, tensor<i32>) -> tensor<i32>",
        f"    %13 = stablehlo.abs %10 : ({SQUARE}) -> {SQUARE}",
        "    return %12, %13",
        "  }",
        "}",
    ]
    assert results(after(*loop, gather(14, 1), dot(15, 4, 14), 'return %15 "y"')) == [2, 3, 14, 15]


def test_prefetch_is_an_option_and_hides_more() -> None:
    training = mlp(spmd.make_mesh(data=4, model=2))
    late, early = (
        training.lower(prefetch=count, topology=CPU).stages.optimized.program for count in (0, 2)
    )
    seconds = [predict_timeline(p, training.mesh, CPU).seconds for p in (late, early)]
    assert seconds[1] <= seconds[0]
    assert _arithmetic(late) == _arithmetic(early)


def _arithmetic(program: Program) -> list[str]:
    return [op.label for op in program.body.ops if op.label in ("dot_general", "reduce")]
