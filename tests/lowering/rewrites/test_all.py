"""The rewrites of the local program, before -> after, on small texts."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

from spmd.ir.rewrite import dedupe, remove_dead
from spmd.ir.text import format_program
from spmd.mesh.mesh import Mesh
from tests.ir.text_parse import parse_program

MESH = Mesh(None, (4, 2), ("data", "model"))


def ops(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line.partition("= ")[2].partition(" ")[0] for line in lines if line.startswith("%")
            and "= " in line]  # fmt: skip


def rewritten(rewrite: object, text: str) -> str:
    return format_program(rewrite(parse_program(text, MESH)), None, MESH)  # type: ignore[operator]


def test_equal_collectives_are_done_once() -> None:
    before = """program @p(%0: tensor<2x4xf32> "x") {
      %1 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %2 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %3 = stablehlo.add %1, %2 : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
      return %3 "y"
    }"""
    after = rewritten(dedupe, before)
    assert ops(after) == ["stablehlo.all_gather", "stablehlo.add"]
    assert "stablehlo.add %1, %1" in after


def test_what_nobody_reads_is_dropped() -> None:
    before = """program @p(%0: tensor<4xf32> "x") {
      %1 = stablehlo.negate %0 : (tensor<4xf32>) -> tensor<4xf32>
      %2 = stablehlo.tanh %0 : (tensor<4xf32>) -> tensor<4xf32>
      return %2 "a"
    }"""
    assert ops(rewritten(remove_dead, before)) == ["stablehlo.tanh"]
