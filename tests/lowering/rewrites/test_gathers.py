"""Gathers move the narrowest type, and once: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

import pytest

from spmd.ir.dead import remove_dead
from spmd.ir.dedupe import dedupe
from spmd.ir.program import Program
from spmd.lowering.rewrites.gathers import share_gathers
from spmd.lowering.rewrites.narrow import narrow
from spmd.mesh.mesh import Mesh
from tests.lowering.rewrites.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))


def shared(program: Program) -> Program:
    return remove_dead(share_gathers(program))


def test_what_is_narrowed_after_a_gather_is_narrowed_before_it() -> None:
    after = rewritten(narrow, """program @p(%0: tensor<2x4xf32> "x") {
      %1 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %2 = stablehlo.transpose %1 {permutation = [1, 0]} : (tensor<8x4xf32>) -> tensor<4x8xf32>
      %3 = stablehlo.convert %2 : (tensor<4x8xf32>) -> tensor<4x8xbf16>
      %4 = stablehlo.convert %1 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
      return %3 "y", %4 "z"
    }""", MESH)  # fmt: skip
    assert names(after) == ["convert", "all_gather", "transpose"]
    assert sent(after, MESH) == 2 * 4 * 2 * 3


def test_a_gather_that_is_also_read_wide_stays_wide() -> None:
    after = rewritten(narrow, """program @p(%0: tensor<2x4xf32> "x") {
      %1 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %2 = stablehlo.convert %1 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
      return %1 "y", %2 "z"
    }""", MESH)  # fmt: skip
    assert names(after) == ["all_gather", "convert"]


def test_every_step_of_an_exchange_moves_the_narrow_type() -> None:
    after = rewritten(narrow, """program @p(%0: tensor<2x4xf32> "x") {
      %1 = stablehlo.all_to_all %0 {axes = {model}, concat_dimension = 0, split_dimension = 1} : (tensor<2x4xf32>) -> tensor<4x2xf32>
      %2 = stablehlo.collective_permute %1 {axes = {model}, pairs = [[0, 1], [1, 0], [2, 3], [3, 2], [4, 5], [5, 4]]} : (tensor<4x2xf32>) -> tensor<4x2xf32>
      %3 = stablehlo.all_gather %2 {all_gather_dim = 0, axes = {data}} : (tensor<4x2xf32>) -> tensor<16x2xf32>
      %4 = stablehlo.convert %3 : (tensor<16x2xf32>) -> tensor<16x2xbf16>
      return %4 "y"
    }""", MESH)  # fmt: skip
    assert names(after) == ["convert", "all_to_all", "collective_permute", "all_gather"]


def test_what_is_widened_before_a_gather_is_widened_after_it() -> None:
    after = rewritten(lambda p: remove_dead(narrow(p)), """program @p(%0: tensor<2x4xbf16> "x") {
      %1 = stablehlo.convert %0 : (tensor<2x4xbf16>) -> tensor<2x4xf32>
      %2 = stablehlo.reshape %1 : (tensor<2x4xf32>) -> tensor<2x2x2xf32>
      %3 = stablehlo.all_gather %2 {all_gather_dim = 0, axes = {model}} : (tensor<2x2x2xf32>) -> tensor<4x2x2xf32>
      %4 = stablehlo.all_gather %3 {all_gather_dim = 0, axes = {data}} : (tensor<4x2x2xf32>) -> tensor<16x2x2xf32>
      return %4 "y"
    }""", MESH)  # fmt: skip
    assert names(after) == ["reshape", "all_gather", "all_gather", "convert"]
    assert sent(after, MESH) == 8 * 2 + 16 * 2 * 3


def test_a_sum_keeps_its_precision() -> None:
    text = """program @p(%0: tensor<8x4xf32> "x", %1: tensor<8x4xbf16> "w") {
      %2 = stablehlo.reduce_scatter %0 {axes = {data}, body = add<f32>, scatter_dimension = 0} : (tensor<8x4xf32>) -> tensor<2x4xf32>
      %3 = stablehlo.convert %2 : (tensor<2x4xf32>) -> tensor<2x4xbf16>
      %4 = stablehlo.convert %1 : (tensor<8x4xbf16>) -> tensor<8x4xf32>
      %5 = stablehlo.all_reduce %4 {axes = {data}, body = add<f32>} : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %3 "y", %5 "z"
    }"""
    after = rewritten(narrow, text, MESH)
    assert names(after) == ["reduce_scatter", "convert", "convert", "all_reduce"]


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
