"""Custom calls of users: a registered rule, and a registered local lowering, run."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.lowering.local.table import LocalOp


def double(op: LocalOp) -> tuple[int, ...]:
    """Stands for a kernel: this device's rows, doubled."""
    return (op.b.binary("add", op.operands[0], op.operands[0]),)


def sum_rows(op: LocalOp) -> tuple[int, ...]:
    """Stands for a kernel that sums over a dim which may be split, and padded."""
    masked = op.masked(0, 0, op.reduced_dims(0))
    ones = op.b.splat(1, op.b.types[masked].with_shape((op.b.types[masked].shape[1],)))
    from spmd.ir.types import DotDims

    attrs = {"dot_dimension_numbers": DotDims((), (), (1,), (0,))}
    return op.b.op("stablehlo.dot_general", (masked, ones), op.result_types(), attrs)


spmd.register_rule("test_double", "i j -> i j", lower=double)
spmd.register_rule(
    "test_sum_rows", "i j -> i", kinds={"j": "reduce"}, reduction="add", lower=sum_rows
)
spmd.register_rule("test_norm", "b h, h -> b h", kinds={"h": "replicate"})


def call(target: str, shape: tuple[int, ...], *args: Any) -> Any:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))(*args)


def test_a_custom_call_is_split_like_its_rule(mesh: spmd.Mesh) -> None:
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    step = spmd.jit(
        lambda x: call("test_double", (8, 8), x), mesh=mesh, in_specs=(("data", "model"),)
    )
    out = step(x)
    np.testing.assert_allclose(out, 2 * x)
    assert out.sharding.spec == jax.sharding.PartitionSpec("data", "model")
    assert not step.compile(x).collectives


@pytest.mark.parametrize("columns", [40_000, 39_999])
def test_a_reduced_factor_leaves_a_partial_sum(columns: int, mesh: spmd.Mesh) -> None:
    x = (np.arange(8 * columns) % 7).astype(np.float32).reshape(8, columns)

    def fn(x: jax.Array) -> Any:
        x = spmd.mark_sharding(x, mesh, ("data", "model"))
        return call("test_sum_rows", (8,), x)

    compiled = spmd.jit(fn, mesh=mesh, options=spmd.Options(check=True)).compile(x)
    np.testing.assert_allclose(compiled(x), x.sum(1))
    assert re.search(r"partial add {[^}]*model}", compiled.as_text("planned"))


def test_replicated_factors_are_gathered_and_the_call_is_kept(mesh: spmd.Mesh) -> None:
    x, w = np.ones((8, 8), np.float32), np.ones(8, np.float32)
    norm = lambda x, w: call("test_norm", (8, 8), x, w)  # noqa: E731
    lowered = spmd.jit(norm, mesh=mesh, in_specs=(("data", "model"), ("model",))).lower(x, w)
    text = lowered.as_text("local")
    assert "stablehlo.custom_call" in text
    assert "(tensor<2x8xf32>, tensor<8xf32>) -> tensor<2x8xf32>" in text


def test_rules_that_are_unclear_second_ones_or_do_not_fit_are_refused(mesh: spmd.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match="not a kind of factor"):
        spmd.register_rule("test_x", "i -> i", kinds={"i": "sum"})
    with pytest.raises(spmd.SpmdError, match="without saying how"):
        spmd.register_rule("test_x", "i -> ", kinds={"i": "reduce"})
    with pytest.raises(spmd.SpmdError, match="already has a rule"):
        spmd.register_rule("stablehlo.add", "i, i -> i")
    with pytest.raises(spmd.SpmdError, match="does not fit this use") as caught:
        spmd.jit(lambda x: call("test_double", (8,), x), mesh=mesh).lower(np.ones(8, np.float32))
    assert "tensor<8xf32>" in str(caught.value)
