"""What the importer takes from a module besides ops: names, shardings, meshes."""

import jax
import jax.numpy as jnp

from spmd.frontend.importer.module import import_module
from spmd.ir.types import ShardingAttr
from tests.frontend.imported import (
    X,
    imported,
    parsed,
    sharded,
    stablehlo,
)


def test_arguments_and_results_are_named():
    module = stablehlo(lambda p: {"loss": p["w"], "n": [p["w"]]}, {"w": X})
    program = import_module(module).program
    assert program.name == "main"
    assert program.arg_names == ("arg0",)
    assert program.result_names == ("['loss']", "['n'][0]")
    assert import_module(module, ["params/w"]).program.arg_names == ("params/w",)


def test_argument_and_result_shardings_are_kept():
    found = imported(
        lambda x, y: (x, y),
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharded("data", None)),
        jnp.ones(3),
        out_shardings=(sharded(None, "model"), None),
    )
    assert found.arg_marks == (ShardingAttr(((("data", 1, 0),), ()), (False, False)), None)
    assert found.result_marks[0] == ShardingAttr(((), (("model", 1, 0),)), (False, False))


def test_sub_axes_are_read():
    found = parsed("""
      sdy.mesh @mesh = <["x"=8]>
      func.func @main(%0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x":(2)4, ?}]>})
        -> tensor<8xf32> { return %0 : tensor<8xf32> }
    """)
    assert found.arg_marks == (ShardingAttr(((("x", 2, 4),),), (True,)),)


def test_a_module_without_marks_has_no_mesh():
    found = imported(lambda x: x, X)
    assert (found.arg_marks, found.result_marks) == ((None,), (None,))
