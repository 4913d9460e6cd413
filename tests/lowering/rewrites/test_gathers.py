"""Gathers and the moves in front of them: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

import pytest

from spmd.ir.program import Program
from spmd.ir.rewrite import dedupe, remove_dead
from spmd.lowering.rewrites.simplify import regather, share_gathers
from spmd.mesh.mesh import Mesh
from tests.lowering.rewrites.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))


def shared(program: Program) -> Program:
    return remove_dead(share_gathers(program))


FORMS = """program @p(%0: tensor<4x6xf32> "x") {
  %1 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<4x6xf32>) -> tensor<16x6xf32>
  %2 = stablehlo.transpose %0 {permutation = [1, 0]} : (tensor<4x6xf32>) -> tensor<6x4xf32>
  %3 = stablehlo.convert %2 : (tensor<6x4xf32>) -> tensor<6x4xbf16>
  %4 = stablehlo.all_gather %3 {all_gather_dim = 1, axes = {data}} : (tensor<6x4xbf16>) -> tensor<6x16xbf16>
  %5 = stablehlo.reshape %0 : (tensor<4x6xf32>) -> tensor<2x12xf32>
  %6 = stablehlo.all_gather %5 {all_gather_dim = 0, axes = {data}} : (tensor<2x12xf32>) -> tensor<8x12xf32>
  %7 = stablehlo.all_gather %0 {all_gather_dim = 1, axes = {data}} : (tensor<4x6xf32>) -> tensor<4x24xf32>
  return %1 "a", %4 "b", %6 "c", %7 "d"
}"""


def test_forms_of_one_value_are_gathered_once() -> None:
    after = rewritten(shared, FORMS, MESH)
    assert names(after).count("all_gather") == 2  # along dim 1 the pieces lie otherwise
    notes = [op.loc.note for op in after.walk() if op.label == "all_gather"]
    assert notes == ["(one gather for 3 forms of it)", ""]


def test_forms_of_one_narrow_type_are_gathered_in_it() -> None:
    after = rewritten(shared, """program @p(%0: tensor<4x6xf32> "x") {
      %1 = stablehlo.transpose %0 {permutation = [1, 0]} : (tensor<4x6xf32>) -> tensor<6x4xf32>
      %2 = stablehlo.convert %1 : (tensor<6x4xf32>) -> tensor<6x4xbf16>
      %3 = stablehlo.all_gather %2 {all_gather_dim = 1, axes = {data}} : (tensor<6x4xbf16>) -> tensor<6x16xbf16>
      %4 = stablehlo.convert %0 : (tensor<4x6xf32>) -> tensor<4x6xbf16>
      %5 = stablehlo.all_gather %4 {all_gather_dim = 0, axes = {data}} : (tensor<4x6xbf16>) -> tensor<16x6xbf16>
      return %3 "a", %5 "b"
    }""", MESH)  # fmt: skip
    assert sent(after, MESH) == 4 * 6 * 2 * 3


def test_narrow_forms_of_different_types_stay_apart_where_that_is_less() -> None:
    text = """program @p(%0: tensor<4x6xf32> "x") {
      %1 = stablehlo.convert %0 : (tensor<4x6xf32>) -> tensor<4x6xi8>
      %2 = stablehlo.all_gather %1 {all_gather_dim = 0, axes = {data}} : (tensor<4x6xi8>) -> tensor<16x6xi8>
      %3 = stablehlo.convert %0 : (tensor<4x6xf32>) -> tensor<4x6xbf16>
      %4 = stablehlo.all_gather %3 {all_gather_dim = 0, axes = {data}} : (tensor<4x6xbf16>) -> tensor<16x6xbf16>
      return %2 "a", %4 "b"
    }"""
    assert sent(rewritten(shared, text, MESH), MESH) == (1 + 2) * 4 * 6 * 3


@pytest.mark.parametrize("inner", ["shared", "own"])
def test_gathers_in_a_loop_are_shared_within_it(inner: str) -> None:
    """A loop's body does not read what is gathered outside."""
    source = "%5" if inner == "shared" else "%6"
    text = f"""program @p(%0: tensor<4x4xf32> "x", %1: tensor<4x4xf32> "y") {{
      %2 = stablehlo.constant {{value = dense<0 : tensor<i32>>}} : () -> tensor<i32>
      %20, %21, %19 = stablehlo.while %2, %0, %1 : (tensor<i32>, tensor<4x4xf32>, tensor<4x4xf32>) -> (tensor<i32>, tensor<4x4xf32>, tensor<4x4xf32>) {{
        region(%7: tensor<i32>, %8: tensor<4x4xf32>, %9: tensor<4x4xf32>) {{
          %10 = stablehlo.constant {{value = dense<3 : tensor<i32>>}} : () -> tensor<i32>
          %11 = stablehlo.compare %7, %10 {{comparison_direction = `#stablehlo<comparison_direction LT>`}} : (tensor<i32>, tensor<i32>) -> tensor<i1>
          return %11
        }}
        region(%4: tensor<i32>, %5: tensor<4x4xf32>, %6: tensor<4x4xf32>) {{
          %12 = stablehlo.constant {{value = dense<1 : tensor<i32>>}} : () -> tensor<i32>
          %13 = stablehlo.add %4, %12 : (tensor<i32>, tensor<i32>) -> tensor<i32>
          %14 = stablehlo.all_gather %5 {{all_gather_dim = 0, axes = {{data}}}} : (tensor<4x4xf32>) -> tensor<16x4xf32>
          %15 = stablehlo.transpose {source} {{permutation = [1, 0]}} : (tensor<4x4xf32>) -> tensor<4x4xf32>
          %16 = stablehlo.all_gather %15 {{all_gather_dim = 1, axes = {{data}}}} : (tensor<4x4xf32>) -> tensor<4x16xf32>
          %17 = stablehlo.slice %14 {{start_indices = [3, 0], limit_indices = [7, 4], strides = [1, 1]}} : (tensor<16x4xf32>) -> tensor<4x4xf32>
          %18 = stablehlo.slice %16 {{start_indices = [0, 3], limit_indices = [4, 7], strides = [1, 1]}} : (tensor<4x16xf32>) -> tensor<4x4xf32>
          return %13, %17, %18
        }}
      }}
      %3 = stablehlo.all_gather %21 {{all_gather_dim = 0, axes = {{data}}}} : (tensor<4x4xf32>) -> tensor<16x4xf32>
      return %3 "a", %19 "b"
    }}"""
    after = rewritten(lambda p: dedupe(shared(p)), text, MESH)
    assert names(after).count("all_gather") == (2 if inner == "shared" else 3)


SCATTERED = "%1 = stablehlo.reduce_scatter %0 {axes = {data}, body = add<f32>, scatter_dimension = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>"


def undone(*lines: str) -> Program:
    body = "\n".join(lines)
    text = f"""program @p(%0: tensor<8x16xf32> "x") {{\n{body}\n}}"""
    return rewritten(regather, text, MESH)


def gathered(
    result: int, operand: int, before: str, then: str, dim: int = 0, axes: str = "data"
) -> str:
    attrs = f"{{all_gather_dim = {dim}, axes = {{{axes}}}}}"
    return f"%{result} = stablehlo.all_gather %{operand} {attrs} : (tensor<{before}xf32>) -> tensor<{then}xf32>"


def test_a_gathered_reduce_scatter_is_an_all_reduce() -> None:
    program = undone(SCATTERED, gathered(2, 1, "2x16", "8x16"), 'return %2 "y"')
    assert names(program) == ["all_reduce"]
    assert sent(program, MESH) == 2 * 8 * 16 * 4 * 3 // 4


def test_moves_between_are_done_on_the_whole() -> None:
    program = undone(
        SCATTERED,
        "%2 = stablehlo.reshape %1 : (tensor<2x16xf32>) -> tensor<2x4x4xf32>",
        "%3 = stablehlo.transpose %2 {permutation = [2, 0, 1]} : (tensor<2x4x4xf32>) -> tensor<4x2x4xf32>",
        gathered(4, 3, "4x2x4", "4x8x4", dim=1),
        'return %4 "y"',
    )
    assert names(program) == ["all_reduce", "reshape", "transpose"]


def test_a_scattered_sum_with_another_use_stays() -> None:
    program = undone(SCATTERED, gathered(2, 1, "2x16", "8x16"), 'return %1 "y", %2 "z"')
    assert names(program) == ["reduce_scatter", "all_gather"]


def test_pieces_that_are_joined_otherwise_stay() -> None:
    program = undone(SCATTERED, gathered(2, 1, "2x16", "2x64", dim=1), 'return %2 "y"')
    assert names(program) == ["reduce_scatter", "all_gather"]
    program = undone(SCATTERED, gathered(2, 1, "2x16", "4x16", axes="model"), 'return %2 "y"')
    assert names(program) == ["reduce_scatter", "all_gather"]


def test_a_gathered_slice_is_what_it_was_sliced_from() -> None:
    """A slice is taken of what its devices have in common, as the sum here."""
    program = undone(
        "%1 = stablehlo.all_reduce %0 {axes = {data}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%2 = spmd.local_slice %1 {axes = {data}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x4xf32>",
        "%3 = stablehlo.transpose %2 {permutation = [1, 0]} : (tensor<8x4xf32>) -> tensor<4x8xf32>",
        gathered(4, 3, "4x8", "16x8"),
        'return %2 "y", %4 "z"',
    )
    assert names(program) == ["all_reduce", "local_slice", "transpose"]
