"""Modules that were handed in as they are."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd


def test_a_modules_result_marks_are_kept_unless_a_spec_is_given(mesh):
    module = """module {
      sdy.mesh @mesh = <["data"=4, "model"=2]>
      func.func @main(%x: tensor<8x16xf32>) -> (
          tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
          tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}) {
        %0 = stablehlo.sine %x : tensor<8x16xf32>
        %1 = stablehlo.cosine %x : tensor<8x16xf32>
        return %0, %1 : tensor<8x16xf32>, tensor<8x16xf32>
      }
    }"""
    compiled = spmd.compile_stablehlo(module, mesh)
    assert [s.spec for s in compiled.out_shardings] == [P("data", "model"), P("model", None)]
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    np.testing.assert_allclose(compiled(x)[1], np.cos(x), rtol=1e-5, atol=1e-6)
    other = spmd.compile_stablehlo(module, mesh, result_specs=[(None, "data"), None])
    assert [s.spec for s in other.out_shardings] == [P(None, "data"), P("model", None)]


STEP = """module {
  func.func @main(%w: tensor<8x8xf32>, %h: tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<f32>) {
    %0 = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0]
      : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%h init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<4x8xf32>, tensor<f32>) -> tensor<f32>
    return %0, %1 : tensor<4x8xf32>, tensor<f32>
  }
}"""


def test_updates_of_a_module_are_donated_and_lie_like_their_arguments(mesh: spmd.Mesh) -> None:
    compiled = spmd.compile_stablehlo(STEP, mesh, [None, ("data", None)], updates=[(0, 1)])
    assert compiled.out_shardings[0] == compiled.in_shardings[1]
    w = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    first = jax.device_put(np.ones((4, 8), np.float32), compiled.in_shardings[1])
    second, total = compiled(w, first)
    assert first.is_deleted()
    assert float(total) == 32
    np.testing.assert_allclose(second, np.ones((4, 8)) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([(1, 1)], "result 1 cannot take the place of argument 1"),
        ([(0, 5)], "result 0 cannot take the place of argument 5"),
        ([(0, 1), (0, 1)], "(?s)result 0 cannot take.*each in one update"),
    ],
)
def test_updates_that_do_not_fit(updates: Any, message: str, mesh: spmd.Mesh) -> None:
    with pytest.raises(spmd.ArgumentError, match=message):
        spmd.lower_stablehlo(STEP, mesh, updates=updates)
