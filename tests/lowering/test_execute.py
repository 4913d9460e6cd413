"""Emitted programs as plain data: compiled without the compiler's other results."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spmd
from spmd.ir.types import numpy_dtype
from spmd.lowering.execute import Outside, WithConstants, compile_emitted, x64_if

SQUARE = """module {{
  func.func @main(%x: tensor<8x{dtype}>) -> tensor<8x{dtype}> {{
    %0 = stablehlo.multiply %x, %x : tensor<8x{dtype}>
    return %0 : tensor<8x{dtype}>
  }}
}}"""


@pytest.mark.parametrize("dtype", ["i64", "ui64", "f64", "complex<f64>", "f32"])
def test_64_bits_stay_64_bits(dtype: str) -> None:
    mesh = spmd.make_mesh(data=8)
    lowered = spmd.lower_stablehlo(SQUARE.format(dtype=dtype), mesh, [("data",)])
    emitted = lowered.stages.emitted
    assert emitted.needs_x64 == (dtype != "f32")
    x = (np.arange(8) + 1e5).astype(numpy_dtype(dtype))  # squares that 32 bits cannot hold
    run = compile_emitted(emitted, {})
    with x64_if(emitted.needs_x64):
        (found,) = run(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found), x * x)


def test_a_program_with_constants_can_be_copied() -> None:
    ahead: Any = Outside(None, devices=())  # type: ignore[arg-type]
    program = WithConstants(SimpleNamespace(cost=1), None, ahead)  # type: ignore[arg-type]
    assert copy.copy(program).cost == 1
