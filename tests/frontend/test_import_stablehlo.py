"""Modules that the importer refuses, and which function it takes."""

import pytest

from spmd.errors import FrontendError
from tests.frontend.imported import parsed

IDENTITY = "(%0: tensor<f32>) -> tensor<f32> { return %0 : tensor<f32> }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "func.func @main(%0: tensor<?xf32, #stablehlo.bounds<4>>) { return }",
            "the module has a dynamic shape",
        ),
        ("func.func @main(%0: tensor<*xf32>) { return }", "tensor<*xf32> cannot be partitioned"),
        (
            "func.func @main(%0: tensor<2xf32, 5 : i32>) { return }",
            "tensor<2xf32, 5 : i32> cannot be partitioned",
        ),
        (
            "func.func @main(%0: tuple<tensor<f32>>) { return }",
            "tuple<tensor<f32>> cannot be partitioned",
        ),
        (
            """func.func @main(%0: tensor<4xf32>, %1: tensor<f32>) -> tensor<f32> {
              %2 = "stablehlo.reduce"(%0, %1) ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                %c = stablehlo.add %a, %1 : tensor<f32>
                stablehlo.return %c : tensor<f32>
              }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
              return %2 : tensor<f32>
            }""",
            "stablehlo.add reads a value that is not visible",
        ),
    ],
)
def test_bad_modules_are_refused(text, message):
    with pytest.raises(FrontendError) as error:
        parsed(text)
    assert message in str(error.value)


def test_the_only_function_is_compiled_whatever_its_name():
    assert parsed(f"func.func @step{IDENTITY}").program.name == "step"
