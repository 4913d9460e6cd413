"""Collectives of which each device keeps a slice: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

import pytest

from spmd.ir.program import Program
from spmd.ir.rewrite import remove_dead
from spmd.lowering.rewrites.slices import slice_collectives
from spmd.mesh.mesh import Mesh
from tests.lowering.rewrites.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))


def scattered(program: Program) -> Program:
    return remove_dead(slice_collectives(program, MESH))


def after(*lines: str) -> Program:
    """What becomes of a program of `%0 : 8x16`, `%1 : 8x16`, that numbers its values from 2."""
    body = "\n".join(lines)
    text = f"""program @p(%0: tensor<8x16xf32> "x", %1: tensor<8x16xf32> "y") {{\n{body}\n}}"""
    return rewritten(scattered, text, MESH)


def summed(made: int, operand: int, axes: str = "data", body: str = "add") -> str:
    type_ = "tensor<8x16xf32>"
    return f"%{made} = stablehlo.all_reduce %{operand} {{axes = {{{axes}}}, body = {body}<f32>}} : ({type_}) -> {type_}"


def sliced(
    made: int, operand: int, axes: str, dim: int, shape: str = "8x16", dtype: str = "f32"
) -> str:
    sizes = [int(size) for size in shape.split("x")]
    sizes[dim] //= MESH.extent(MESH.atoms_of(axes.split(", ")))
    piece = "x".join(map(str, sizes))
    return f"%{made} = spmd.local_slice %{operand} {{axes = {{{axes}}}, dim = {dim}}} : (tensor<{shape}x{dtype}>) -> tensor<{piece}x{dtype}>"


SUM, SUM_OF_BOTH = summed(2, 0), summed(2, 0, "data, model")
OF_DIM_0 = sliced(3, 2, "data", 0)
PARTS = 8 * 12 * 4 + 8 * 4 * 4
"""What is sent where the sum over `data` is scattered along dim 1, and the pieces are summed."""

SLICED: dict[str, tuple[tuple[str, ...], list[str], int | None]] = {
    "as it is": ((SUM, OF_DIM_0, 'return %3 "y"'), ["reduce_scatter"], 8 * 16 * 4 * 3 // 4),
    "the sum has another use": ((SUM, OF_DIM_0, 'return %3 "y", %2 "z"'),
        ["all_reduce", "local_slice"], None),
    "two slices over other axes": (
        (SUM, OF_DIM_0, sliced(4, 2, "model", 0), 'return %3 "y", %4 "z"'),
        ["all_reduce", "local_slice", "local_slice"], None),
    "two slices of other dims": ((SUM, OF_DIM_0, sliced(4, 2, "data", 1), 'return %3 "y", %4 "z"'),
        ["all_reduce", "local_slice", "local_slice"], None),
    "over other axes, before the sum": ((SUM, sliced(3, 2, "model", 0), 'return %3 "y"'),
        ["local_slice", "all_reduce"], 2 * 4 * 16 * 4 * 3 // 4),
    "over some of the axes": ((SUM_OF_BOTH, sliced(3, 2, "data", 1), 'return %3 "y"'),
        ["reduce_scatter", "all_reduce"], PARTS),
    "over more axes": ((SUM, sliced(3, 2, "data, model", 1), 'return %3 "y"'),
        ["reduce_scatter", "local_slice"], None),
    "over more axes, in front": ((SUM, sliced(3, 2, "model, data", 1), 'return %3 "y"'),
        ["local_slice", "reduce_scatter"], None),
    "in the order of the slice": ((SUM_OF_BOTH, sliced(3, 2, "model, data", 0), 'return %3 "y"'),
        ["reduce_scatter"], None),
    "elementwise ops and moves between": (
        (
            SUM_OF_BOTH,
            "%3 = stablehlo.tanh %1 : (tensor<8x16xf32>) -> tensor<8x16xf32>",
            "%4 = stablehlo.multiply %2, %3 : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>",
            "%5 = stablehlo.reshape %4 : (tensor<8x16xf32>) -> tensor<8x4x4xf32>",
            "%6 = stablehlo.transpose %5 {permutation = [2, 1, 0]} : (tensor<8x4x4xf32>) -> tensor<4x4x8xf32>",
            sliced(7, 6, "data", 1, "4x4x8"),
            'return %7 "y"',
        ),
        ["reduce_scatter", "all_reduce", "tanh", "local_slice", "multiply", "reshape", "transpose"],
        None),
    "of the inner part of a dim, which no slice of the dim is": (
        (
            SUM,
            "%3 = stablehlo.reshape %2 : (tensor<8x16xf32>) -> tensor<8x4x4xf32>",
            sliced(4, 3, "data", 2, "8x4x4"),
            'return %4 "y"',
        ), ["all_reduce", "reshape", "local_slice"], None),
    "several: as it is, of a convert, finer than the others": (
        (
            SUM,
            sliced(3, 2, "data", 1),
            "%4 = stablehlo.convert %2 : (tensor<8x16xf32>) -> tensor<8x16xbf16>",
            sliced(5, 4, "data", 1, dtype="bf16"),
            sliced(6, 2, "data, model", 1),
            'return %3 "a", %5 "b", %6 "c"',
        ), ["reduce_scatter", "convert", "local_slice"], None),
    "of two sums": (
        (
            SUM,
            summed(3, 1),
            "%4 = stablehlo.subtract %2, %3 : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>",
            sliced(5, 4, "data", 0),
            'return %5 "a"',
        ), ["reduce_scatter", "reduce_scatter", "subtract"], None),
    "of a sum of a sum": ((SUM, summed(3, 2, "model"), sliced(4, 3, "data", 1), 'return %4 "a"'),
        ["reduce_scatter", "all_reduce"], PARTS),
    "of a maximum": ((summed(2, 0, body="max"), OF_DIM_0, 'return %3 "y"'), ["reduce_scatter"],
        None),
    "of the slice": (
        (
            SUM,
            OF_DIM_0,
            sliced(4, 3, "data", 1, "2x16"),
            sliced(5, 3, "model", 1, "2x16"),
            'return %4 "y", %5 "z"',
        ), ["reduce_scatter", "local_slice", "local_slice"], None),
}  # fmt: skip


@pytest.mark.parametrize("case", SLICED)
def test_a_sum_that_is_sliced(case: str) -> None:
    lines, wanted, bytes_ = SLICED[case]
    program = after(*lines)
    assert names(program) == wanted
    assert bytes_ is None or sent(program, MESH) == bytes_


def test_a_slice_in_a_branch_leaves_the_sum_outside() -> None:
    program = after(
        SUM,
        "%3 = stablehlo.constant {value = dense<true : tensor<i1>>} : () -> tensor<i1>",
        "%4 = stablehlo.if %3 : (tensor<i1>) -> tensor<2x16xf32> {",
        "  region() {",
        "    %5 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        "    return %5",
        "  }",
        "  region() {",
        "    %6 = spmd.local_slice %1 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        "    return %6",
        "  }",
        "}",
        'return %4 "y"',
    )
    assert "all_reduce" in names(program)


def gathered(axes: str, dim: int, slice_axes: str, slice_dim: int, result: str) -> Program:
    """A gather over `axes` of `%0`, taken apart again over `slice_axes` behind a transpose."""
    whole = [8, 16]
    whole[dim] *= MESH.extent(MESH.atoms_of(axes.split(", ")))
    rows, columns = whole
    return after(
        f"%2 = stablehlo.all_gather %0 {{all_gather_dim = {dim}, axes = {{{axes}}}}} : (tensor<8x16xf32>) -> tensor<{rows}x{columns}xf32>",
        f"%3 = stablehlo.transpose %2 {{permutation = [1, 0]}} : (tensor<{rows}x{columns}xf32>) -> tensor<{columns}x{rows}xf32>",
        f"%4 = spmd.local_slice %3 {{axes = {{{slice_axes}}}, dim = {1 - slice_dim}}} : (tensor<{columns}x{rows}xf32>) -> tensor<{result}xf32>",
        'return %4 "y"',
    )


@pytest.mark.parametrize(
    ("axes", "dim", "slice_axes", "slice_dim", "result", "wanted"),
    [
        ("data", 0, "data", 0, "16x8", ["transpose"]),
        ("data, model", 1, "data, model", 1, "16x8", ["transpose"]),
        ("data", 0, "data", 1, "4x32", ["all_to_all", "transpose"]),
        ("data", 1, "data", 0, "64x2", ["all_to_all", "transpose"]),
        ("data, model", 0, "data", 0, "16x16", ["all_gather", "transpose"]),
        ("data", 0, "data, model", 0, "16x4", ["local_slice", "transpose"]),
        ("data", 0, "data, model", 1, "2x32", ["all_to_all", "local_slice", "transpose"]),
        ("data, model", 0, "model, data", 0, "16x8", ["collective_permute", "transpose"]),
        ("data", 0, "model", 1, "8x32", ["local_slice", "all_gather", "transpose"]),
        ("data", 0, "model", 0, "16x16", ["all_gather", "transpose", "local_slice"]),
        ("data, model", 0, "model", 0, "16x32", ["all_gather", "transpose", "local_slice"]),
    ],
)
def test_a_gather_that_is_sliced(
    axes: str, dim: int, slice_axes: str, slice_dim: int, result: str, wanted: list[str]
) -> None:
    assert names(gathered(axes, dim, slice_axes, slice_dim, result)) == wanted


def test_a_gather_with_a_whole_use_stays() -> None:
    program = after(
        "%2 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}} : (tensor<8x16xf32>) -> tensor<32x16xf32>",
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 1} : (tensor<32x16xf32>) -> tensor<32x4xf32>",
        'return %2 "y", %3 "z"',
    )
    assert names(program) == ["all_gather", "local_slice"]
