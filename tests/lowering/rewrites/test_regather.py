"""What is taken apart only to be put together again: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

from spmd.ir.program import Program
from spmd.lowering.rewrites.gathers import regather
from spmd.mesh.mesh import Mesh
from tests.lowering.rewrites.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))

SCATTERED = "%1 = stablehlo.reduce_scatter %0 {axes = {data}, body = add<f32>, scatter_dimension = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>"


def after(*lines: str) -> Program:
    body = "\n".join(lines)
    text = f"""program @p(%0: tensor<8x16xf32> "x") {{\n{body}\n}}"""
    return rewritten(regather, text, MESH)


def gathered(
    result: int, operand: int, before: str, then: str, dim: int = 0, axes: str = "data"
) -> str:
    attrs = f"{{all_gather_dim = {dim}, axes = {{{axes}}}}}"
    return f"%{result} = stablehlo.all_gather %{operand} {attrs} : (tensor<{before}xf32>) -> tensor<{then}xf32>"


def test_a_gathered_reduce_scatter_is_an_all_reduce() -> None:
    program = after(SCATTERED, gathered(2, 1, "2x16", "8x16"), 'return %2 "y"')
    assert names(program) == ["all_reduce"]
    assert sent(program, MESH) == 2 * 8 * 16 * 4 * 3 // 4


def test_moves_between_are_done_on_the_whole() -> None:
    program = after(
        SCATTERED,
        "%2 = stablehlo.reshape %1 : (tensor<2x16xf32>) -> tensor<2x4x4xf32>",
        "%3 = stablehlo.transpose %2 {permutation = [2, 0, 1]} : (tensor<2x4x4xf32>) -> tensor<4x2x4xf32>",
        gathered(4, 3, "4x2x4", "4x8x4", dim=1),
        'return %4 "y"',
    )
    assert names(program) == ["all_reduce", "reshape", "transpose"]


def test_a_scattered_sum_with_another_use_stays() -> None:
    program = after(SCATTERED, gathered(2, 1, "2x16", "8x16"), 'return %1 "y", %2 "z"')
    assert names(program) == ["reduce_scatter", "all_gather"]


def test_pieces_that_are_joined_otherwise_stay() -> None:
    program = after(SCATTERED, gathered(2, 1, "2x16", "2x64", dim=1), 'return %2 "y"')
    assert names(program) == ["reduce_scatter", "all_gather"]
    program = after(SCATTERED, gathered(2, 1, "2x16", "4x16", axes="model"), 'return %2 "y"')
    assert names(program) == ["reduce_scatter", "all_gather"]


def test_a_gathered_slice_is_what_it_was_sliced_from() -> None:
    """A slice is taken of what its devices have in common, as the sum here."""
    program = after(
        "%1 = stablehlo.all_reduce %0 {axes = {data}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%2 = spmd.local_slice %1 {axes = {data}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x4xf32>",
        "%3 = stablehlo.transpose %2 {permutation = [1, 0]} : (tensor<8x4xf32>) -> tensor<4x8xf32>",
        gathered(4, 3, "4x8", "16x8"),
        'return %2 "y", %4 "z"',
    )
    assert names(program) == ["all_reduce", "local_slice", "transpose"]
