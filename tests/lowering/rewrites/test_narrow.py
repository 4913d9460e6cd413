"""Exchanges move the narrowest type: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

from spmd.ir.rewrite import remove_dead
from spmd.lowering.rewrites.simplify import narrow
from spmd.mesh.mesh import Mesh
from tests.lowering.rewrites.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))


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
