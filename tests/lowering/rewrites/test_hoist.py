"""Exchanges of what a loop never changes: once in front of it, as far as memory goes."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

from spmd.ir.dead import remove_dead
from spmd.ir.program import Program, walk_region
from spmd.lowering.rewrites.clock import Room
from spmd.lowering.rewrites.hoist import hoist
from spmd.mesh.mesh import Mesh
from spmd.predict.memory import peak_memory
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))

LOOP = """program @p(%0: tensor<4x4xf32> "w", %1: tensor<16x4xf32> "x") {
  %2 = stablehlo.constant {value = dense<0 : tensor<i32>>} : () -> tensor<i32>
  %3, %4, %5 = stablehlo.while %2, %0, %1 : (tensor<i32>, tensor<4x4xf32>, tensor<16x4xf32>) -> (tensor<i32>, tensor<4x4xf32>, tensor<16x4xf32>) {
    region(%6: tensor<i32>, %7: tensor<4x4xf32>, %8: tensor<16x4xf32>) {
      %9 = stablehlo.constant {value = dense<3 : tensor<i32>>} : () -> tensor<i32>
      %10 = stablehlo.compare %6, %9 {comparison_direction = `#stablehlo<comparison_direction LT>`} : (tensor<i32>, tensor<i32>) -> tensor<i1>
      return %10
    }
    region(%11: tensor<i32>, %12: tensor<4x4xf32>, %13: tensor<16x4xf32>) {
      %14 = stablehlo.constant {value = dense<1 : tensor<i32>>} : () -> tensor<i32>
      %15 = stablehlo.add %11, %14 : (tensor<i32>, tensor<i32>) -> tensor<i32>
      %16 = stablehlo.transpose SOURCE {permutation = [1, 0]} : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %17 = stablehlo.all_gather %16 {all_gather_dim = 0, axes = {data}} : (tensor<4x4xf32>) -> tensor<16x4xf32>
      %18 = stablehlo.all_reduce %17 {axes = {model}, body = add<f32>} : (tensor<16x4xf32>) -> tensor<16x4xf32>
      %19 = stablehlo.subtract %13, %18 : (tensor<16x4xf32>, tensor<16x4xf32>) -> tensor<16x4xf32>
      return %15, %12, %19
    }
  }
  return %4 "w", %5 "y"
}"""

CHANGING = LOOP.replace(
    "%16 = stablehlo.transpose SOURCE",
    "%20 = stablehlo.slice %13 {start_indices = [0, 0], limit_indices = [4, 4], strides = [1, 1]} : (tensor<16x4xf32>) -> tensor<4x4xf32>\n"
    "%16 = stablehlo.transpose %20",
)


def inside(program: Program) -> list[str]:
    """The collectives in the loop's body."""
    (loop,) = [op for op in program.walk() if op.name == "stablehlo.while"]
    return [op.label for op in walk_region(loop.regions[1]) if "axes" in op.kind.attrs]


def after(text: str, memory: int) -> Program:
    return rewritten(lambda p: remove_dead(hoist(p, Room(memory))), text, MESH)


def test_an_exchange_of_what_never_changes_leaves_the_loop() -> None:
    program = after(LOOP.replace("SOURCE", "%12"), 1 << 30)
    assert inside(program) == []
    (loop,) = [op for op in program.walk() if op.name == "stablehlo.while"]
    assert len(loop.results) == 4  # the sum; what it is made of is not needed inside
    assert sent(program, MESH) == 16 * 4 * 4 * 3 // 4 + 16 * 4 * 4
    notes = [op.loc.note for op in program.walk() if "axes" in op.kind.attrs]
    assert notes == ["(once, not in each iteration)"] * 2


def test_an_exchange_of_what_changes_stays() -> None:
    assert inside(after(CHANGING, 1 << 30)) == ["all_gather", "all_reduce"]


def test_what_memory_has_no_room_for_stays() -> None:
    """Room for one of the two results: the gathered one leaves, what is reduced of it stays."""
    text = LOOP.replace("SOURCE", "%12")
    peak = peak_memory(parse_program(text, MESH)).peak
    assert inside(after(text, peak + 16 * 4 * 4 - 1)) == ["all_gather", "all_reduce"]
    assert inside(after(text, peak + 16 * 4 * 4)) == ["all_reduce"]
    assert inside(after(text, peak + 2 * 16 * 4 * 4)) == []


def test_a_loop_that_runs_once_keeps_its_exchanges() -> None:
    once = LOOP.replace("SOURCE", "%12").replace("dense<3", "dense<1")
    assert inside(after(once, 1 << 30)) == ["all_gather", "all_reduce"]
