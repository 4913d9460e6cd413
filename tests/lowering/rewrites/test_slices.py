"""Collectives of which each device keeps a slice: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

import pytest

from spmd.ir.program import Program
from spmd.ir.rewrite import remove_dead
from spmd.lowering.rewrites.simplify import slice_collectives
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


SUM = "%2 = stablehlo.all_reduce %0 {axes = {data}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>"
SUM_OF_BOTH = "%2 = stablehlo.all_reduce %0 {axes = {data, model}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>"


def test_all_reduce_and_slice_become_reduce_scatter() -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["reduce_scatter"]
    attrs = program.body.ops[0].kind.attrs
    assert attrs["scatter_dimension"] == 0
    assert attrs["axes"] == MESH.atoms_of(["data"])


def test_an_all_reduce_with_another_use_stays() -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        'return %3 "y", %2 "z"',
    )
    assert names(program) == ["all_reduce", "local_slice"]


@pytest.mark.parametrize(
    ("second", "type_"), [("{axes = {model}, dim = 0}", "4x16"), ("{axes = {data}, dim = 1}", "8x4")]
)  # fmt: skip
def test_slices_that_share_nothing_stay(second: str, type_: str) -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        f"%4 = spmd.local_slice %2 {second} : (tensor<8x16xf32>) -> tensor<{type_}xf32>",
        'return %3 "y", %4 "z"',
    )
    assert names(program) == ["all_reduce", "local_slice", "local_slice"]


def test_a_slice_over_other_axes_is_taken_before_the_sum() -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {model}, dim = 0} : (tensor<8x16xf32>) -> tensor<4x16xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["local_slice", "all_reduce"]
    assert sent(program, MESH) == 2 * 4 * 16 * 4 * 3 // 4


def test_a_slice_over_some_of_the_axes_shortens_the_sum_over_the_others() -> None:
    program = after(
        SUM_OF_BOTH,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x4xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["reduce_scatter", "all_reduce"]
    assert sent(program, MESH) == 8 * 12 * 4 + 8 * 4 * 4


@pytest.mark.parametrize("axes", ["data, model", "model, data"])
def test_a_slice_over_more_axes_is_a_slice_of_the_scattered_sum(axes: str) -> None:
    program = after(
        SUM,
        f"%3 = spmd.local_slice %2 {{axes = {{{axes}}}, dim = 1}} : (tensor<8x16xf32>) -> tensor<8x2xf32>",
        'return %3 "y"',
    )
    in_front = axes.startswith("model")
    assert names(program) == ["reduce_scatter", "local_slice"][:: -1 if in_front else 1]


def test_the_sum_of_both_is_scattered_in_the_order_of_the_slice() -> None:
    program = after(
        SUM_OF_BOTH,
        "%3 = spmd.local_slice %2 {axes = {model, data}, dim = 0} : (tensor<8x16xf32>) -> tensor<1x16xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["reduce_scatter"]


def test_elementwise_ops_and_moves_between_are_done_on_slices() -> None:
    program = after(
        SUM_OF_BOTH,
        "%3 = stablehlo.tanh %1 : (tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%4 = stablehlo.multiply %2, %3 : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%5 = stablehlo.reshape %4 : (tensor<8x16xf32>) -> tensor<8x4x4xf32>",
        "%6 = stablehlo.transpose %5 {permutation = [2, 1, 0]} : (tensor<8x4x4xf32>) -> tensor<4x4x8xf32>",
        "%7 = spmd.local_slice %6 {axes = {data}, dim = 1} : (tensor<4x4x8xf32>) -> tensor<4x1x8xf32>",
        'return %7 "y"',
    )
    assert names(program) == [
        "reduce_scatter", "all_reduce", "tanh", "local_slice", "multiply", "reshape", "transpose",
    ]  # fmt: skip


def test_a_dim_that_a_reshape_takes_apart_elsewhere_stays() -> None:
    """The slice is of the inner part of dim 1: no slice of dim 1 is it."""
    program = after(
        SUM,
        "%3 = stablehlo.reshape %2 : (tensor<8x16xf32>) -> tensor<8x4x4xf32>",
        "%4 = spmd.local_slice %3 {axes = {data}, dim = 2} : (tensor<8x4x4xf32>) -> tensor<8x4x1xf32>",
        'return %4 "y"',
    )
    assert names(program) == ["all_reduce", "reshape", "local_slice"]


def test_several_slices_share_one_sum() -> None:
    """One is taken as it is, one of a convert, one is finer than the others."""
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x4xf32>",
        "%4 = stablehlo.convert %2 : (tensor<8x16xf32>) -> tensor<8x16xbf16>",
        "%5 = spmd.local_slice %4 {axes = {data}, dim = 1} : (tensor<8x16xbf16>) -> tensor<8x4xbf16>",
        "%6 = spmd.local_slice %2 {axes = {data, model}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x2xf32>",
        'return %3 "a", %5 "b", %6 "c"',
    )
    assert sorted(names(program)) == ["convert", "local_slice", "reduce_scatter"]


def test_sums_of_one_slice_are_both_scattered() -> None:
    program = after(
        SUM,
        "%3 = stablehlo.all_reduce %1 {axes = {data}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%4 = stablehlo.subtract %2, %3 : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%5 = spmd.local_slice %4 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        'return %5 "a"',
    )
    assert names(program) == ["reduce_scatter", "reduce_scatter", "subtract"]


def test_a_sum_of_a_sum_is_of_slices_too() -> None:
    program = after(
        SUM,
        "%3 = stablehlo.all_reduce %2 {axes = {model}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>",
        "%4 = spmd.local_slice %3 {axes = {data}, dim = 1} : (tensor<8x16xf32>) -> tensor<8x4xf32>",
        'return %4 "a"',
    )
    assert names(program) == ["reduce_scatter", "all_reduce"]
    assert sent(program, MESH) == 8 * 12 * 4 + 8 * 4 * 4


def test_the_maximum_is_scattered_like_a_sum() -> None:
    program = after(
        SUM.replace("add<f32>", "max<f32>"),
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["reduce_scatter"]


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


def test_a_slice_of_the_slice_is_one_more() -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {data}, dim = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>",
        "%4 = spmd.local_slice %3 {axes = {data}, dim = 1} : (tensor<2x16xf32>) -> tensor<2x4xf32>",
        "%5 = spmd.local_slice %3 {axes = {model}, dim = 1} : (tensor<2x16xf32>) -> tensor<2x8xf32>",
        'return %4 "y", %5 "z"',
    )
    assert names(program) == ["reduce_scatter", "local_slice", "local_slice"]
