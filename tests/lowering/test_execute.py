"""Emitted programs as plain data: compiled without the compiler's other results."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.ir.types import numpy_dtype
from spmd.lowering.execute import compile_emitted, options_within, x64_if

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


def test_a_memory_limit_reaches_the_scheduler_of_gpus() -> None:
    flag, gib = "xla_gpu_memory_limit_slop_factor", 1 << 30
    gpus = spmd.Topology("h200:8")
    given = [options_within(limit * gib, 6 * gib, gpus, {})[flag] for limit in (1, 7, 14, 60, 900)]
    assert given == sorted(given)
    assert given[0] == 1
    assert given[-1] == 95
    assert options_within(14 * gib, 0, gpus, {flag: 50}) == {flag: 50}  # the user's own stays
    assert options_within(14 * gib, 0, spmd.Topology("v5e:2x4"), {}) == {}
