"""Marks inside of programs. Manual regions are tested where they are lowered."""

import jax
import jax.numpy as jnp

from spmd.ir.types import ShardingAttr
from tests.frontend.imported import (
    OPEN,
    assert_source,
    imported,
    ops,
    parsed,
    sharded,
)


def test_sharding_constraints_become_marks():
    def fn(x):
        return jax.lax.with_sharding_constraint(x, sharded(("model", "data"), OPEN)) + 1

    found = imported(fn, jnp.ones((8, 8)))
    (mark,) = [op for op in found.program.walk() if op.name == "spmd.mark"]
    wanted = ShardingAttr(((("model", 1, 0), ("data", 1, 0)), ()), (False, True))
    assert mark.kind.attrs == {"sharding": wanted}
    assert mark.operands == found.program.body.args
    assert_source(mark, fn, "with_sharding_constraint", f"{fn.__qualname__}")


def test_groups_may_be_said_as_axes_and_parts_of_axes():
    text = """
    sdy.mesh @mesh = <["x"=2, "y"=4]>
    func.func @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
      %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x", "y"}, {}]>]
          out_shardings=[<@mesh, [{"x", "y"}, {}]>] manual_axes={"x", "y"} (%b: tensor<1x4xf32>) {
        %1 = "stablehlo.all_reduce"(%b) ({ ^bb0(%p: tensor<f32>, %q: tensor<f32>):
          %s = stablehlo.add %p, %q : tensor<f32>
          stablehlo.return %s : tensor<f32>
        }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
          use_global_device_ids, replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh,
            axes = [#stablehlo.axis_ref<name = "x">,
                    #stablehlo.axis_ref<name = "y", sub_axis_info = (2)2>]>
        } : (tensor<1x4xf32>) -> tensor<1x4xf32>
        sdy.return %1 : tensor<1x4xf32>
      } : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %0 : tensor<8x4xf32>
    }"""
    (reduction,) = ops(parsed(text), "all_reduce")
    assert reduction.kind.attrs["axes"] == (0, 2)  # the atoms are those of x, y:(1)2 and y:(2)2
