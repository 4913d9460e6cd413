"""Sums of which each device keeps a slice: before -> after, in ops, bytes and values."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

import pytest

from spmd.ir.program import Program
from spmd.lowering.optimize_dead import remove_dead
from spmd.lowering.optimize_reduce_scatter import reduce_scatter
from spmd.mesh.mesh import Mesh
from tests.lowering.local_programs import names, rewritten, sent

MESH = Mesh(None, (4, 2), ("data", "model"))


def scattered(program: Program) -> Program:
    return remove_dead(reduce_scatter(program, MESH))


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


def test_a_slice_over_other_axes_stays() -> None:
    program = after(
        SUM,
        "%3 = spmd.local_slice %2 {axes = {model}, dim = 0} : (tensor<8x16xf32>) -> tensor<4x16xf32>",
        'return %3 "y"',
    )
    assert names(program) == ["all_reduce", "local_slice"]


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
