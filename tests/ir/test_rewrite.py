"""Equal ops are done once; what nobody reads, and what undoes itself, is not done."""

# ruff: noqa: E501 (program texts)

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.ir.program import Program
from spmd.ir.rewrite import dedupe, remove_dead
from tests.close import partitioned
from tests.ir.text_parse import parse_program

pytestmark = pytest.mark.usefixtures("devices8")

X = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
ORDERS = list(itertools.permutations(range(3)))


def transposes(lowered: spmd.Lowered | spmd.Compiled) -> int:
    return sum(op.name == "stablehlo.transpose" for op in lowered.stages.program.walk())


@given(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=4))
def test_transposes_that_undo_each_other_are_not_done(orders: list[tuple[int, ...]]) -> None:
    def there_and_back(x: Any) -> Any:
        for order in orders:
            x = jnp.transpose(x, order)
        for order in reversed(orders):
            x = jnp.transpose(x, np.argsort(order).tolist())
        return x * 2

    mesh = spmd.make_mesh(data=2)
    fn = spmd.jit(there_and_back, mesh=mesh, options=spmd.Options(check=True, planner="greedy"))
    assert transposes(fn.lower(jax.ShapeDtypeStruct(X.shape, X.dtype))) == 0


def test_what_is_read_in_between_stays() -> None:
    def fn(x: Any) -> Any:
        once = jnp.transpose(x, (1, 0, 2))
        return jnp.tanh(once), jnp.transpose(once, (1, 0, 2)) * 2

    assert transposes(partitioned(fn, X, mesh=spmd.make_mesh(data=2), tolerance=1e-6)) == 1


def labels(program: Program) -> list[str]:
    return [op.label for op in program.walk()]


def test_equal_collectives_are_done_once() -> None:
    before = """program @p(%0: tensor<2x4xf32> "x") {
      %1 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = [0, 1]} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %2 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = [0, 1]} : (tensor<2x4xf32>) -> tensor<8x4xf32>
      %3 = stablehlo.add %1, %2 : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
      return %3 "y"
    }"""
    after = dedupe(parse_program(before))
    assert labels(after) == ["all_gather", "add"]
    assert len(set(after.body.ops[1].operands)) == 1


def test_what_nobody_reads_is_dropped() -> None:
    before = """program @p(%0: tensor<4xf32> "x", %1: tensor<i1> "p") {
      %2 = stablehlo.negate %0 : (tensor<4xf32>) -> tensor<4xf32>
      %3 = stablehlo.tanh %0 : (tensor<4xf32>) -> tensor<4xf32>
      %4 = stablehlo.if %1 : (tensor<i1>) -> tensor<4xf32> {
        region() { return %0 }
        region() { return %3 }
      }
      return %3 "a"
    }"""
    assert labels(remove_dead(parse_program(before))) == ["tanh"]
